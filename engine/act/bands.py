"""How sure an action's predicted effect is: from what this console's own predictions came to, before that from fits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from engine.act.action import Proposal, kind_of
from engine.act.score import error_of, last_words

ENOUGH = 5
"""Measured actions of a kind from which their own errors count."""
SLOWED_STEP, POWER = 0.033, 0.038
"""Largest errors of readings left out of the heat fit (`rackside calibrate --heat profiles/heat/measured.yaml`):
throughput under a power cap, energy against the clock."""
CHANGED_STEP = 0.095
"""Nine of ten ratios between two published plans of one model on one cluster are off by less (`rackside validate
profiles/runs/published.yaml`, the pairs)."""
STEP = {"throttle": SLOWED_STEP, "clocklock": SLOWED_STEP, "microbatch": CHANGED_STEP, "rebalance": CHANGED_STEP}


@dataclass(frozen=True)
class Bands:
    """Half-widths as shares of the predicted value, which nine of ten outcomes are to stay within."""

    own: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """By kind of action and metric, from the log."""

    def of(self, proposal: Proposal) -> Proposal:
        """The proposal with the bands of its step and its power."""
        kind = kind_of(proposal.action)
        if kind not in STEP:
            return proposal
        step = self.own.get((kind, "step_s"), STEP[kind])
        power = self.own.get((kind, "power_w"), POWER)
        return replace(proposal, after=replace(proposal.after, step_band=step, power_band=power))


def learned(entries: Iterable[dict[str, Any]]) -> Bands:
    """From the log: the ninth decile of the errors of each kind of action that was measured often enough."""
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    for entry in last_words(entries):
        for metric in ("step_s", "power_w"):
            error = error_of(entry, metric, relative=True)
            if error is not None:
                errors[str(entry.get("action")), metric].append(abs(error))
    return Bands({key: float(np.quantile(of, 0.9)) for key, of in errors.items() if len(of) >= ENOUGH})
