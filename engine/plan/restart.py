"""What a running job should be started with next: layers moved off slow stages, the busiest ranks on cool nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from engine.model import pace
from engine.model.predict import PlanError, Prediction, predict
from engine.model.work import stage_layers
from engine.plan.placement import Placement, place, seat
from engine.profile import Cluster, Model, Plan, Stack

Floats = npt.NDArray[np.float64]

WORTH = 0.002
"""A layer is moved for no less than this share of the step."""


@dataclass(frozen=True)
class Restart:
    """The plan to start with, its nodes in rank order, and the seconds of a step on the rack as it is: of the plan that
    runs and of this one. `says` tells each change."""

    plan: Plan
    placement: Placement
    now_s: float
    then_s: float
    says: tuple[str, ...]


def restart(model: Model, cluster: Cluster, stack: Stack, running: Plan, clock_share: Mapping[str, float]) -> Restart:
    """From the plan that runs. `clock_share` is each node's slowest clock over the job's fastest; what is missing runs
    free. PlanError when the running plan itself does not run there. A stage's time is its share of the work over its
    slowest node's clock: what the clock does not slow is taken as slowed, too."""
    found = predict(model, running, cluster, stack)
    listed = [n.name for n in cluster.nodes]
    seated = place(cluster, found)
    now_s = found.iteration_s * _longest(found, _speeds(found, cluster, listed, clock_share))
    speeds = _speeds(found, cluster, list(seated.hosts), clock_share)
    best, best_s = found, found.iteration_s * _longest(found, speeds)
    while (moved := _move(best, speeds, model, cluster, stack)) is not None and moved[1] < best_s * (1 - WORTH):
        best, best_s = moved
    return Restart(
        best.plan, seat(cluster, best, seated.hosts), now_s, best_s, _says(model, running, best.plan, listed, seated)
    )


def _move(
    found: Prediction, speeds: Floats, model: Model, cluster: Cluster, stack: Stack
) -> tuple[Prediction, float] | None:
    """One layer from the stage that takes longest to the one that takes least, predicted; None where it cannot be."""
    p = found.plan.parallelism
    if p.pipeline < 2 or p.interleave > 1 or p.zero_bubble:
        return None
    times = np.asarray(found.stage_load) / speeds
    layers = list(layers_of(model, found.plan))
    giver, taker = int(times.argmax()), int(times.argmin())
    if giver == taker or layers[giver] < 2:
        return None
    layers[giver] -= 1
    layers[taker] += 1
    stages = msgspec.structs.replace(p, stages=tuple(layers))
    try:
        trial = predict(model, msgspec.structs.replace(found.plan, parallelism=stages), cluster, stack)
    except PlanError:
        return None
    return (trial, trial.iteration_s * _longest(trial, speeds)) if trial.fits else None


def layers_of(model: Model, plan: Plan) -> tuple[int, ...]:
    """The layers of each pipeline stage."""
    p = plan.parallelism
    if isinstance(p.stages, tuple):
        return p.stages
    if p.stages == "even" or p.pipeline == 1:
        return (model.layers // p.pipeline,) * p.pipeline
    first, widest, last = (int(n) for n in stage_layers(model.layers, p.pipeline, p.stages))
    return (first, *(widest,) * (p.pipeline - 2), last)


def _speeds(found: Prediction, cluster: Cluster, hosts: list[str], clock_share: Mapping[str, float]) -> Floats:
    """The slowest node's clock share of each stage, with the nodes in this order."""
    stage = pace.stage_of_gpu(found.plan, found.dp, cluster.gpus)
    per_node = cluster.gpus_per_node
    shares = np.repeat([clock_share.get(host, 1.0) for host in hosts], per_node)[: len(stage)]
    return np.array([shares[stage == s].min(initial=1.0) for s in range(found.plan.parallelism.pipeline)])


def _longest(found: Prediction, speeds: Floats) -> float:
    """How much longer the slowest stage takes than where all run free."""
    return float((np.asarray(found.stage_load) / speeds).max())


def _says(model: Model, running: Plan, plan: Plan, listed: list[str], seated: Placement) -> tuple[str, ...]:
    out = []
    before, after = layers_of(model, running), layers_of(model, plan)
    if before != after:
        out.append(f"Layers of the stages: {', '.join(map(str, after))} instead of {', '.join(map(str, before))}.")
    if list(seated.hosts) != listed and seated.listed_c - seated.hottest_c >= 0.5:
        out.append(
            f"Hosts in rank order: {' '.join(seated.hosts)}; the hottest GPU settles at {seated.hottest_c:.0f} C "
            f"instead of {seated.listed_c:.0f} C."
        )
    return tuple(out)
