"""Measured runs against the model: every row, every group, memory, and whether plans come out in the right order."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from engine.model.iteration import iteration
from engine.model.memory import GIB, memory
from engine.model.rates import rates
from engine.plan.measured import MEMORY, Table, memory_of
from engine.profile.run import Run

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """One comparison; `error` is predicted / measured - 1 of the time (positive: predicted too slow), or of memory."""

    id: str
    metric: str
    measured: float
    predicted: float
    error: float
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Errors:
    """Absolute relative errors of n rows, as fractions."""

    n: int
    median: float
    mean: float
    p90: float
    max: float


@dataclass(frozen=True)
class Ranking:
    """Plans of one model on one cluster: Kendall's tau-b of predicted against measured, and how much slower the plan
    that the model would have picked really is."""

    group: str
    n: int
    kendall_tau: float
    regret: float


@dataclass(frozen=True)
class Validation:
    """Everything that `rackside validate` prints."""

    failed: tuple[tuple[str, str], ...]
    rows: tuple[Row, ...]
    groups: tuple[tuple[str, str, Errors], ...]
    memory: tuple[Row, ...]
    ranking: tuple[Ranking, ...]
    changes: Errors
    """Of the ratio between two plans of one ranking group: how well the effect of a change is told."""


def validate(table: Table) -> Validation:
    """Predict every row with the constants of its device and stack profiles."""
    seconds, gib = np.zeros(len(table.runs)), np.zeros(len(table.runs))
    values = np.zeros(len(table.runs))
    for group in table.groups:
        constants = rates(group.device, group.stack, group.precision)
        seconds[group.rows] = iteration(group.work, group.device, constants).iteration_s
        values[group.rows] = group.value(seconds[group.rows])
        gib[group.rows] = memory(group.work, constants).total_gib
    truth = table.seconds
    rows, sizes = [], []
    for i, (run, name) in enumerate(zip(table.runs, table.metrics, strict=True)):
        if name is not None:
            error = float(seconds[i] / truth[i] - 1)
            rows.append(Row(run.id, name, float(table.measured[i]), float(values[i]), error, table.cases[i].assumed))
        size = memory_of(run)
        if size is not None:
            predicted = float(gib[i]) if size[0] == MEMORY[0] else float(gib[i] * GIB / 1e9)
            sizes.append(Row(run.id, size[0], size[1], predicted, predicted / size[1] - 1))
    by_id = {run.id: run for run in table.runs}
    found = _rankings(table, seconds)
    return Validation(table.failed, tuple(rows), _grouped(rows, by_id), tuple(sizes), *found)


def errors(rows: list[Row] | tuple[Row, ...]) -> Errors:
    """Summary of some rows; NaN when there are none."""
    return summary(np.array([row.error for row in rows]))


def summary(values: Floats) -> Errors:
    """Summary of signed relative errors; NaN when there are none."""
    if not len(values):
        return Errors(0, *(float("nan"),) * 4)
    e = np.abs(values)
    return Errors(len(e), float(np.median(e)), float(e.mean()), float(np.quantile(e, 0.9)), float(e.max()))


def _grouped(rows: list[Row], runs: dict[str, Run]) -> tuple[tuple[str, str, Errors], ...]:
    out = []
    for by in ("source", "hardware", "precision"):
        names: dict[str, list[Row]] = defaultdict(list)
        for row in rows:
            names[getattr(runs[row.id], by)].append(row)
        out += [(by, name, errors(of)) for name, of in sorted(names.items())]
    return tuple(out)


def _rankings(table: Table, predicted: Floats) -> tuple[tuple[Ranking, ...], Errors]:
    """Rows that differ only in the plan: same source, model, hardware, GPUs, global batch and precision."""
    truth = table.seconds
    groups: dict[str, list[int]] = defaultdict(list)
    for i, run in enumerate(table.runs):
        if not np.isnan(truth[i]) and run.batch.whole:
            m = run.model
            name = f"{m.name} s{m.seq} {run.hardware} x{run.gpus} gb{run.batch.whole} {run.precision}"
            groups[f"{name} ({run.source})"].append(i)
    out, ratios = [], []
    for name, rows in sorted(groups.items()):
        plans = {(table.cases[i].plan.parallelism, table.cases[i].plan.optimizations) for i in rows}
        if len(plans) < 2:
            continue
        p, t = predicted[rows], truth[rows]
        out.append(Ranking(name, len(rows), kendall_tau(p, t), float(t[int(np.argmin(p))] / t.min() - 1)))
        for a, b in combinations(range(len(rows)), 2):
            error = float(p[a] / p[b] / (t[a] / t[b]) - 1)
            ratios.append(Row(f"{name} {a}/{b}", "ratio", float(t[a] / t[b]), float(p[a] / p[b]), error))
    return tuple(out), errors(ratios)


def kendall_tau(a: Floats, b: Floats) -> float:
    """Kendall's tau-b, which counts ties in neither list as agreement (Kendall 1945); 0 when one list is all ties."""
    pairs = list(combinations(range(len(a)), 2))
    x = np.array([np.sign(a[i] - a[j]) for i, j in pairs])
    y = np.array([np.sign(b[i] - b[j]) for i, j in pairs])
    scale = np.sqrt(np.count_nonzero(x) * np.count_nonzero(y))
    return float((x * y).sum() / scale) if scale else 0.0
