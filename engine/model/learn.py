"""Learn a chassis from a recording, and say how far forecasts are off that were made with what was learned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.model import observer
from engine.model.forecast import forecast
from engine.model.observer import Twin
from engine.model.thermal import Chassis

Floats = npt.NDArray[np.float64]

LEARN_SHARE = 0.6
"""Share of a recording that is learned from; the rest is forecast."""
AHEAD_S = 60.0
EVERY = 5
"""A forecast is made at every so many readings."""
STEADY = 0.08
"""Relative change of power up to which a load counts as the same a minute later."""


@dataclass(frozen=True)
class Errors:
    """Mean absolute errors in K of the next reading and of the one a minute later (at the power that then was, where
    it stayed the same), with how many there were, and the share of the latter within the 90 % band."""

    step_k: float
    minute_k: float
    minutes: int
    inside: float


def learn(chassis: Chassis, times: Floats, celsius: Floats, watts: Floats) -> Twin:
    """The twin after the whole recording; arrays (t, n)."""
    twin = observer.begin(chassis)
    for at, seconds in enumerate(np.diff(times, prepend=times[0] - _usual_s(times))):
        twin = observer.advance(twin, celsius[at], watts[at], float(max(seconds, 1e-3)))
    return twin


def errors(chassis: Chassis, times: Floats, celsius: Floats, watts: Floats, limit_c: Floats) -> Errors:
    """Run a twin that starts from `chassis` and hold its forecasts against the readings."""
    twin, step = observer.begin(chassis), _usual_s(times)
    ahead = max(1, round(AHEAD_S / step))
    next_k, minute_k, inside = [], [], []
    for at, seconds in enumerate(np.diff(times, prepend=times[0] - step)):
        guess = observer.junction_c(twin)
        twin = observer.advance(twin, celsius[at], watts[at], float(max(seconds, 1e-3)))
        next_k.append(np.abs(guess - celsius[at]))
        later = at + ahead
        if at % EVERY or later >= len(times) or at < ahead:
            continue
        found = forecast(twin, twin.mean_w, limit_c, times_s=np.array([times[later] - times[at]]))
        then = celsius[later]
        with np.errstate(invalid="ignore"):
            same = np.abs(watts[at:later].mean(axis=0) - twin.mean_w) <= STEADY * twin.mean_w
        noise = observer.ROUNDING_VAR**0.5
        good = same & ~np.isnan(then) & ~np.isnan(found.celsius[:, 0])
        minute_k.append(np.abs(found.celsius[:, 0] - then)[good])
        inside.append(((then >= found.low[:, 0] - noise) & (then <= found.high[:, 0] + noise))[good])
    minutes = np.concatenate(minute_k) if minute_k else np.zeros(0)
    held = np.concatenate(inside) if inside else np.zeros(0)
    with np.errstate(all="ignore"):
        first = float(np.nanmean(np.array(next_k[1:]))) if len(next_k) > 1 else float("nan")
    return Errors(
        first, float(minutes.mean()) if len(minutes) else float("nan"), len(minutes),
        float(held.mean()) if len(held) else float("nan"),
    )  # fmt: skip


def split(times: Floats) -> int:
    """The first reading that is not learned from."""
    return max(1, int(len(times) * LEARN_SHARE))


def _usual_s(times: Floats) -> float:
    return float(np.median(np.diff(times))) if len(times) > 1 else 1.0
