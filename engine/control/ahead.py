"""The twin's forecast by the rows of a snapshot, as what draws one needs it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.control.load import inventory_rows
from engine.control.watch import Watch
from engine.model.forecast import Forecast
from engine.telemetry.snapshot import Snapshot

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Course:
    """One GPU from now on, C: mean and the band of nine of ten outcomes at `times_s`, each (k,); where it settles under
    this load, where it begins to slow itself, and in how many seconds it is there (infinity: not within the ten
    minutes)."""

    times_s: Floats
    celsius: Floats
    low: Floats
    high: Floats
    settled_c: float
    limit_c: float
    reaches_s: float


@dataclass(frozen=True)
class Ahead:
    """`rows` (n,): the forecast's row of each of the snapshot's, -1 where the inventory has none."""

    forecast: Forecast
    rows: npt.NDArray[np.int64]

    @property
    def settled_c(self) -> Floats:
        """Where each GPU of the snapshot is headed under its present load, C, (n,); NaN where nothing is known."""
        return self._of(self.forecast.settled_c)

    @property
    def reaches_s(self) -> Floats:
        """When each reaches its limit, s, (n,); infinity: not within ten minutes; NaN where nothing is known."""
        known = np.where(np.isnan(self.forecast.settled_c), np.nan, self.forecast.reaches_s)
        return self._of(known)

    def of(self, row: int) -> Course | None:
        """One GPU, by its row in the snapshot; None where nothing is known of it."""
        at, f = self.rows[row], self.forecast
        if at < 0 or np.isnan(f.settled_c[at]):
            return None
        lines = (f.celsius[at], f.low[at], f.high[at])
        return Course(f.times_s, *lines, float(f.settled_c[at]), float(f.limit_c[at]), float(f.reaches_s[at]))

    def _of(self, values: Floats) -> Floats:
        return np.where(self.rows < 0, np.nan, values[self.rows])


def ahead(watch: Watch, snapshot: Snapshot) -> Ahead | None:
    """None until the twin has seen something."""
    found = watch.ahead()
    if found is None:
        return None
    ours, theirs = inventory_rows(watch.cluster, snapshot)
    rows = np.full(len(snapshot.gpus), -1)
    rows[theirs] = ours
    return Ahead(found, rows)
