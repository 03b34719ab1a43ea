"""`rackside bench forecast`: the twin on simulated racks that are finer than it, with fresh constants each time."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.sim import trial
from tui.output import progress

RACKS, WARNED = 4, 4


def forecasts(seed: int | None) -> dict[str, Any]:
    """Both trials on several racks; `seed` repeats an earlier run."""
    first = int(np.random.default_rng(seed).integers(1 << 30)) if seed is None else seed
    found = []
    for number in range(RACKS):
        progress(f"forecasts on rack {number + 1} of {RACKS}")
        found.append(trial.accuracy(first + number))
    warned = []
    for number in range(WARNED):
        progress(f"warnings on racks {number + 1} of {WARNED}")
        warned.append(trial.warnings(first + number))
    progress()
    physics, reading = trial.step_ms()
    announced, missed = sum(w.announced for w in warned), sum(w.missed for w in warned)
    false, quiet = sum(w.false_announced for w in warned), sum(w.quiet for w in warned)
    return {
        "seed": first,
        "mae_60s_steady_c": float(np.concatenate([f.steady_k for f in found]).mean()),
        "mae_60s_step_c": float(np.concatenate([f.step_k for f in found]).mean()),
        "coverage_90": float(np.concatenate([f.inside for f in found]).mean()),
        "forecasts": int(sum(len(f.inside) for f in found)),
        "announced": announced,
        "missed": missed,
        "announced_share": announced / max(announced + missed, 1),
        "false_announced": false,
        "quiet": quiet,
        "false_share": false / max(quiet, 1),
        "step_ms_8192": physics,
        "observe_ms_8192": reading,
    }


def text(found: dict[str, Any]) -> str:
    """To read."""
    return "\n".join(
        [
            f"60 s ahead, mean error  {found['mae_60s_steady_c']:.2f} C at steady load, "
            f"{found['mae_60s_step_c']:.2f} C across a load step ({found['forecasts']:,} forecasts)",
            f"within the 90 % band    {found['coverage_90']:.1%}",
            f"throttles announced     {found['announced']} of {found['announced'] + found['missed']} at least "
            f"{trial.NOTICE_S} s before",
            f"announced in vain       {found['false_announced']} of {found['quiet']} that stayed cool",
            f"8,192 GPUs              {found['step_ms_8192']:.2f} ms a step of the rack, "
            f"{found['observe_ms_8192']:.2f} ms a reading of the twin",
            f"seed                    {found['seed']}",
        ]
    )
