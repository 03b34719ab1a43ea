"""What a run measured, as seconds an iteration, and a prediction in the unit that the run was measured in."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.model import gemm
from engine.model.layout import PlanError, replicas
from engine.model.work import Work, columns
from engine.plan.runs import Case, case_of
from engine.profile import Device, ProfileError, Stack
from engine.profile.run import Run

TIMES = ("tokens_per_s_per_gpu", "iteration_s", "hardware_tflops_per_gpu", "model_tflops_per_gpu")
"""What a run may have measured, the one to compare first."""
MEMORY = ("memory_gib", "memory_gb")

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Group:
    """Rows that share one device, stack and precision, so that one evaluation predicts them all. `unit` maps an
    iteration's seconds to the row's metric and back: value = unit / seconds, or seconds itself where `direct`."""

    device: Device
    stack: Stack
    precision: str
    rows: npt.NDArray[np.int64]
    work: Work
    unit: Floats
    direct: npt.NDArray[np.bool_]

    def value(self, seconds: Floats) -> Floats:
        """Seconds an iteration in each row's metric (and the reverse: the map is its own inverse)."""
        return np.where(self.direct, seconds, self.unit / seconds)


@dataclass(frozen=True)
class Table:
    """Rows that can be predicted, in groups, and those that cannot, with the reason."""

    runs: tuple[Run, ...]
    cases: tuple[Case, ...]
    metrics: tuple[str | None, ...]
    measured: Floats
    groups: tuple[Group, ...]
    failed: tuple[tuple[str, str], ...]

    @property
    def seconds(self) -> Floats:
        """Measured seconds an iteration; NaN where a row measured no time."""
        out = np.full(len(self.runs), np.nan)
        for group in self.groups:
            out[group.rows] = group.value(self.measured[group.rows])
        return out


def metric_of(run: Run) -> str | None:
    """The key under `measured` that is compared, or None when the row measured no time."""
    return next((name for name in TIMES if _positive(run.measured.get(name))), None)


def memory_of(run: Run) -> tuple[str, float] | None:
    """The key and value of a row's peak memory, if it has one."""
    name = next((name for name in MEMORY if _positive(run.measured.get(name))), None)
    return (name, float(run.measured[name] or 0)) if name else None


def table(runs: list[Run], unreadable: list[tuple[str, str]]) -> Table:
    """Lay out every row that can be, and say of each other row why not."""
    kept, cases, dps, failed = [], [], [], list(unreadable)
    for run in runs:
        try:
            if metric_of(run) is None and memory_of(run) is None:
                raise ProfileError("it has none of " + ", ".join((*TIMES, *MEMORY)) + " under measured.")
            case = case_of(run)
            case.cluster.device.peak_flops(case.plan.precision)
            dps.append(replicas(case.model, case.plan, case.cluster))
        except (ProfileError, PlanError) as error:
            failed.append((run.id, str(error)))
            continue
        kept.append(run)
        cases.append(case)
    metrics = tuple(metric_of(run) for run in kept)
    measured = np.array([float(r.measured[m] or 0) if m else np.nan for r, m in zip(kept, metrics, strict=True)])
    by: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        by[case.cluster.device.name, case.stack.name, case.plan.precision].append(index)
    groups = []
    for (_, _, precision), rows in by.items():
        work = columns([(cases[i].model, cases[i].plan, cases[i].cluster) for i in rows], [dps[i] for i in rows])
        stack = cases[rows[0]].stack
        units = _units(work, stack)
        names = [metrics[i] or "iteration_s" for i in rows]
        groups.append(
            Group(
                device=cases[rows[0]].cluster.device,
                stack=stack,
                precision=precision,
                rows=np.array(rows),
                work=work,
                unit=np.array([units[name][j] for j, name in enumerate(names)]),
                direct=np.array([name == "iteration_s" for name in names]),
            )
        )
    return Table(tuple(kept), tuple(cases), metrics, measured, tuple(groups), tuple(failed))


def _units(w: Work, stack: Stack) -> dict[str, Floats]:
    """Per metric what is divided by the seconds. FLOPs as the source counts them: the stack says whether attention
    is its causal half; hardware FLOPs as in SC'21 (arXiv 2104.04473, equation 3): the whole square, and a third more
    where the forward pass runs again."""
    tokens, each = w.tokens_per_iteration, w.gpus * 1e12
    half = gemm.model_flops_per_token(w)
    full = half + 6.0 * w.layers * w.seq * w.attention_width
    return {
        "iteration_s": np.ones(len(w)),
        "tokens_per_s_per_gpu": tokens / w.gpus,
        "hardware_tflops_per_gpu": tokens * full * (1 + w.recompute / 3) / each,
        "model_tflops_per_gpu": tokens * (full if stack.counts == "full" else half) / each,
    }


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")
