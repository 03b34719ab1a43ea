"""Link rates from counters: one row a link, in the order the node lists them, as long as that order holds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.telemetry.reading import GpuFacts, Reading, Tick

Floats = npt.NDArray[np.float64]

PCIE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""Payload of one lane in one direction by generation, GB/s."""
DEGRADED_MB_S = 20_000
"""An NVLink below 20 GB/s is degraded: healthy ones of A100 and later run at 25 GB/s and more."""
SLACK = 1.1
"""A rate above the physical peak by more than this is a counter's jump, not traffic."""


@dataclass
class NodeLinks:
    """The links of one node between two ticks."""

    keys: tuple[tuple[int, str, str], ...] = ()
    state: tuple[str, ...] = ()
    peak: Floats = field(default_factory=lambda: np.zeros(0))
    rx: Floats = field(default_factory=lambda: np.zeros(0))
    tx: Floats = field(default_factory=lambda: np.zeros(0))
    dropped: int = 0
    _counted: tuple[float, Floats, Floats] | None = None

    def clear(self) -> None:
        """Forget the rates: the node is gone, and its counters may start anew."""
        self._counted = None
        self.rx, self.tx = np.full_like(self.rx, np.nan), np.full_like(self.tx, np.nan)

    def update(self, tick: Tick, facts: tuple[GpuFacts, ...]) -> None:
        """Take the counters of a tick and work out rates over the time since the last one."""
        keys, states, peaks, counters, rates = [], [], [], [], []
        for gpu, of_gpu in zip(tick.gpus, facts, strict=False):
            for link in gpu.nvlinks:
                keys.append((of_gpu.index, "nvlink", f"NVLink {link.link}"))
                slow = link.mb_s is not None and link.mb_s < DEGRADED_MB_S
                states.append("inactive" if link.active is False else "degraded" if slow else "active")
                peaks.append(link.mb_s / 1000 if link.mb_s else math.nan)
                counters.append((_number(link.rx_b), _number(link.tx_b)))
                rates.append((math.nan, math.nan))
            if gpu.pcie is not None:
                keys.append((of_gpu.index, "pcie", "PCIe"))
                states.append("active")
                peaks.append(pcie_peak(of_gpu))
                counters.append((_number(gpu.pcie.rx_b), _number(gpu.pcie.tx_b)))
                rates.append((_number(gpu.pcie.rx_b_s) / 1e9, _number(gpu.pcie.tx_b_s) / 1e9))
        for nic in tick.nics:
            keys.append((-1, "nic", nic.name))
            states.append("inactive" if nic.active is False else "active")
            peaks.append(nic.gbps / 8 if nic.gbps else math.nan)
            counters.append((_number(nic.rx_b), _number(nic.tx_b)))
            rates.append((math.nan, math.nan))
        self._rates(tick.time, tuple(keys), np.array(peaks, float), np.array(counters, float), np.array(rates, float))
        self.state = tuple(states)

    def _rates(
        self, now: float, keys: tuple[tuple[int, str, str], ...], peak: Floats, counters: Floats, told: Floats
    ) -> None:
        rx_b, tx_b = counters.reshape(-1, 2).T
        told_rx, told_tx = told.reshape(-1, 2).T
        before = self._counted if keys == self.keys else None
        self.keys, self.peak = keys, peak
        self._counted = (now, rx_b, tx_b)
        if before is None or now <= before[0]:
            self.rx, self.tx = told_rx.copy(), told_tx.copy()
            return
        seconds = now - before[0]
        rx = self._plausible((rx_b - before[1]) / seconds / 1e9, peak)
        tx = self._plausible((tx_b - before[2]) / seconds / 1e9, peak)
        self.rx = np.where(np.isnan(told_rx), rx, told_rx)
        self.tx = np.where(np.isnan(told_tx), tx, told_tx)

    def _plausible(self, rate: Floats, peak: Floats) -> Floats:
        """Rates of counters that grew, within what the link can carry; others become NaN and are counted."""
        with np.errstate(invalid="ignore"):
            bad = (rate < 0) | (rate > peak * SLACK)
        self.dropped += int(bad.sum())
        return np.where(bad, np.nan, rate)


def pcie_peak(facts: GpuFacts) -> float:
    """One direction of the GPU's PCIe port, GB/s."""
    if isinstance(facts.pcie_gen, (int, float)) and isinstance(facts.pcie_width, (int, float)):
        return PCIE_GB_S.get(int(facts.pcie_gen), math.nan) * facts.pcie_width
    return math.nan


def _number(reading: Reading) -> float:
    return math.nan if reading is None or isinstance(reading, str) else float(reading)
