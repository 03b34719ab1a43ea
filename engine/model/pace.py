"""The effect of the rack on the job: which GPU runs which replica, and the step time when clocks or shares differ.

A synchronous step ends when its slowest replica has ended; a replica runs at the clock of its slowest GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.profile import Plan

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of a replica's step: for each microbatch a part that scales with the clock and one that does not,
    `fill` microbatches' worth of pipeline bubble, and `once_s` for the optimizer and exposed gradient traffic."""

    clocked_s: float
    fixed_s: float
    fill: float
    once_s: float


def replica_s(pace: Pace, microbatches: Ints, clock_share: Floats) -> Floats:
    """Seconds of each replica's step; `clock_share` is its slowest clock over the clock of the prediction."""
    each = pace.clocked_s / np.maximum(clock_share, 1e-3) + pace.fixed_s
    return np.asarray((microbatches + pace.fill * (microbatches > 0)) * each + pace.once_s)


def replica_of_gpu(plan: Plan, dp: int, gpus: int) -> Ints:
    """The data-parallel rank of each GPU, ranks numbered in the plan's order."""
    p = plan.parallelism
    apart = p.pipeline if p.order == "tp-cp-pp-dp" else 1
    return (np.arange(gpus) // (p.tensor * p.context * apart)) % dp


def stage_of_gpu(plan: Plan, dp: int, gpus: int) -> Ints:
    """The pipeline stage of each GPU, ranks numbered in the plan's order."""
    p = plan.parallelism
    apart = 1 if p.order == "tp-cp-pp-dp" else dp
    return (np.arange(gpus) // (p.tensor * p.context * apart)) % p.pipeline


def slowest(values: Floats, replica: Ints, dp: int) -> Floats:
    """The lowest value among each replica's GPUs; NaN (not read) never sets the pace."""
    out = np.full(dp, np.inf)
    known = ~np.isnan(values)
    np.minimum.at(out, replica[known], values[known])
    return np.where(np.isinf(out), np.nan, out)
