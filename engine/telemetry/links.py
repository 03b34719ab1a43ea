"""The links of one node: what they are, and what they carry, one row a link in the order the node lists them."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt

from engine.telemetry.reading import LinkFacts, Tick
from engine.telemetry.text import clean

Floats = npt.NDArray[np.float64]

DEGRADED_GB_S = 20.0
"""An NVLink below 20 GB/s is degraded: healthy ones of A100 and later run at 25 GB/s and more."""
DEGRADED_SHARE = 0.9
"""Any other link is degraded below this share of the rate it was built for."""
SLACK = 1.1
"""A rate above the physical peak by more than this is a counter's jump, not traffic."""
MOST = 4096
"""Links of one node that are taken; no node has more."""


class NodeLinks:
    """The links of one node. `rx` and `tx` in GB/s, `errors` since the driver started; NaN where none is known."""

    def __init__(self) -> None:
        self.facts: tuple[LinkFacts, ...] = ()
        self.states: tuple[str, ...] = ()
        self.peak = self.rx = self.tx = self.errors = np.zeros(0)
        self.dropped = 0

    def clear(self) -> None:
        """Forget the rates: the node is gone."""
        self.rx, self.tx = np.full_like(self.rx, np.nan), np.full_like(self.tx, np.nan)

    def update(self, tick: Tick) -> bool:
        """Take a tick's rates; True when the links themselves changed."""
        changed = tick.links is not None
        if tick.links is not None:
            self.facts = tuple(_cleaned(link) for link in tick.links[:MOST])
            self.states = tuple(_state(link) for link in self.facts)
            self.peak = np.array([link.gb_s or link.best_gb_s or math.nan for link in self.facts], float)
            self.errors = np.full(len(self.facts), np.nan)
        self.rx, self.tx = self._rates(tick.rx_mb_s), self._rates(tick.tx_mb_s)
        if tick.link_errors is not None:
            self.errors = self._aligned(tick.link_errors)
        return changed

    def _aligned(self, values: list[float | None]) -> Floats:
        """One value a link; a list of another length speaks of other links and is not taken."""
        if len(values) != len(self.facts):
            return np.full(len(self.facts), np.nan)
        return np.array(values, float)

    def _rates(self, mb_s: list[float | None]) -> Floats:
        """Rates within what the link can carry, GB/s; others become NaN and are counted."""
        rate = self._aligned(mb_s) / 1000
        with np.errstate(invalid="ignore"):
            bad = (rate < 0) | (rate > self.peak * SLACK)
        if bad.any():
            self.dropped += int(bad.sum())
            rate[bad] = np.nan
        return rate


def _state(link: LinkFacts) -> str:
    if link.state != "active" or link.gb_s is None:
        return link.state
    if link.kind == "nvlink":
        return "degraded" if link.gb_s < DEGRADED_GB_S else "active"
    return "degraded" if link.best_gb_s is not None and link.gb_s < DEGRADED_SHARE * link.best_gb_s else "active"


def _cleaned(link: LinkFacts) -> LinkFacts:
    kind, state = clean(link.kind, 12), link.state if link.state in ("active", "inactive") else "unknown"
    to = None if link.to is None else clean(link.to, 40)
    return msgspec.structs.replace(link, kind=kind, name=clean(link.name, 40), state=state, to=to)
