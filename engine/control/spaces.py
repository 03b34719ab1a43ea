"""Where plans are looked for, as the Plans screen asks: of a question without a node, or of a job that runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine.control import load, offline, planning
from engine.control.planning import Answer, Progress, Question
from engine.job.status import JobStatus
from engine.model.predict import Prediction
from engine.plan.conditions import Conditions, limited, under
from engine.plan.search import Found, search
from engine.plan.space import Options
from engine.profile import Cluster, Plan, ProfileError, catalog
from engine.telemetry.snapshot import Snapshot

FRONT = ("tokens_per_s", "tokens_per_joule", "headroom_gib")
TOP = 400
"""The best by tokens/s that are shown, besides the front."""


@dataclass(frozen=True)
class Given:
    """A plan that is compared with those that are found; `measured_s` what its step takes where it runs."""

    name: str
    plan: Plan
    measured_s: float | None = None


@dataclass(frozen=True)
class Space:
    """`find` tries every plan, `predict` tells of one; both take long, and raise ProfileError with a sentence. `told`
    says what of a rack's present state goes into both."""

    title: str
    find: Callable[[Progress], tuple[int, Found]]
    predict: Callable[[Plan], Prediction]
    given: tuple[Given, ...] = ()
    told: tuple[str, ...] = ()


def asked(
    question: Question,
    given: Plan | None = None,
    find: Callable[[Question, Progress | None], list[Answer]] = planning.plans,
) -> Space:
    """Of a question about one cluster, with the profiles' own conditions."""

    def found(progress: Progress) -> tuple[int, Found]:
        (answer,) = find(question, progress)
        return answer.gpus, answer.found

    def predict(plan: Plan) -> Prediction:
        model, cluster = catalog.model(question.model), catalog.cluster(question.clusters[0])
        return offline.predicted(model, cluster, plan).found

    beside = () if given is None else (Given(given.name, given),)
    return Space(f"{question.model} on {question.clusters[0]}", found, predict, beside)


def of_job(job: JobStatus, cluster: Cluster, snapshot: Snapshot, now: Conditions) -> Space:
    """Of a job's model and batch on the nodes that it has, as they are now; its own plan beside. ProfileError where the
    job names no plan."""
    known = load.planned(job)
    if known is None:
        raise ProfileError(f"{job.name} names no model and plan to its hook: there is nothing to compare.")
    model, own = known.model, limited(known.plan, now)
    rows = load.replica_rows(job, cluster, snapshot, own)
    here = cluster
    if rows is not None:
        idle, first = [], 0
        for node in cluster.nodes:
            last = first + cluster.type_of(node).gpus
            idle += [node.name] * bool((rows[first:last] < 0).all())
            first = last
        here, _ = planning.without(cluster, idle)
    here = under(here, now)
    watts = own.optimizations.power_limit_w
    options = Options(power_limits_w=(watts,) if watts else (), precisions=(own.precision,))

    def find(progress: Progress) -> tuple[int, Found]:
        tell = lambda tried, seconds, done: progress(cluster.name, tried, seconds, done)  # noqa: E731
        found = search(
            model, here, catalog.stack(own.stack), own, pareto=FRONT, top=TOP, options=options, progress=tell
        )
        return here.gpus, found

    def predict(plan: Plan) -> Prediction:
        return offline.predicted(model, here, plan).found

    given = Given("now", msgspec.structs.replace(own, name="now"), job.step_s)
    return Space(f"{model.name}, as {job.name} trains it on {cluster.name} now", find, predict, (given,), now.told)
