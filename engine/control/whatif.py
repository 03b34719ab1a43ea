"""What if: an action at a moment of a recording, the twin's answer beside what was recorded after it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.act.action import Proposal
from engine.control.replay import Replay
from engine.record.schema import Floats

AFTER_S = (10.0, 30.0, 60.0, 120.0, 180.0, 300.0, 420.0, 600.0)
WITHIN_S = 10.0
"""What was recorded at a moment is the mean of this much around it."""


@dataclass(frozen=True, slots=True)
class Row:
    """The rack `after_s` seconds after the moment: as recorded, as the twin foresees it without the action, and with
    it (`low_c`, `high_c`: nine of ten outcomes). NaN where nothing is known."""

    after_s: float
    recorded_c: float
    without_c: float
    with_c: float
    low_c: float
    high_c: float
    recorded_w: float
    without_w: float
    with_w: float


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The moment, the action that was not taken, and what would have come of it."""

    moment: float
    proposal: Proposal
    rows: tuple[Row, ...]


def what_if(replay: Replay, proposal: Proposal) -> WhatIf:
    """The next ten minutes after the moment that `replay` shows, with and without `proposal`."""
    moment, watch = replay.snapshot.time, replay.watch
    times = np.array(AFTER_S)
    before = watch.forecast(None, times)
    after = watch.forecast(proposal.after.gpu_w, times)
    now_w = watch.twin.mean_w
    watts = (
        now_w if proposal.after.gpu_w is None else np.where(np.isnan(proposal.after.gpu_w), now_w, proposal.after.gpu_w)
    )
    found = replay.reader.window(moment, moment + AFTER_S[-1] + WITHIN_S, ("temperature_c", "power_w"))
    rows = []
    for at, seconds in enumerate(AFTER_S):
        of = np.abs(found.times - moment - seconds) <= WITHIN_S / 2
        celsius, power = found.metrics["temperature_c"][of], found.metrics["power_w"][of]
        hottest = int(np.nanargmax(after.celsius[:, at])) if not np.isnan(after.celsius[:, at]).all() else None
        rows.append(
            Row(
                seconds,
                _hottest(celsius.mean(axis=0)) if of.any() else np.nan,
                _hottest(before.celsius[:, at]),
                _hottest(after.celsius[:, at]),
                np.nan if hottest is None else float(after.low[hottest, at]),
                np.nan if hottest is None else float(after.high[hottest, at]),
                _total(power.mean(axis=0)) if of.any() else np.nan,
                _total(now_w),
                _total(watts),
            )
        )
    return WhatIf(moment, proposal, tuple(rows))


def _hottest(celsius: Floats) -> float:
    return float(np.nanmax(celsius)) if not np.isnan(celsius).all() else np.nan


def _total(watts: Floats) -> float:
    return float(np.nansum(watts)) if not np.isnan(watts).all() else np.nan
