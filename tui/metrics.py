"""The metrics a rack can be coloured by: where they stand in a snapshot, their span, their unit, how they are shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.control.ahead import Ahead
from engine.model.forecast import HORIZON_S
from engine.telemetry.snapshot import GpuTable

Floats = npt.NDArray[np.float64]
FORESEEN_MIN = HORIZON_S / 60

# Bits that mean the GPU is held back: power cap, hardware slowdown, software and hardware thermal, power brake.
HELD_BACK = 0x4 | 0x8 | 0x20 | 0x40 | 0x80


@dataclass(frozen=True)
class Metric:
    """`values` of every GPU row, some of them from the forecast; colours run from `low` to `high`; `cell` writes one
    value in three columns."""

    key: str
    title: str
    unit: str
    low: float
    high: float
    values: Callable[[GpuTable, Ahead | None], Floats]
    cell: Callable[[float], str]

    def digits(self, values: Floats) -> npt.NDArray[np.int64]:
        """The one character (its code) that stands for each value: the tens of a temperature, else its share of the
        span in tenths."""
        known = np.nan_to_num(values)
        if self.key == "throttle":
            return np.array([ord(c) for c in "-cH"])[known.astype(np.int64)]
        if self.key == "limit":
            minutes = np.rint(FORESEEN_MIN - known).astype(np.int64)
            return np.where(known > 0, ord("0") + minutes % 10, ord(" "))
        share = known / 10 if self.unit == "C" else 10 * (known - self.low) / (self.high - self.low)
        return ord("0") + np.clip(share, 0, 9).astype(np.int64)


def _column(name: str) -> Callable[[GpuTable, Ahead | None], Floats]:
    return lambda table, _: table[name]


def _settled(table: GpuTable, ahead: Ahead | None) -> Floats:
    return np.full(len(table), np.nan) if ahead is None else ahead.settled_c


def _nearness(table: GpuTable, ahead: Ahead | None) -> Floats:
    """Minutes by which a GPU reaches its limit before the forecast's end: 10 is now, 0 not within it."""
    reaches = np.full(len(table), np.nan) if ahead is None else ahead.reaches_s
    return np.maximum(0.0, FORESEEN_MIN - reaches / 60)


def _minutes(nearness: float) -> str:
    return f"{FORESEEN_MIN - nearness:3.0f}" if nearness > 0 else " - "


def _memory_share(table: GpuTable, _: Ahead | None) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(100 * table["memory_used_mib"] / table["memory_total_mib"])


def _throttle(table: GpuTable, _: Ahead | None) -> Floats:
    """0 free, 1 held back by the power limit, 2 by heat or the board."""
    bits = table["throttle"]
    known = np.nan_to_num(bits).astype(np.int64)
    severity = np.where(known & (HELD_BACK & ~0x4), 2.0, np.where(known & 0x4, 1.0, 0.0))
    return np.where(np.isnan(bits), np.nan, severity)


def _whole(value: float) -> str:
    return f"{value:3.0f}"


def _tens(value: float) -> str:
    """Megahertz as hundredths of a gigahertz: 1980 -> 198."""
    return f"{value / 10:3.0f}"


METRICS = (
    Metric("temperature", "Temperature", "C", 30, 90, _column("temperature_c"), _whole),
    Metric("power", "Power", "W", 60, 700, _column("power_w"), _whole),
    Metric("clock", "SM clock", "x10 MHz", 300, 2000, _column("sm_clock_mhz"), _tens),
    Metric("utilization", "Utilisation", "%", 0, 100, _column("utilization_pct"), _whole),
    Metric("memory", "Memory", "%", 0, 100, _memory_share, _whole),
    Metric("settled", "Settles at", "C", 30, 90, _settled, _whole),
    Metric("limit", "Limit in", "min", 0, FORESEEN_MIN, _nearness, _minutes),
    Metric("throttle", "Throttle", "-/cap/HOT", 0, 2, _throttle, lambda v: (" - ", "cap", "HOT")[int(v)]),
)


def reasons(bits: float) -> str:
    """Throttle reasons in words; an em dash where the device did not say."""
    if np.isnan(bits):
        return "—"
    names = {
        0x1: "idle",
        0x2: "application clocks",
        0x4: "power cap",
        0x8: "hardware slowdown",
        0x10: "sync boost",
        0x20: "software thermal",
        0x40: "hardware thermal",
        0x80: "power brake",
    }
    return ", ".join(name for bit, name in names.items() if int(bits) & bit) or "none"
