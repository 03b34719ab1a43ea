"""The links of one node: what they are, and what they carry, one row a link in the order the node lists them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

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


@dataclass(frozen=True, slots=True)
class Labels:
    """What links are called, a column each, in their order."""

    gpu: tuple[int, ...]
    kind: tuple[str, ...]
    name: tuple[str, ...]
    state: tuple[str, ...]
    to: tuple[str, ...]


@lru_cache(maxsize=256)
def _known(told: tuple[LinkFacts, ...]) -> tuple[tuple[LinkFacts, ...], Labels]:
    """Links made harmless, and their labels. Nodes of one kind have the same links: they share one value."""
    facts = tuple(_cleaned(link) for link in told)
    return facts, Labels(
        tuple(f.gpu for f in facts),
        tuple(f.kind for f in facts),
        tuple(f.name for f in facts),
        tuple(_state(f) for f in facts),
        tuple(f.to or "" for f in facts),
    )


class NodeLinks:
    """The links of one node. `rx` and `tx` in GB/s, `errors` since the driver started; NaN where none is known."""

    def __init__(self) -> None:
        self.labels = Labels((), (), (), (), ())
        self.peak = self.most = self.rx = self.tx = self.errors = self.well = np.zeros(0)
        self.dropped = 0

    def __len__(self) -> int:
        return len(self.labels.gpu)

    def restore(self, labels: Labels, peak: Sequence[float | None]) -> None:
        """Take links as they once were; ValueError when the columns differ in length."""
        counts = {len(peak), *(len(getattr(labels, name)) for name in Labels.__slots__)}
        if len(counts) != 1:
            raise ValueError(f"Links with columns of different lengths ({sorted(counts)}).")
        self.labels, self.peak = labels, np.array(peak, float)
        self._judge()
        self.rx = self.tx = self.errors = np.full(len(labels.gpu), np.nan)

    def count(self, errors: Sequence[float | None]) -> None:
        """Take their errors so far; a list of another length speaks of other links."""
        self.errors = np.array(errors if len(errors) == len(self) else [np.nan] * len(self), float)

    def clear(self) -> None:
        """Forget the rates: the node is gone."""
        self.rx, self.tx = np.full_like(self.rx, np.nan), np.full_like(self.tx, np.nan)

    def update(self, tick: Tick) -> bool:
        """Take a tick's rates; True when the links themselves changed."""
        changed = tick.links is not None
        if tick.links is not None:
            facts, self.labels = _known(tick.links[:MOST])
            self.peak = np.array([link.gb_s or link.best_gb_s or math.nan for link in facts], float)
            self._judge()
            self.most = np.nan_to_num(self.peak * SLACK, nan=math.inf)
            self.errors = np.full(len(facts), np.nan)
        self.rx, self.tx = self._rates(tick)
        if tick.link_errors is not None:
            self.count(tick.link_errors)
        return changed

    def _judge(self) -> None:
        self.well = np.array([state in ("active", "unknown") for state in self.labels.state], float)

    def _rates(self, tick: Tick) -> Floats:
        """Received and sent, GB/s, within what the links can carry; others become NaN and are counted. Lists of another
        length speak of other links and are not taken."""
        count = len(self)
        if len(tick.rx_mb_s) != count or len(tick.tx_mb_s) != count:
            return np.full((2, count), np.nan)
        rates = np.array((tick.rx_mb_s, tick.tx_mb_s), float)
        rates *= 1e-3
        with np.errstate(invalid="ignore"):
            bad = (rates < 0) | (rates > self.most)
        if bad.any():
            self.dropped += int(bad.sum())
            rates[bad] = np.nan
        return rates


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
