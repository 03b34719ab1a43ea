"""`rackside bench guard`: a simulated hour with a failed fan, without the guard and with it, in virtual time.

The guard, the twin, the forecasts, the proposals and their predictions are the console's own; the rack and the job are
the simulator's. The guard sees whole degrees and watts, as sensors give them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rackside_hook import even_split, make_settings, split_for

from engine.act import effect, remedy
from engine.act.action import Action, ClockLock, Microbatch, Pause, Rebalance, Throttle
from engine.act.effect import Load, Rack
from engine.act.guard import Done, Guard, Sight
from engine.act.propose import JobView, Target
from engine.control.watch import Watch
from engine.model.thermal import FLOW_EXPONENT
from engine.profile import catalog
from engine.sim import rack as sim
from engine.sim.job import Job
from tui.output import progress

CLUSTER, MODEL, PLAN = "h200x32", "llama3-8b", "data-parallel"
WARM_S, HOUR_S = 900, 3600
FLOW = 0.5
"""Share of its air that the top node keeps: one of its two fan trays stands still."""


@dataclass
class Hour:
    """A rack, its job and, if `policy` is given, the guard that watches them. `second` moves all on."""

    policy: str | None
    failing: int = 3
    tokens: float = 0.0
    throttled_gpu_s: float = 0.0
    max_c: float = 0.0
    actions: list[dict[str, Any]] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.cluster = catalog.cluster(CLUSTER)
        self.rack = sim.Rack(self.cluster)
        names = [n.name for n in self.cluster.nodes]
        self.job = Job(self.rack, catalog.model(MODEL), catalog.plan(PLAN), "run", Path(), names)
        p = self.job.prediction
        self.counts, self.microbatch = tuple(even_split(p.microbatches * p.dp, p.dp)), p.plan.optimizations.microbatch
        self.watch = Watch(self.cluster)
        per_node = self.cluster.gpus_per_node
        self.nodes = [names[row // per_node] for row in range(self.cluster.gpus)]
        self.guard = Guard(catalog.thermal_policy(self.policy), self.nodes) if self.policy else None
        self.paused_s = 0.0
        self.back: dict[str, Action] = {}
        self._begin()

    def _begin(self) -> None:
        self.step_s = self.left_s = self.job.demand(self.job.predicted(self.microbatch), self.counts)

    def fail(self) -> None:
        """The fan stops: less air over the node's heatsinks, and hotter behind the front ones."""
        chassis = self.rack.boards.chassis
        rows = chassis.node == self.failing
        slower = replace(
            chassis,
            r_sink=np.where(rows, chassis.r_sink * FLOW**-FLOW_EXPONENT, chassis.r_sink),
            preheat_k_w=np.where(rows, chassis.preheat_k_w / FLOW, chassis.preheat_k_w),
        )
        self.rack.boards = replace(self.rack.boards, chassis=slower)

    def second(self, counted: bool) -> None:
        self.rack.advance(1.0)
        self.now += 1.0
        if self.paused_s > 0:
            self.paused_s -= 1.0
            if self.paused_s <= 0:
                self._begin()
        else:
            self.left_s -= 1.0
            while self.left_s <= 0 < self.step_s:
                over = self.left_s
                if counted:
                    self.tokens += self.job.prediction.tokens_per_iteration
                self._begin()
                self.left_s += over
        if counted:
            self.throttled_gpu_s += float(self.rack.thermally_slowed.sum())
            self.max_c = max(self.max_c, float(self.rack.temperature_c.max()))
        self.watch.take(np.round(self.rack.temperature_c), np.round(self.rack.power_w), self.rack.limit_w, 1.0)
        if self.guard is not None and self.now >= WARM_S / 2:
            self._guarded(self.guard)

    # What a console would see and do.

    def _rack(self) -> Rack:
        celsius, watts = np.round(self.rack.temperature_c), np.round(self.rack.power_w)
        settled, clock = self.watch.settled_c, self.rack.clock_mhz
        return effect.rack_of(self.cluster, self.watch.chassis, celsius, settled, watts, self.rack.limit_w, clock)

    def _load(self) -> Load:
        p = self.job.predicted(self.microbatch)
        tokens, memory = float(p.tokens_per_iteration), p.memory.total_gib
        return Load(p.pace, self.job.replica, np.asarray(self.counts), self.step_s, tokens, memory)

    def _view(self) -> JobView:
        def reload(microbatch: int) -> Load:
            p = self.job.predicted(microbatch)
            return replace(self._load(), pace=p.pace, microbatches=np.asarray(self._split(microbatch)))

        can, batch = frozenset({"microbatch", "rebalance", "pause", "resume"}), self.job.plan.global_batch
        return JobView("run", batch, self.microbatch, self.counts, can, self._load(), 300.0, self.paused_s > 0, reload)

    def _split(self, microbatch: int) -> tuple[int, ...]:
        before = make_settings(0, self.microbatch, self.counts)
        return tuple(split_for(microbatch, before, self.job.plan.global_batch))

    def _target(self, rows: tuple[int, ...]) -> Target:
        count, per_node = len(rows), self.cluster.gpus_per_node
        devices = [self.rack.devices[r] for r in rows]
        return Target(
            label=f"{self.nodes[rows[0]]} GPU {', '.join(str(r % per_node) for r in rows)}",
            rows=rows,
            node=tuple(self.nodes[r] for r in rows),
            index=tuple(r % per_node for r in rows),
            min_w=tuple(d.power_limit_w.min for d in devices),
            max_w=tuple(d.power_limit_w.max for d in devices),
            default_w=tuple(d.power_limit_w.default for d in devices),
            max_mhz=tuple(d.clock.max for d in devices),
            reachable=(True,) * count,
        )

    def _guarded(self, guard: Guard) -> None:
        points = self.rack.boards.slowdown_c
        none, nan = np.zeros(len(self.nodes), bool), np.full(len(self.nodes), np.nan)
        celsius, held = np.round(self.rack.temperature_c), self.rack.thermally_slowed
        sight = Sight(self.now, celsius, points, held, none, nan, self.watch.forecast())
        limit = float(self.rack.boards.operating_c.min())
        for wish in guard.look(sight):
            for measure in wish.measures:
                target = self._target(wish.rows)
                p = remedy.proposal(measure, wish, self._rack(), self._load(), self._view(), target, limit)
                if p is None or p.refusal or not wish.rule.automatic:
                    guard.tried(wish, measure, self.now)
                    continue
                ticket = f"{len(self.actions)}"
                self.back[ticket] = self._do(p.action)
                guard.acted(wish, measure, ticket, self.now)
                self._log(wish.rule.name, p.title)
        done = guard.calm(self.now)
        if done is not None:
            self._take_back(guard, done, limit)

    def _take_back(self, guard: Guard, done: Done, limit: float) -> None:
        back, target = self.back[done.id], self._target(done.rows)
        below = limit - guard.policy.hysteresis_k
        if not remedy.stays_cool(back, self._rack(), self._load(), self._view(), target, below):
            guard.not_yet(done, self.now)
            return
        self._do(back)
        guard.undone(done, self.now)
        self._log(done.rule.name, "taken back")

    def _do(self, action: Action) -> Action:
        """Carry out; what would put it back."""
        if isinstance(action, Throttle | ClockLock):
            rows = [self.nodes.index(n) + i for n, of in action.values.items() for i in of]
            values = [np.inf if v is None else float(v) for of in action.values.values() for v in of.values()]
            column = self.rack.limit_w if isinstance(action, Throttle) else self.rack.lock_mhz
            before = column[rows].copy()
            column[rows] = values
            gone: dict[str, dict[int, float]] = {}
            for row, value in zip(rows, before, strict=True):
                gone.setdefault(self.nodes[row], {})[row % self.cluster.gpus_per_node] = float(value)
            return Throttle(gone) if isinstance(action, Throttle) else ClockLock(gone)
        if isinstance(action, Microbatch):
            before_m, self.counts = self.microbatch, self._split(action.microbatch)
            self.microbatch = action.microbatch
            return Microbatch("run", before_m)
        if isinstance(action, Rebalance):
            before_c, self.counts = self.counts, action.microbatches
            return Rebalance("run", before_c)
        assert isinstance(action, Pause)
        self.paused_s, self.left_s = action.seconds, 0.0
        self.rack.demand = sim.Demand.idle(len(self.nodes))
        return action

    def _log(self, rule: str, what: str) -> None:
        self.actions.append({"at_s": self.now - WARM_S, "rule": rule, "what": what})


def guarded(policy: str = "margin") -> dict[str, Any]:
    """Both hours."""
    return {"policy": policy, "cluster": CLUSTER, "flow": FLOW, "off": _hour(None), "on": _hour(policy)}


def _hour(policy: str | None) -> dict[str, Any]:
    hour = Hour(policy)
    for second in range(WARM_S + HOUR_S):
        if second == WARM_S:
            hour.fail()
        if second % 60 == 0:
            progress(f"guard {'on' if policy else 'off'}: minute {second // 60} of {(WARM_S + HOUR_S) // 60}")
        hour.second(counted=second >= WARM_S)
    progress()
    return {
        "max_temperature_c": hour.max_c,
        "throttled_gpu_s": hour.throttled_gpu_s,
        "tokens": hour.tokens,
        "actions": hour.actions,
    }


def text(found: dict[str, Any]) -> str:
    """To read."""
    off, on = found["off"], found["on"]
    less = 1 - on["throttled_gpu_s"] / max(off["throttled_gpu_s"], 1e-9)
    rows = [
        ("", "guard off", "guard on", ""),
        ("hottest GPU", f"{off['max_temperature_c']:.1f} C", f"{on['max_temperature_c']:.1f} C", ""),
        ("throttled", f"{off['throttled_gpu_s']:,.0f} GPU s", f"{on['throttled_gpu_s']:,.0f} GPU s", f"{-less:+.0%}"),
        (
            "tokens",
            f"{off['tokens'] / 1e6:,.0f} M",
            f"{on['tokens'] / 1e6:,.0f} M",
            f"{on['tokens'] / off['tokens'] - 1:+.1%}",
        ),
    ]
    lines = [f"{name:<12}{a:>16}{b:>16}  {c}".rstrip() for name, a, b, c in rows]
    lines += [f"{a['at_s']:>6.0f} s  {a['rule']}: {a['what']}" for a in on["actions"]]
    return "\n".join(lines)
