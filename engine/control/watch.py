"""The twin beside the sensors of a cluster: fed by every snapshot, it forecasts, and says what it finds amiss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from engine.act import effect
from engine.act.alarm import Priority, Raised
from engine.act.effect import Load, Rack
from engine.control import load as loads
from engine.model import anomaly, limiter, observer, power, thermal
from engine.model.forecast import TIMES_S, Forecast, forecast
from engine.model.observer import WORDS
from engine.profile import Cluster
from engine.telemetry.snapshot import Snapshot

Floats = npt.NDArray[np.float64]

RAISE_S, CLEAR_S = 3.0, 10.0
"""A crossing must be forecast for so long before it is announced, and must be gone for so long to be withdrawn."""
WATCHED_S = 120.0
"""Nothing is called odd before the twin has watched for so long."""
CAPPED = 0.97
"""From this share of its limit on a board's power does not grow with its temperature."""
LEARNED_W = 0.04
"""Relative uncertainty of the power that the model expects after an action."""
BY_HEAT = 0x20 | 0x40
SLOWED, BRAKED = 0x8, 0x80
"""Throttle reasons of NVML: heat, in software or hardware; a hardware slowdown is heat unless the power brake is on."""
STAYS_S = 600.0
STAYS_HOT, COOLED = 0.5, 0.25
"""A node stays hot when heat held a GPU for more than half of the last ten minutes, and has cooled below a quarter."""
MANY = 4
"""More GPUs of one node than this are told as one."""


@dataclass(frozen=True)
class Throttling:
    """GPUs (inventory rows) that will slow themselves, when the first of them will, and what it does to the job."""

    rows: tuple[int, ...]
    first_s: float
    step_s: float | None
    slowed_step_s: float | None


class Watch:
    """State of the twin for one cluster, and of what it has announced. Rows are the inventory's."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.boards = limiter.boards_of(cluster)
        self.twin = observer.begin(self.boards.chassis)
        self.watched_s = 0.0
        self._forecast: Forecast | None = None
        n = len(self.boards.operating_c)
        self._limit_w = np.full(n, np.inf)
        self._said, self._quiet_s, self._sure_s = np.zeros(n, bool), np.zeros(n), np.zeros(n)
        self._odd_s = np.zeros(n)
        self._held_share, self._stays_hot = np.zeros(n), np.zeros(n, bool)
        self._names = cluster.slots

    def look(self, snapshot: Snapshot, seconds: float) -> None:
        """Take the readings of a snapshot, `seconds` after the last one."""
        celsius = loads.column(self.cluster, snapshot, "temperature_c")
        watts = loads.column(self.cluster, snapshot, "power_w")
        limit_w = loads.column(self.cluster, snapshot, "power_limit_w")
        self.take(celsius, watts, limit_w, seconds)
        self._held_share += (by_heat(self.cluster, snapshot) - self._held_share) * min(1.0, seconds / STAYS_S)
        self._stays_hot = self._held_share > np.where(self._stays_hot, COOLED, STAYS_HOT)

    def take(self, celsius: Floats, watts: Floats, limit_w: Floats, seconds: float) -> None:
        """One reading of every GPU; NaN where there is none."""
        if seconds <= 0:
            return
        self.twin = observer.advance(self.twin, celsius, watts, seconds)
        self.watched_s += seconds
        self._limit_w = np.where(np.isnan(limit_w), np.inf, limit_w)
        found = self.forecast()
        self._forecast = found
        coming = np.isfinite(found.reaches_s)
        self._sure_s = np.where(coming, self._sure_s + seconds, 0.0)
        self._quiet_s = np.where(coming, 0.0, self._quiet_s + seconds)
        self._said = (self._said | (self._sure_s >= RAISE_S)) & (self._quiet_s < CLEAR_S)
        odd = anomaly.excess(self.twin, found.settled_sd).odd if self.watched_s >= WATCHED_S else self._odd_s < 0
        self._odd_s = np.where(odd, self._odd_s + seconds, 0.0)

    def believed_c(self, celsius: Floats) -> Floats:
        """Readings as far as they are believed: the twin's own where a sensor lies."""
        return np.where(self.twin.fault > 0, observer.junction_c(self.twin), celsius)

    @property
    def settled_c(self) -> Floats:
        """Where each GPU is headed under its present load; NaN where it was not read."""
        return observer.settled_c(self.twin)

    @property
    def chassis(self) -> thermal.Chassis:
        """The chassis with the constants that were learned."""
        return observer.learned(self.twin)

    def forecast(self, power_w: Floats | None = None, times_s: Floats = TIMES_S) -> Forecast:
        """The next ten minutes under the present load, or under another mean power of each GPU, W (as an action's
        prediction gives it), which is then known only as well as the model knows it."""
        now_w = self.twin.mean_w
        watts = now_w if power_w is None else np.where(np.isnan(power_w), now_w, power_w)
        sd = None if power_w is None else LEARNED_W * np.abs(watts - now_w) + 0.005 * watts
        return forecast(self.twin, watts, self.boards.operating_c, self._feedback(watts), sd, times_s)

    def _feedback(self, watts: Floats) -> Floats:
        """What power grows with temperature, W/K: leakage, where no limit holds the board."""
        out, celsius = np.zeros(len(watts)), np.nan_to_num(observer.junction_c(self.twin), nan=60.0)
        for device, rows in self.boards.devices:
            out[rows] = device.power.leakage_per_k * power.leakage_w(device, celsius[rows])
        return np.where(watts > CAPPED * self._limit_w, 0.0, out)

    def ahead(self) -> Forecast | None:
        """The forecast for the present load, made once for each reading; None before the first."""
        if self._forecast is None and self.watched_s > 0:
            self._forecast = self.forecast()
        return self._forecast

    def throttling(self, found: Forecast, rack: Rack, load: Load | None) -> Throttling | None:
        """Which GPUs will slow themselves, and the job's step once their own protection holds them at their limit."""
        rows = np.flatnonzero(np.isfinite(found.reaches_s))
        if not len(rows):
            return None
        first = float(found.reaches_s[rows].min())
        if load is None:
            return Throttling(tuple(int(r) for r in rows), first, None, None)
        clock = self._held_clock(found, rack, rows)
        return Throttling(tuple(int(r) for r in rows), first, load.step_s, effect.step_at(rack, load, load, clock)[0])

    def _held_clock(self, found: Forecast, rack: Rack, rows: npt.NDArray[np.int64]) -> Floats:
        """The clock at which each of `rows` stays at its limit: that of the power which its cooling carries there."""
        chassis, clock = self.chassis, rack.clock_mhz.copy()
        flow = thermal.flow_for(chassis, self.twin.mean_w)
        r = chassis.r_die + chassis.r_sink * flow**-thermal.FLOW_EXPONENT
        air = thermal.air_c(chassis, self.twin.mean_w, flow)
        carried_w = np.maximum((self.boards.operating_c - air) / r, 1.0)
        activity = effect.activity(rack)
        for device, of in self.boards.devices:
            mine = np.intersect1d(rows, of)
            if len(mine):
                free = power.clock_under_limit(device, activity[mine], np.inf, rack.temperature_c[mine])
                held = power.clock_under_limit(device, activity[mine], carried_w[mine], found.limit_c[mine])
                clock[mine] = np.minimum(clock[mine], rack.clock_mhz[mine] * held / free)
        return clock

    # What is amiss.

    def raised(self, now: Callable[[], tuple[Rack, Load | None]]) -> list[Raised]:
        """Coming throttles, GPUs hotter than they should be, sensors that lie. `now` is asked only when it matters."""
        if self._forecast is None:
            return []
        return [*self._coming(self._forecast, now), *self._odd(self._forecast), *self._lies(), *self._to_drain()]

    def _coming(self, found: Forecast, now: Callable[[], tuple[Rack, Load | None]]) -> list[Raised]:
        rows = np.flatnonzero(self._said & np.isfinite(found.reaches_s) & (found.reaches_s > 0))
        if not len(rows):
            return []
        cost = self.throttling(found, *now())
        what = ""
        if cost and cost.step_s and cost.slowed_step_s and cost.slowed_step_s > 1.005 * cost.step_s:
            what = f"; the job's step would go from {cost.step_s:.2f} to {cost.slowed_step_s:.2f} s"
        out, by_node = [], defaultdict[str, list[int]](list)
        for row in rows[np.argsort(found.reaches_s[rows], kind="stable")]:
            by_node[self._names[row][0]].append(int(row))
        for node, of in by_node.items():
            for group in [of] if len(of) > MANY else [[r] for r in of]:
                first = group[0]
                slot, soon = self._names[first][1], found.reaches_s[first]
                who = f"{node} GPU {slot}" if len(group) == 1 else f"{node}: {len(group)} GPUs, GPU {slot} first,"
                verb = "reaches" if len(group) == 1 else "reach"
                text = f"{who} {verb} {found.limit_c[first]:.0f} C in {soon:.0f} s and will slow down{what}"
                key = f"coming:{node}:{slot if len(group) == 1 else 'many'}"
                out.append(Raised(key, Priority.WARNING, text, node, int(first)))
        return out

    def _odd(self, found: Forecast) -> list[Raised]:
        rows = np.flatnonzero(self._odd_s > 0)
        if not len(rows):
            return []
        seen, out = anomaly.excess(self.twin, found.settled_sd), []
        for row in rows:
            node, slot = self._names[row]
            text = (
                f"{node} GPU {slot} settles {seen.own_k[row]:.0f} K hotter than its power and air explain; its "
                f"neighbours stay within {seen.rest_k[row]:.0f} K: dust, paste or its airflow"
            )
            out.append(Raised(f"odd:{node}:{slot}", Priority.NOTICE, text, node, int(row)))
        return out

    def _to_drain(self) -> list[Raised]:
        """A node that stays hot is one to take out: advice, for a person to follow."""
        out = []
        rows = np.flatnonzero(self._stays_hot)
        for node in dict.fromkeys(self._names[r][0] for r in rows):
            worst = max((r for r in rows if self._names[r][0] == node), key=lambda r: float(self._held_share[r]))
            drain = f"scontrol update NodeName={node} State=DRAIN Reason=heat, and " if self.cluster.slurm else ""
            held = f"heat held GPU {self._names[worst][1]} for {self._held_share[worst]:.0%} of the last ten minutes"
            text = (
                f"{node} stays hot: {held}. If less work (r) does not cool it, drain it: "
                f"{drain}rackside plan --without {node}"
            )
            out.append(Raised(f"drain:{node}", Priority.WARNING, text, node, int(worst)))
        return out

    def _lies(self) -> list[Raised]:
        out, rows = [], np.flatnonzero(self.twin.fault)
        own_c = observer.junction_c(self.twin) if len(rows) else self.twin.last_c
        for row in rows:
            node, slot = self._names[row]
            text = (
                f"{node} GPU {slot}: its temperature reading {WORDS[self.twin.fault[row]]} "
                f"({self.twin.last_c[row]:.0f} C; the twin has {own_c[row]:.0f} C) "
                "and is not believed"
            )
            if self.twin.fault[row] != observer.JUMP or self.twin.fault_s[row] >= 3:
                out.append(Raised(f"sensor:{node}:{slot}", Priority.NOTICE, text, node, int(row)))
        return out


def by_heat(cluster: Cluster, snapshot: Snapshot) -> npt.NDArray[np.bool_]:
    """Where heat holds a GPU's clock now, one row a GPU of the inventory."""
    bits = np.nan_to_num(loads.column(cluster, snapshot, "throttle")).astype(np.int64)
    out: npt.NDArray[np.bool_] = ((bits & BY_HEAT) != 0) | (((bits & SLOWED) != 0) & ((bits & BRAKED) == 0))
    return out


def on_snapshot(raised: list[Raised], cluster: Cluster, snapshot: Snapshot) -> list[Raised]:
    """The same with rows of the snapshot, which a screen marks, instead of the inventory's."""
    ours, theirs = loads.inventory_rows(cluster, snapshot)
    rows = dict(zip(ours, theirs, strict=True))
    return [replace(r, row=rows.get(r.row, -1)) for r in raised]
