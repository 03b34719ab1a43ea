"""What came of an action: the job's steps and the rack's power after it took effect, the hottest GPU once settled."""

from __future__ import annotations

from statistics import fmean, median

import numpy as np

from engine.act.action import Outlook
from engine.act.effect import Rack
from engine.job.status import JobStatus

STEPS = 5
"""Whole steps whose median is the measured step."""
LEAST_S = 15.0
"""Seconds for the boards' power to settle; their temperature takes PEAK_S."""
PEAK_S = 600.0
LAST = 10
"""Snapshots whose mean power is the measured power: a step's bursts even out."""


class Measuring:
    """Gathers while one action alone is in force. `since` in unix seconds; steps after `step` are those under it."""

    def __init__(self, since: float, job: JobStatus | None, step: int | None) -> None:
        self._since, self._job = since, job.key if job else None
        # A limit takes hold within a step: the first whole one is the next.
        self._last = step if step is not None else (job.step + 1 if job else 0)
        self._steps: list[float] = []
        self._watts: list[float] = []
        self._told = False
        self.over = False

    def look(self, now: float, job: JobStatus | None, rack: Rack) -> Outlook | None:
        """Take one snapshot. The measured outlook when there is a new one: after some steps, and once more with the
        hottest GPU when the rack has settled. `over` is set when nothing more will come."""
        if (job.key if job and job.attached else None) != self._job:
            self.over = True
            return None
        if job is not None:
            self._take(job)
        self._watts = [*self._watts, float(np.nansum(rack.power_w))][-LAST:]
        settled = now - self._since >= PEAK_S
        enough = now - self._since >= LEAST_S and (job is None or len(self._steps) >= STEPS)
        if not (settled or (enough and not self._told)):
            return None
        self._told, self.over = True, settled
        step_s = median(self._steps[-STEPS:]) if self._steps else None
        hottest = None if np.isnan(rack.temperature_c).all() else float(np.nanmax(rack.temperature_c))
        tokens = _tokens_a_step(job)
        return Outlook(
            step_s=step_s,
            tokens_per_s=tokens / step_s if tokens and step_s else None,
            peak_c=hottest if settled else None,
            power_w=fmean(self._watts),
        )

    def _take(self, job: JobStatus) -> None:
        """The steps that ended since the last look and that began under the action."""
        new = job.step - max(self._last, job.step - len(job.recent_step_s))
        if new > 0:
            self._steps = [*self._steps, *job.recent_step_s[-new:]][-STEPS * 4 :]
            self._last = job.step


def _tokens_a_step(job: JobStatus | None) -> float | None:
    rate = job.tokens_per_s if job else None
    return rate * job.step_s if job and rate and job.step_s else None
