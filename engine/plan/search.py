"""The best plans of a space: evaluated in columns, held to constraints, ranked by an objective, explained."""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from engine.model import gemm, thermal
from engine.model.iteration import iteration, settled, throttled_share
from engine.model.memory import fullest_gib
from engine.model.rates import rates
from engine.model.work import Column, Work
from engine.plan.space import Options, chunks, plan_of
from engine.profile import Cluster, Model, Plan, ProfileError, Stack

HIGHER = ("tokens_per_s", "tokens_per_s_per_gpu", "tokens_per_joule", "mfu", "headroom_gib", "clock_share")
"""Metrics of which more is better; of every other, less."""
METRICS = (
    *HIGHER,
    "iteration_s",
    "cost_per_million_tokens",
    "temperature_c",
    "power_w",
    "throttled_share",
    "memory_gib",
    "bubble_share",
    "communication_share",
)
PLAN_KEYS = {
    "tensor": "tp",
    "pipeline": "pp",
    "data": "dp",
    "context": "cp",
    "expert": "ep",
    "interleave": "vpp",
    "zero": "zero",
    "microbatch": "micro",
    "recompute": "recompute",
    "power_limit_w": "power_limit_w",
}
COMPARE: dict[str, Callable[[Column, float], npt.NDArray[np.bool_]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
}

Progress = Callable[[int, float, float], None]
"""Told how many plans have been evaluated, the seconds that took, and the share of the space that is done."""


@dataclass(frozen=True)
class Constraint:
    """`name` of a metric or a plan key, a comparison, and a number."""

    name: str
    sign: str
    value: float

    def __str__(self) -> str:
        return f"{self.name}{self.sign}{self.value:g}"

    def miss(self, values: Column) -> Column:
        """How far each value misses, as a share of the bound; 0 where it holds."""
        off = np.abs(values - self.value) / max(abs(self.value), 1e-9)
        return np.where(COMPARE[self.sign](values, self.value), 0.0, np.maximum(off, 1e-9))


DEFAULT = Options()
FITS = Constraint("headroom_gib", ">=", 0.0)


@dataclass(frozen=True)
class Ranked:
    """A plan with its metrics; `behind` says which shown plan is at least as good in everything that was asked."""

    plan: Plan
    metrics: dict[str, float]
    behind: str = ""


@dataclass(frozen=True)
class Found:
    """A search's answer: the best plans, the Pareto front over the asked metrics, how much was tried and how fast.
    When nothing is left, `empty` says what emptied the space, and `nearest` is the plan that misses by least."""

    plans: tuple[Ranked, ...]
    front: tuple[Ranked, ...]
    tried: int
    seconds: float
    complete: bool
    empty: str = ""
    nearest: Ranked | None = None


@dataclass
class _Pool:
    """The best rows so far, with what they were ranked by."""

    works: list[Work] = field(default_factory=list)
    values: list[dict[str, Column]] = field(default_factory=list)

    def add(self, work: Work, values: dict[str, Column], rows: npt.NDArray[np.int64]) -> None:
        if len(rows):
            self.works.append(work.at(rows))
            self.values.append({name: column[rows] for name, column in values.items()})

    def merged(self) -> tuple[Work, dict[str, Column]] | None:
        if not self.works:
            return None
        values = {name: np.concatenate([v[name] for v in self.values]) for name in self.values[0]}
        return Work.join(self.works), values

    def keep(self, choose: Callable[[dict[str, Column]], npt.NDArray[np.int64]]) -> None:
        """Reduce to the rows that `choose` picks."""
        found = self.merged()
        if found is not None:
            work, values = found
            rows = choose(values)
            self.works, self.values = [], []
            self.add(work, values, rows)


def constraint(text: str) -> Constraint:
    """`temperature_c<83` as a Constraint. ProfileError with a sentence."""
    found = re.fullmatch(r"\s*([a-z_]+)\s*(<=|>=|<|>|=)\s*([-+\d.eE]+)\s*", text)
    names = (*METRICS, *PLAN_KEYS)
    if not found:
        raise ProfileError(f"'{text}' is no constraint; write a name, <, <=, >, >= or =, and a number.")
    name, sign, value = found.groups()
    if name not in names:
        raise ProfileError(f"There is no '{name}' to constrain; there are {', '.join(names)}.")
    try:
        return Constraint(name, sign, float(value))
    except ValueError:
        raise ProfileError(f"'{value}' in '{text}' is not a number.") from None


def evaluate(w: Work, model: Model, cluster: Cluster, stack: Stack, precision: str) -> dict[str, Column]:
    """Every metric of every row, by the functions that `predict` uses."""
    device, n = cluster.device, len(w)
    constants = rates(device, stack, precision)
    found = iteration(w, device, constants)
    seconds = found.iteration_s
    used = fullest_gib(w, constants)
    watts, celsius = settled(w, device, thermal.chassis_of(cluster), found)
    hosts_w = sum(cluster.type_of(node).host_w for node in cluster.nodes)
    total_w = watts * cluster.gpus + hosts_w
    tokens = w.tokens_per_iteration
    flops = tokens * gemm.model_flops_per_token(w)
    hours = seconds / 3600.0
    cost = total_w / 1000.0 * hours * cluster.price.per_kwh + cluster.gpus * hours * cluster.price.per_gpu_hour
    capacity = min(cluster.device_of(node).memory_gib for node in cluster.nodes)
    values = {
        "iteration_s": seconds,
        "tokens_per_s": tokens / seconds,
        "tokens_per_s_per_gpu": tokens / seconds / cluster.gpus,
        "tokens_per_joule": tokens / seconds / total_w,
        "cost_per_million_tokens": cost / tokens * 1e6,
        "mfu": flops / (seconds * cluster.gpus * device.peak_flops("bf16")),
        "temperature_c": celsius,
        "power_w": watts,
        "throttled_share": throttled_share(w, device, found, celsius),
        "clock_share": found.clock_mhz / device.clock.max,
        "memory_gib": used,
        "headroom_gib": capacity - used,
        "bubble_share": found.bubble_s / seconds,
        "communication_share": found.exposed_comm_s / seconds,
    }
    return {name: np.broadcast_to(column, (n,)) for name, column in values.items()}


def search(
    model: Model,
    cluster: Cluster,
    stack: Stack,
    plan: Plan,
    objective: str = "tokens_per_s",
    constraints: Sequence[Constraint] = (),
    pareto: Sequence[str] = (),
    top: int = 10,
    options: Options = DEFAULT,
    progress: Progress | None = None,
) -> Found:
    """Try the whole space. Interrupted (KeyboardInterrupt), it answers with what was found so far."""
    likes = _likes(plan, options)
    for name in (objective, *pareto):
        if name not in METRICS:
            raise ProfileError(f"There is no objective '{name}'; there are {', '.join(METRICS)}.")
    held = (FITS, *constraints)
    best, front, nearest = _Pool(), _Pool(), _Pool()
    left = np.zeros(len(held) + 1, np.int64)
    began, complete = time.perf_counter(), True
    try:
        for work, values, done in _evaluated(model, cluster, stack, plan, options):
            miss = np.stack([c.miss(_column(work, values, c.name)) for c in held])
            left += _survivors(miss)
            good = np.flatnonzero((miss == 0).all(axis=0))
            best.add(work, values, good[_order(values, objective, good)[:top]])
            best.keep(lambda v: _order(v, objective)[:top])
            if pareto:
                picked = {name: values[name][good] for name in pareto}
                front.add(work, values, good[pareto_rows(picked)])
                front.keep(lambda v: pareto_rows({name: v[name] for name in pareto}))
            if not left[-1]:
                nearest.add(work, values | {"miss": miss.sum(axis=0)}, np.array([int(miss.sum(axis=0).argmin())]))
                nearest.keep(lambda v: np.argsort(v["miss"])[:1])
            if progress:
                progress(int(left[0]), time.perf_counter() - began, done)
    except KeyboardInterrupt:
        complete = False
    seconds = time.perf_counter() - began
    if not left[-1]:
        close = next(iter(_ranked(nearest, likes)), None)
        why = "Interrupted before any plan was tried."
        if left[0] or complete:
            why = _emptied(left, held, model, cluster, plan)
        return Found((), (), int(left[0]), seconds, complete, why, close)
    asked = tuple(dict.fromkeys((objective, *pareto)))
    plans = _explained(_ranked(best, likes), asked)
    return Found(plans, tuple(_ranked(front, likes)), int(left[0]), seconds, complete)


def _likes(plan: Plan, options: Options) -> list[Plan]:
    """The plan in each precision that is searched."""
    return [msgspec.structs.replace(plan, precision=p) for p in options.precisions or (plan.precision,)]


def _evaluated(
    model: Model, cluster: Cluster, stack: Stack, plan: Plan, options: Options
) -> Iterator[tuple[Work, dict[str, Column], float]]:
    """Chunks of the space with their metrics and the share of it that they complete; `like` numbers the precision."""
    likes = _likes(plan, options)
    for number, like in enumerate(likes):
        for work, done in chunks(model, cluster, like, options):
            values = evaluate(work, model, cluster, stack, like.precision)
            yield work, values | {"like": np.full(len(work), float(number))}, (number + done) / len(likes)


def pareto_rows(values: dict[str, Column]) -> npt.NDArray[np.int64]:
    """Rows that no other row beats in one metric without losing in another; of equal rows the first."""
    names = list(values)
    points = np.stack([values[n] * (-1.0 if n in HIGHER else 1.0) for n in names], axis=1)
    if not len(points):
        return np.zeros(0, np.int64)
    rows = np.lexsort(points.T[::-1])
    kept = []
    while len(rows):
        first, rest = rows[0], rows[1:]
        kept.append(first)
        rows = rest[(points[rest] < points[first]).any(axis=1)]
    return np.array(kept, np.int64)


def _survivors(miss: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """How many rows are tried, and how many are left after each constraint in turn."""
    alive = np.ones(miss.shape[1], bool)
    out = [len(alive)]
    for row in miss:
        alive &= row == 0
        out.append(int(alive.sum()))
    return np.array(out, np.int64)


def _column(work: Work, values: dict[str, Column], name: str) -> Column:
    return values[name] if name in values else np.broadcast_to(getattr(work, PLAN_KEYS[name]), (len(work),))


def _order(
    values: dict[str, Column], objective: str, rows: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int64]:
    """Best first; of equals the one with more memory left."""
    pick = slice(None) if rows is None else rows
    key = values[objective][pick] * (-1.0 if objective in HIGHER else 1.0)
    return np.lexsort((values["memory_gib"][pick], key))


def _ranked(pool: _Pool, likes: Sequence[Plan]) -> Iterator[Ranked]:
    found = pool.merged()
    if found is not None:
        work, values = found
        for row in range(len(work)):
            metrics = {name: float(values[name][row]) for name in METRICS}
            yield Ranked(plan_of(work, row, likes[int(values["like"][row])]), metrics)


def _explained(plans: Iterator[Ranked], asked: tuple[str, ...]) -> tuple[Ranked, ...]:
    """Say of each plan which better one it loses to, or ties with, in everything that was asked."""
    out: list[Ranked] = []
    for plan in plans:
        mine = [plan.metrics[n] * (-1.0 if n in HIGHER else 1.0) for n in asked]
        behind = ""
        for place, other in enumerate(out, 1):
            theirs = [other.metrics[n] * (-1.0 if n in HIGHER else 1.0) for n in asked]
            if np.allclose(theirs, mine, rtol=1e-9):
                behind = f"ties with #{place}"
                break
            if all(t <= m for t, m in zip(theirs, mine, strict=True)):
                behind = f"loses to #{place} in everything asked"
                break
        out.append(Ranked(plan.plan, plan.metrics, behind))
    return tuple(out)


def _emptied(
    left: npt.NDArray[np.int64], held: Sequence[Constraint], model: Model, cluster: Cluster, plan: Plan
) -> str:
    if not left[0]:
        return (
            f"No shape divides {cluster.gpus} GPUs, {model.layers} layers, {model.heads} heads and a global batch of "
            f"{plan.global_batch} at once."
        )
    at = int(np.flatnonzero(left[1:] == 0)[0])
    what = "that it fits into memory" if held[at] is FITS else str(held[at])
    return f"Of {left[0]:,} plans {left[at]:,} were left before '{what}' was asked, and none after it."
