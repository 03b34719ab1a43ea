"""Plans for one model on one cluster, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from engine.model.predict import PlanError, Prediction, predict
from engine.profile import Cluster, Model, Parallelism, Plan, ProfileError, catalog


@dataclass(frozen=True, slots=True)
class Compared:
    """A plan with its prediction, or with the sentence why there is none."""

    label: str
    prediction: Prediction | str


def compare(model: Model, cluster: Cluster, plans: Sequence[tuple[str, Plan]]) -> list[Compared]:
    """Predict each plan."""
    out = []
    for label, plan in plans:
        try:
            out.append(Compared(label, predict(model, plan, cluster, catalog.stack(plan.stack))))
        except (PlanError, ProfileError) as error:
            out.append(Compared(label, str(error)))
    return out


def alternatives(model: Model, cluster: Cluster, running: Plan, most: int = 6) -> list[Compared]:
    """The running plan first, then the fastest others of the same batch, sequence and precision, those that fit first.

    Tensor and pipeline sizes are the powers of two that the cluster and the model take, microbatches 1 to 8.
    """
    found: dict[str, Compared] = {}
    stack = catalog.stack(running.stack)
    for tensor in (1, 2, 4, 8):
        for pipeline in (1, 2, 4, 8):
            for microbatch in (1, 2, 4, 8):
                shape = Parallelism(tensor=tensor, pipeline=pipeline, zero=running.parallelism.zero)
                plan = msgspec.structs.replace(
                    running,
                    parallelism=shape,
                    optimizations=msgspec.structs.replace(running.optimizations, microbatch=microbatch),
                )
                try:
                    prediction = predict(model, plan, cluster, stack)
                except (PlanError, ProfileError):
                    continue
                label = labelled(prediction)
                found[label] = Compared(label, prediction)
    (own,) = compare(model, cluster, [("running", running)])
    if not isinstance(own.prediction, str):
        found.pop(labelled(own.prediction), None)
        own = Compared(labelled(own.prediction), own.prediction)
    return [own, *sorted(found.values(), key=_rank)[: most - 1]]


def labelled(prediction: Prediction) -> str:
    """A plan's short name with the data-parallel size that the cluster gives it."""
    plan = prediction.plan
    shape = msgspec.structs.replace(plan.parallelism, data=prediction.dp)
    return msgspec.structs.replace(plan, parallelism=shape).label()


def _rank(row: Compared) -> tuple[bool, float]:
    assert not isinstance(row.prediction, str)
    return (not row.prediction.fits, row.prediction.iteration_s)
