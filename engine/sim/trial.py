"""Forecasts put to the test: the twin watches racks that are finer than it and unlike their profile.

Two trials, each with fresh random constants: how far forecasts of 60 s are off at steady load and across load steps,
and whether a throttle is announced half a minute before it happens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from engine.model import limiter, observer
from engine.model.forecast import Forecast, forecast
from engine.model.limiter import Demand
from engine.model.observer import Twin
from engine.model.power import leakage_w
from engine.profile import Cluster, catalog
from engine.sim.fine import DIE, FineRack

Floats = npt.NDArray[np.float64]

LEARN_S, TEST_S, AHEAD_S = 600, 900, 60
STEADY_AFTER_S = 120
"""A load counts as steady from so long after its last step."""
NOTICE_S = 30
AGREED_S = 3
"""A crossing is announced when it was forecast for so many seconds on end."""
BUSY = 0.92


@dataclass
class Watch:
    """A rack with the twin that watches its sensors, second by second."""

    rack: FineRack
    twin: Twin = field(init=False)

    def __post_init__(self) -> None:
        self._profile = limiter.boards_of(self.rack.cluster)
        self.twin = observer.begin(self._profile.chassis)

    def second(self) -> None:
        self.rack.advance(1.0)
        celsius, watts = self.rack.read()
        self.twin = observer.advance(self.twin, celsius, watts, 1.0)

    def load(self, activity: float) -> None:
        n = len(self.rack.power_w)
        self.rack.demand = Demand(np.full(n, activity), np.full(n, BUSY if activity else 0.0))

    def forecast(self, times_s: Floats) -> Forecast:
        """Under the load as it is measured now."""
        device, watts = self.rack.cluster.device, self.twin.mean_w
        growth = device.power.leakage_per_k * leakage_w(device, np.nan_to_num(observer.junction_c(self.twin)))
        growth = np.where(watts > 0.97 * self.rack.limit_w, 0.0, growth)
        return forecast(self.twin, watts, self._profile.operating_c, growth, times_s=times_s)


@dataclass(frozen=True)
class Accuracy:
    """Errors of forecasts of 60 s, K, against the true temperature; the share of outcomes inside the 90 % band."""

    steady_k: Floats
    step_k: Floats
    inside: npt.NDArray[np.bool_]


def accuracy(seed: int, cluster: str = "h100x64") -> Accuracy:
    """Ten minutes of learning, then a quarter of an hour of forecasts, a load step every few minutes."""
    chance = np.random.default_rng(seed)
    watch = Watch(FineRack(catalog.cluster(cluster), chance))
    steps, at = {}, 40
    while at < LEARN_S + TEST_S:
        steps[at] = float(chance.uniform(0.45, 1.0))
        at += int(chance.integers(150, 300))
    made: dict[int, tuple[Forecast, bool | None]] = {}
    steady: list[Floats] = []
    across: list[Floats] = []
    inside: list[npt.NDArray[np.bool_]] = []
    last = 0
    for second in range(LEARN_S + TEST_S):
        if second in steps:
            watch.load(steps[second])
            last = second
        watch.second()
        if second in made:
            then, kind = made.pop(second)
            true = watch.rack.now_c[DIE]
            if kind is not None:
                (steady if kind else across).append(np.abs(then.celsius[:, 0] - true))
                inside.append((true >= then.low[:, 0]) & (true <= then.high[:, 0]))
        if second >= LEARN_S and second % 5 == 0:
            since, coming = second - last, any(second < s <= second + AHEAD_S for s in steps)
            kind = None if coming else True if since >= STEADY_AFTER_S else False if 2 <= since <= AHEAD_S else None
            made[second + AHEAD_S] = (watch.forecast(np.array([float(AHEAD_S)])), kind)
    return Accuracy(np.concatenate(steady), np.concatenate(across), np.concatenate(inside))


@dataclass(frozen=True)
class Warnings:
    """Of every GPU and load step: whether it led to a throttle, announced in time or not, and false announcements
    among those that did not."""

    announced: int
    missed: int
    false_announced: int
    quiet: int


def warnings(seed: int, steps: int = 4) -> Warnings:
    """Load steps in the upper halves of badly cooled racks; some lead to a throttle and some do not."""
    chance = np.random.default_rng(seed)
    watch = Watch(FineRack(_upper_halves(4), chance))
    for second in range(LEARN_S):
        if second % 150 == 40:
            watch.load(float(chance.uniform(0.3, 0.6)))
        watch.second()
    total = Warnings(0, 0, 0, 0)
    for _ in range(steps):
        watch.load(float(chance.uniform(0.25, 0.4)))
        for _ in range(300):
            watch.second()
        watch.load(float(chance.uniform(0.7, 1.0)))
        total = _added(total, _step(watch))
    return total


def _step(watch: Watch) -> Warnings:
    n = len(watch.rack.power_w)
    said, throttled, agreed = np.full(n, np.inf), np.full(n, np.inf), np.zeros(n, int)
    already = watch.rack.throttled
    for second in range(480):
        watch.second()
        reached = watch.forecast(np.array([600.0])).reaches_s
        agreed = np.where(np.isfinite(reached), agreed + 1, 0)
        said = np.where((agreed >= AGREED_S) & np.isinf(said), second, said)
        throttled = np.where(watch.rack.throttled & np.isinf(throttled), second, throttled)
    hot = np.isfinite(throttled) & ~already
    in_time = hot & (said <= throttled - NOTICE_S)
    cool = ~np.isfinite(throttled) & ~already
    return Warnings(
        int(in_time.sum()), int((hot & ~in_time).sum()), int((cool & np.isfinite(said)).sum()), int(cool.sum())
    )


def _added(one: Warnings, other: Warnings) -> Warnings:
    return Warnings(
        one.announced + other.announced,
        one.missed + other.missed,
        one.false_announced + other.false_announced,
        one.quiet + other.quiet,
    )


def step_ms(gpus: int = 8192, rounds: int = 30) -> tuple[float, float]:
    """Milliseconds of one step of the rack's physics, and of one reading of the twin, for so many GPUs at once."""
    cluster = _large(gpus)
    boards = limiter.boards_of(cluster)
    state, chance = limiter.resting(boards), np.random.default_rng(1)
    demand = Demand(chance.uniform(0.6, 1.0, gpus), np.full(gpus, 0.9))
    limit = np.full(gpus, 500.0)  # low enough that every clock must be looked for
    twin = observer.begin(boards.chassis)
    physics, reading = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        state = limiter.advance(boards, state, demand, limit, 1.0)
        between = time.perf_counter()
        twin = observer.advance(twin, np.round(state.heat.junction_c), state.power_w, 1.0)
        physics.append(between - began)
        reading.append(time.perf_counter() - between)
    return float(np.median(physics) * 1e3), float(np.median(reading) * 1e3)


def _upper_halves(racks: int) -> Cluster:
    base = catalog.cluster("h200x32-hot")
    nodes = tuple(
        msgspec.structs.replace(node, name=f"{node.name}-{rack}", rack=f"r{rack}")
        for rack in range(racks)
        for node in base.nodes[2:]
    )
    warm = msgspec.structs.replace(base.inlet, bottom_c=base.inlet.bottom_c + 3.0)
    return msgspec.structs.replace(base, nodes=nodes, inlet=warm)


def _large(gpus: int) -> Cluster:
    base = catalog.cluster("h100x64")
    nodes = tuple(
        msgspec.structs.replace(base.nodes[i % 8], name=f"n{i:04d}", rack=f"r{i // 4}") for i in range(gpus // 8)
    )
    return msgspec.structs.replace(base, nodes=nodes)
