"""Planning without a node: search the space on one cluster or several, put plans side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import msgspec

from engine.control import offline
from engine.control.offline import Predicted
from engine.model.iteration import PARTS
from engine.model.predict import Prediction, predict
from engine.plan import sweep as sweeping
from engine.plan.export import FORMATS, Exported
from engine.plan.imported import Imported, read, read_text
from engine.plan.placement import Placement, coolest, place
from engine.plan.search import Found, Ranked, constraint, search
from engine.plan.space import Options
from engine.plan.sweep import Size
from engine.profile import Cluster, Plan, ProfileError, catalog
from engine.profile.hardware import Precision

Progress = Callable[[str, int, float, float], None]
"""Told the cluster, how many of its plans have been tried, the seconds that took, and the share that is done."""


@dataclass(frozen=True)
class Question:
    """What is asked of a search: names of profiles, and what is held fast."""

    model: str
    clusters: tuple[str, ...]
    objective: str = "tokens_per_s"
    where: tuple[str, ...] = ()
    pareto: tuple[str, ...] = ()
    top: int = 10
    batch: int = 128
    sequence: int | None = None
    precision: tuple[str, ...] = ("bf16",)
    stack: str = "megatron-core"
    power_limits_w: tuple[float, ...] = ()
    without: tuple[str, ...] = ()
    gpus: int | None = None


@dataclass(frozen=True)
class Answer:
    """A search on one cluster; `missing` nodes were left out. `seats` says which node gets which ranks of the best."""

    cluster: str
    gpus: int
    missing: tuple[str, ...]
    found: Found
    seats: Placement | None = None


def plans(question: Question, progress: Progress | None = None) -> list[Answer]:
    """Search each cluster. ProfileError with a sentence for whatever is wrong in the question."""
    model, stack = catalog.model(question.model), catalog.stack(question.stack)
    options = Options(power_limits_w=question.power_limits_w, precisions=_precisions(question))
    constraints, like = [constraint(text) for text in question.where], _like(question)
    out = []
    for name in question.clusters:
        cluster, missing = without(catalog.cluster(name), question.without)
        if question.gpus:
            cluster = _reduced(cluster, question.gpus)
        for precision in question.precision:
            cluster.device.peak_flops(precision)
        _check_limits(cluster, question.power_limits_w)

        def told(tried: int, seconds: float, done: float, name: str = name) -> None:
            if progress:
                progress(name, tried, seconds, done)

        found = search(
            model,
            cluster,
            stack,
            like,
            question.objective,
            constraints,
            question.pareto,
            question.top,
            options,
            told,
        )
        best = next(iter(found.plans), None)
        seats = place(cluster, predict(model, best.plan, cluster, stack)) if best else None
        out.append(Answer(name, cluster.gpus, missing, found, seats))
        if not found.complete:
            break
    return out


def _precisions(question: Question) -> tuple[Precision, ...]:
    try:
        return msgspec.convert(question.precision, tuple[Precision, ...])
    except msgspec.ValidationError:
        known = ", ".join(get_args(Precision))
        raise ProfileError(f"'{', '.join(question.precision)}' is no list of precisions; there are {known}.") from None


def _reduced(cluster: Cluster, gpus: int) -> Cluster:
    if gpus > cluster.gpus or gpus % cluster.gpus_per_node:
        raise ProfileError(
            f"{cluster.name} gives its {cluster.gpus} GPUs in nodes of {cluster.gpus_per_node}; {gpus} cannot be had."
        )
    return coolest(cluster, gpus)


def sweep(question: Question) -> list[Size]:
    """The best plan of each cluster for GPT models from 2 to 530 billion weights: where one overtakes the other."""
    clusters = [catalog.cluster(name) for name in question.clusters]
    for cluster in clusters:
        cluster.device.peak_flops(question.precision[0])
    _precisions(question)
    constraints = [constraint(text) for text in question.where]
    found = sweeping.sweep(clusters, catalog.stack(question.stack), _like(question), constraints)
    names = dict(zip((c.name for c in clusters), question.clusters, strict=True))
    return [replace(size, best={names[name]: one for name, one in size.best.items()}) for size in found]


def without(cluster: Cluster, nodes: Sequence[str]) -> tuple[Cluster, tuple[str, ...]]:
    """The cluster less some of its nodes, and which of them it had."""
    missing = tuple(n.name for n in cluster.nodes if n.name in nodes)
    left = tuple(n for n in cluster.nodes if n.name not in nodes)
    if not left:
        raise ProfileError(f"Without {', '.join(missing)} no node of {cluster.name} is left.")
    return msgspec.structs.replace(cluster, nodes=left), missing


def answers_json(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Answers as JSON has them."""
    return [
        {
            "cluster": a.cluster,
            "gpus": a.gpus,
            "without": list(a.missing),
            "tried": a.found.tried,
            "seconds": a.found.seconds,
            "complete": a.found.complete,
            "plans": [ranked_json(r) for r in a.found.plans],
            "front": [ranked_json(r) for r in a.found.front],
            "empty": a.found.empty or None,
            "nearest": ranked_json(a.found.nearest) if a.found.nearest else None,
            "placement": asdict(a.seats) if a.seats else None,
        }
        for a in answers
    ]


def ranked_json(found: Ranked) -> dict[str, Any]:
    """One plan of an answer."""
    return {
        "label": label(found.plan),
        "behind": found.behind or None,
        **found.metrics,
        "plan": msgspec.to_builtins(found.plan),
    }


def label(plan: Plan) -> str:
    """A plan in a line: shape, chunks, sharding, recompute, and what is unusual."""
    p, o = plan.parallelism, plan.optimizations
    parts = [plan.label(), f"v{p.interleave}" if p.interleave > 1 else "", f"z{p.zero}"]
    parts += {"stash": [], "selective": ["sel"], "alternate": ["alt"], "recompute": ["rec"]}[o.activation]
    parts += [] if plan.precision == "bf16" else [plan.precision]
    parts += [] if o.overlap else ["bare"]
    parts += ["pp-dp"] if p.order == "tp-cp-pp-dp" else []
    parts += ["nosp"] if p.tensor > 1 and not p.sequence_parallel else []
    return " ".join(part for part in parts if part)


Rows = list[tuple[str, Predicted]]


def compared(model: str, clusters: Sequence[str], names: Sequence[str]) -> tuple[Rows, list[str]]:
    """Each named plan's prediction on each cluster, and a sentence for each that cannot be laid over one. ProfileError
    when there is none that can."""
    what, rows, not_laid = catalog.model(model), [], []
    for where in clusters:
        cluster = catalog.cluster(where)
        for name in names:
            plan, label = catalog.plan(name), f"{name} on {where}" if len(clusters) > 1 else name
            try:
                rows.append((label, offline.predicted(what, cluster, plan)))
            except ProfileError as error:
                not_laid.append(f"{label}: {error}")
    if not rows:
        raise ProfileError(" ".join(not_laid))
    return rows, not_laid


def difference(one: Prediction, other: Prediction, most: int = 3) -> tuple[float, list[tuple[str, float]]]:
    """Seconds by which `other`'s step is longer than `one`'s, and the largest terms of it, the largest first."""
    terms = [(name, getattr(other.breakdown, name) - getattr(one.breakdown, name)) for name in PARTS]
    terms.sort(key=lambda term: -abs(term[1]))
    return other.iteration_s - one.iteration_s, [t for t in terms[:most] if t[1]]


def compared_json(rows: Sequence[tuple[str, Predicted]]) -> list[dict[str, Any]]:
    """Compared plans as JSON has them; the difference is to the first."""
    out = []
    for name, asked in rows:
        seconds, terms = difference(rows[0][1].found, asked.found)
        told = offline.prediction_json(asked)
        out.append({**told, "name": name, "difference_s": seconds, "because": dict(terms)})
    return out


def exported(name: str, form: str) -> Exported:
    """A named plan in a framework's words, with a sentence for each thing that they do not carry."""
    return FORMATS[form](catalog.plan(name))


def imported(words: Sequence[str]) -> Imported:
    """A framework's words, or the one file that holds them, as a plan. ProfileError with a sentence."""
    if len(words) == 1 and Path(words[0]).expanduser().is_file():
        path = Path(words[0]).expanduser()
        try:
            return read_text(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ProfileError(f"{path}: cannot be read: {error}.") from None
    return read(words)


def imported_prediction(found: Imported, model: str | None, cluster: str) -> Predicted:
    """The imported plan's prediction, of the model given or else the one that was imported."""
    what = catalog.model(model) if model else found.model
    if what is None:
        raise ProfileError(f"The {found.form} words name no model's shape; say which with --model.")
    return offline.predicted(what, catalog.cluster(cluster), found.plan)


def _like(question: Question) -> Plan:
    """What is the same in every plan of the search."""
    try:
        return msgspec.convert(
            {
                "name": "searched",
                "parallelism": {},
                "precision": question.precision[0],
                "global_batch": question.batch,
                "sequence": question.sequence,
                "stack": question.stack,
            },
            Plan,
        )
    except msgspec.ValidationError as error:
        raise ProfileError(f"The plan to search for: {error}.") from None


def _check_limits(cluster: Cluster, limits: Sequence[float]) -> None:
    allowed = cluster.device.power_limit_w
    for watts in limits:
        if not allowed.min <= watts <= allowed.max:
            raise ProfileError(
                f"A power limit of {watts:g} W is outside what {cluster.device.name} takes: "
                f"{allowed.min:g} to {allowed.max:g} W."
            )
