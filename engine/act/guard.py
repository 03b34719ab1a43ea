"""The policy guard: what to do when rules hold, and when to take it back. It decides; others propose and carry out.

Pure of clocks and I/O: it is fed a `Sight` a tick and told what became of its wishes, so that the same guard runs on a
live cluster and on a simulated hour.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.model.forecast import Forecast
from engine.profile.policy import Condition, Measure, Policy, Rule

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

HOUR_S = 3600.0
SHARE_S = 60.0
"""Seconds over which the share that heat held a clock is taken."""
HARDEST = 4
"""A rule's measures are made harder at most so often: a limit's share is raised to that power."""


@dataclass(frozen=True)
class Sight:
    """One moment of every GPU of the inventory: `held` where heat holds its clock now, `link_share` its busiest link's
    share of its peak; NaN where nothing is read. `slowdown_c` is the device's own point."""

    time: float
    temperature_c: Floats
    slowdown_c: Floats
    held: Bools
    xid: Bools
    link_share: Floats
    forecast: Forecast


@dataclass(frozen=True)
class Wish:
    """What a rule wants done: its measures, for the GPUs (inventory rows) of a node on which it holds. `level` counts
    how often it acted there before."""

    rule: Rule
    measures: tuple[Measure, ...]
    node: str
    rows: tuple[int, ...]
    level: int
    why: str

    def text_of(self, measure: Measure) -> str:
        """One of its measures in words, and why."""
        return f"{self.node}: {self.why}: {measure.text()}"


@dataclass(frozen=True)
class Done:
    """Something that the guard did and that is in force: `id` is its ticket's."""

    id: str
    rule: Rule
    node: str
    rows: tuple[int, ...]
    time: float


@dataclass
class Guard:
    """State of the guard for one cluster; `nodes` names the node of each inventory row."""

    policy: Policy
    nodes: Sequence[str]
    done: list[Done] = field(default_factory=list)
    _held_s: dict[str, Floats] = field(default_factory=dict)
    _last: dict[tuple[str, str], float] = field(default_factory=dict)
    _level: dict[tuple[str, str], int] = field(default_factory=dict)
    _acted: deque[float] = field(default_factory=deque)
    _throttled: Floats = field(init=False)
    _calm_s: Floats = field(init=False)
    _time: float | None = None

    def __post_init__(self) -> None:
        self._throttled, self._calm_s = np.zeros(len(self.nodes)), np.zeros(len(self.nodes))
        self._names = np.asarray(self.nodes)

    def look(self, sight: Sight) -> list[Wish]:
        """What is to be done now, the most urgent rule first. `tried` and `acted` are to answer it."""
        seconds = 0.0 if self._time is None else max(0.0, sight.time - self._time)
        self._time = sight.time
        self._throttled += (sight.held - self._throttled) * min(1.0, seconds / SHARE_S)
        free, wishes, job_taken = np.ones(len(self.nodes), bool), [], False
        calm = np.ones(len(self.nodes), bool)
        for rule in self.policy.rules:
            holds = self._holds(rule.when, sight) & free
            free &= ~holds  # a hotter rule has it
            calm &= ~self._holds(rule.when, sight, self.policy.hysteresis_k)
            held = self._held_s.setdefault(rule.name, np.zeros(len(self.nodes)))
            held[:] = np.where(holds, held + seconds, 0.0)
            sure = holds & (held >= self.policy.dwell_s)
            for node in dict.fromkeys(self._names[sure]):
                rows = tuple(int(r) for r in np.flatnonzero(sure & (self._names == node)))
                wish = self._wish(rule, str(node), rows, sight, job_taken)
                if wish is not None:
                    wishes.append(wish)
                    job_taken = job_taken or any(m.of_job for m in wish.measures)
        self._calm_s = np.where(calm, self._calm_s + seconds, 0.0)
        return wishes

    def _holds(self, when: Condition, sight: Sight, margin_k: float = 0.0) -> Bools:
        """Where all that a condition asks for holds; with `margin_k`, where it has not been left by so much yet."""
        with np.errstate(invalid="ignore"):
            lowest = np.array([when.severity(float(c)) for c in np.unique(sight.slowdown_c)])
            severity = lowest[np.searchsorted(np.unique(sight.slowdown_c), sight.slowdown_c)]
            out: Bools = np.nan_to_num(sight.temperature_c, nan=-np.inf) > severity - margin_k
            if when.reaches_within_s is not None:
                out &= self._reaches(when, sight, margin_k)
            if when.throttled_share_above is not None:
                out &= self._throttled > when.throttled_share_above
            if when.link_share_above is not None:
                out &= np.nan_to_num(sight.link_share, nan=0.0) > when.link_share_above
            out &= sight.xid | (not when.xid)
            return out

    @staticmethod
    def _reaches(when: Condition, sight: Sight, margin_k: float) -> Bools:
        found, within = sight.forecast, when.reaches_within_s or 0.0
        limit = found.limit_c if when.reaches_c is None else np.full_like(found.limit_c, when.reaches_c)
        column = int(np.searchsorted(found.times_s, within, side="right"))
        soon = found.celsius[:, : max(1, column)].max(axis=1) if found.celsius.size else found.limit_c * np.nan
        exact = found.reaches_s <= within if when.reaches_c is None and not margin_k else np.zeros(len(limit), bool)
        return np.asarray((np.nan_to_num(soon, nan=-np.inf) > limit - margin_k - 1e-9) | exact)

    def _wish(self, rule: Rule, node: str, rows: tuple[int, ...], sight: Sight, job_taken: bool) -> Wish | None:
        """The rule's measures, if it may act there now. The job is changed once a tick, and once in `every_s`."""
        key, now = (rule.name, node), sight.time
        while self._acted and now - self._acted[0] > HOUR_S:
            self._acted.popleft()
        if now - self._last.get(key, -np.inf) < self.policy.every_s or len(self._acted) >= self.policy.most_an_hour:
            return None
        job_busy = job_taken or now - self._last.get(("job", ""), -np.inf) < self.policy.every_s
        measures = tuple(m for m in rule.do if not (m.of_job and job_busy))
        if not measures:
            return None
        celsius = sight.temperature_c[list(rows)]
        hottest = rows[int(np.nanargmax(np.where(np.isnan(celsius), -np.inf, celsius)))]
        soon = sight.forecast.reaches_s[hottest]
        why = f"{len(rows)} GPU{'s' * (len(rows) != 1)}, the hottest at {sight.temperature_c[hottest]:.0f} C"
        if rule.when.reaches_within_s is not None and 0 < soon < np.inf:
            why += f", at {sight.forecast.limit_c[hottest]:.0f} C in {soon:.0f} s"
        return Wish(rule, measures, node, rows, min(self._level.get(key, 0), HARDEST), why)

    def acted(self, wish: Wish, measure: Measure, ticket_id: str, time: float) -> None:
        """A measure of a wish is in force."""
        if measure.pause_s is None:  # a pause ends by itself
            self.done.append(Done(ticket_id, wish.rule, wish.node, wish.rows, time))
        self._acted.append(time)
        self.tried(wish, measure, time)
        self._level[wish.rule.name, wish.node] = wish.level + 1

    def tried(self, wish: Wish, measure: Measure, time: float) -> None:
        """A measure is on its way, was only advised, or could not be done: not asked for again before `every_s`."""
        self._last[wish.rule.name, wish.node] = time
        if measure.of_job:
            self._last["job", ""] = time

    def calm(self, now: float) -> Done | None:
        """What may be taken back now, if the forecast allows: the newest first, one in `every_s`."""
        if self.done and now - max(self._last.values(), default=-np.inf) >= self.policy.every_s:
            last = self.done[-1]
            if bool((self._calm_s[self._names == last.node] >= self.policy.restore_after_s).all()):
                return last
        return None

    def undone(self, done: Done, time: float) -> None:
        """It was taken back, or is gone by another hand."""
        self.done = [d for d in self.done if d.id != done.id]
        key = (done.rule.name, done.node)
        self._level[key] = max(0, self._level.get(key, 0) - 1)
        self._last[key] = time

    def not_yet(self, done: Done, time: float) -> None:
        """Taking it back would bring the heat back: looked at again after `restore_after_s`."""
        self._calm_s[self._names == done.node] = 0.0
        self._last[done.rule.name, done.node] = time


def share_at(share: float, level: int) -> float:
    """A share made harder each time it was not enough."""
    return float(share ** (level + 1))
