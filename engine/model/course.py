"""The course of a plan on a rack, second by second: temperatures, clocks, what limits them, and the pace of the job."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.model import limiter, pace, power
from engine.model.limiter import Boards, Demand, State
from engine.model.predict import Prediction
from engine.profile import Cluster

Floats = npt.NDArray[np.float64]

STEP_S = 1.0
KEPT_S = 10.0
"""How often a moment is kept."""


@dataclass(frozen=True)
class Course:
    """Kept moments (t,) with every GPU's temperature and clock (t, n), the job's step and the GPUs' power in all; over
    the whole time, each GPU's share held by its power limit and by heat, its mean and its peak power, W (the peak while
    its kernels run), and the joules of GPUs and hosts."""

    times_s: Floats
    celsius: Floats
    clock_mhz: Floats
    step_s: Floats
    gpus_w: Floats
    capped_share: Floats
    heat_share: Floats
    mean_w: Floats
    peak_w: Floats
    energy_j: float
    node: npt.NDArray[np.int64]


def course(cluster: Cluster, found: Prediction, minutes: float) -> Course:
    """Run the predicted plan from a cold rack for so many minutes. A synchronous step ends with its slowest replica,
    and a replica goes at the clock of its slowest GPU; the others wait and cool."""
    boards = limiter.boards_of(cluster)
    plan, n = found.plan, cluster.gpus
    replica = pace.replica_of_gpu(plan, found.dp, n)
    limit = np.full(n, plan.optimizations.power_limit_w or cluster.device.power_limit_w.default)
    counts = np.full(found.dp, found.microbatches, np.int64)
    working = kernels_share(found)
    state, fastest = limiter.resting(boards), found.sm_clock_mhz
    kept: list[tuple[float, Floats, Floats, float, float]] = []
    capped, hot, total, peak, joules = np.zeros(n), np.zeros(n), np.zeros(n), np.zeros(n), 0.0
    hosts_w = sum(cluster.type_of(node).host_w for node in cluster.nodes)
    ticks = max(1, round(minutes * 60 / STEP_S))
    clock = np.full(n, fastest)
    for tick in range(ticks):
        slow = pace.slowest(np.minimum(clock / fastest, 1.0), replica, found.dp)
        times = pace.replica_s(found.pace, counts, slow)
        step_s = float(times.max())
        busy = working * (times / step_s)[replica]
        demand = Demand(np.full(n, found.busy_activity), busy)
        state = limiter.advance(boards, state, demand, limit, STEP_S)
        clock = state.clock_mhz
        capped += state.capped * STEP_S
        hot += (state.heat_cap_mhz < boards.clock_max_mhz) * STEP_S
        total += state.power_w * STEP_S
        peak = np.maximum(peak, np.minimum(burst_w(boards, demand, state), limit))
        joules += (float(state.power_w.sum()) + hosts_w) * STEP_S
        if tick % round(KEPT_S / STEP_S) == 0 or tick == ticks - 1:
            kept.append((tick * STEP_S, state.heat.junction_c, clock, step_s, float(state.power_w.sum())))
    seconds = ticks * STEP_S
    at, celsius, clocks, steps, watts = zip(*kept, strict=True)
    return Course(
        times_s=np.array(at),
        celsius=np.array(celsius),
        clock_mhz=np.array(clocks),
        step_s=np.array(steps),
        gpus_w=np.array(watts),
        capped_share=capped / seconds,
        heat_share=hot / seconds,
        mean_w=total / seconds,
        peak_w=peak,
        energy_j=joules,
        node=boards.chassis.node,
    )


def kernels_share(found: Prediction) -> float:
    """Share of the step in which a GPU of the slowest stage runs kernels."""
    b = found.breakdown
    return (b.compute_s + b.attention_s + b.elementwise_s + b.optimizer_s) / found.iteration_s


def burst_w(boards: Boards, demand: Demand, state: State) -> Floats:
    """Power while kernels run, without the waits in between: what a pipeline's microbatches draw in their turn."""
    without_waits = Demand(demand.activity, (demand.busy > 0).astype(float))
    return limiter.power_of(boards, without_waits, state.clock_mhz, state.heat.junction_c)


@dataclass(frozen=True)
class Held:
    """Every GPU's mean and highest temperature, and its mean clock, over the last minutes of a load: where the limiters
    hold it."""

    celsius: Floats
    peak_c: Floats
    clock_mhz: Floats
    node: npt.NDArray[np.int64]


def held(cluster: Cluster, watts: float, minutes: float = 30.0, over: float = 12.0) -> Held:
    """Ask every GPU for the activity that draws `watts` at the highest clock and 60 C, without a pause, and wait. The
    limiter's own coming and going is averaged over the last minutes."""
    boards = limiter.boards_of(cluster)
    n = cluster.gpus
    activity = np.empty(n)
    for device, rows in boards.devices:
        activity[rows] = power.activity_of(device, np.full(len(rows), watts), device.clock.max, 60.0)
    limit = np.concatenate([np.full(len(rows), device.power_limit_w.max) for device, rows in boards.devices])
    state, demand = limiter.resting(boards), Demand(activity, np.ones(n))
    celsius, peak, clock, counted = np.zeros(n), np.zeros(n), np.zeros(n), 0
    ticks = round(minutes * 60 / STEP_S)
    for tick in range(ticks):
        state = limiter.advance(boards, state, demand, limit, STEP_S)
        if tick >= ticks - over * 60 / STEP_S:
            celsius += state.heat.junction_c
            peak = np.maximum(peak, state.heat.junction_c)
            clock += state.clock_mhz
            counted += 1
    return Held(celsius / counted, peak, clock / counted, boards.chassis.node)
