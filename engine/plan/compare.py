"""Plans for one model on one cluster, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.model.predict import PlanError, Prediction, predict
from engine.plan.search import search
from engine.plan.space import ACTIVATIONS, Options
from engine.profile import Cluster, Model, Plan, ProfileError, catalog

SEVERAL = 4
"""Plans searched for each one shown: the same shape comes with several numbers of chunks."""


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
    """The running plan first, then the fastest others that fit, of the same batch, sequence, precision, sharding and
    recompute: one for each shape and microbatch, found by the planner's search of the whole space."""
    p, o = running.parallelism, running.optimizations
    options = Options(
        zero=(p.zero,),
        activations=(o.activation,) if o.activation in ACTIVATIONS else ACTIVATIONS,
        overlap=(o.overlap,),
        sequence_parallel=(p.sequence_parallel,),
        power_limits_w=(o.power_limit_w,) if o.power_limit_w else (),
        stages_inside=(p.order == "tp-cp-pp-dp",),
    )
    (own,) = compare(model, cluster, [("running", running)])
    if not isinstance(own.prediction, str):
        own = Compared(labelled(own.prediction), own.prediction)
    stack = catalog.stack(running.stack)
    rows: dict[str, Compared] = {own.label: own}
    for found in search(model, cluster, stack, running, top=SEVERAL * most, options=options).plans:
        prediction = predict(model, found.plan, cluster, stack)
        rows.setdefault(labelled(prediction), Compared(labelled(prediction), prediction))
    return list(rows.values())[:most]


def labelled(prediction: Prediction) -> str:
    """A plan's short name: the sizes above one. What is left of the GPUs are its replicas, named where they are all."""
    p = prediction.plan.parallelism
    sizes = {"TP": p.tensor, "PP": p.pipeline, "CP": p.context, "EP": p.expert}
    parts = [f"{name}{size}" for name, size in sizes.items() if size > 1] or [f"DP{prediction.dp}"]
    return " ".join([*parts, f"mb{prediction.plan.optimizations.microbatch}"])
