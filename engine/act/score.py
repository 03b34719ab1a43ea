"""How good this console's own predictions were: what it said of each action against what then was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

METRICS = (("step_s", "step time", True), ("power_w", "power", True), ("peak_c", "hottest GPU", False))
"""Each metric, its name, and whether its error is relative or in kelvin."""


@dataclass(frozen=True)
class Score:
    """Signed errors, predicted against measured: relative, or K. One an action."""

    metric: str
    relative: bool
    errors: tuple[float, ...]

    @property
    def median(self) -> float:
        """Of their sizes; NaN when there is none."""
        return median(abs(e) for e in self.errors) if self.errors else float("nan")

    @property
    def worst(self) -> float:
        """The one of largest size, with its sign."""
        return max(self.errors, key=abs, default=float("nan"))


def scores(entries: Iterable[dict[str, Any]]) -> tuple[Score, ...]:
    """From the log's lines, oldest first; the last word on each action counts."""
    last = last_words(entries)
    return tuple(
        Score(name, relative, tuple(e for entry in last if (e := error_of(entry, key, relative)) is not None))
        for key, name, relative in METRICS
    )


def last_words(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last line of each action that was measured."""
    last: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if isinstance(entry.get("measured"), dict):
            last[str(entry.get("id"))] = entry
    return list(last.values())


def error_of(entry: dict[str, Any], key: str, relative: bool) -> float | None:
    """How far a line's prediction of `key` was off: signed, relative or in its unit; None where it does not say."""
    predicted = entry.get("predicted")
    after = predicted.get("after") if isinstance(predicted, dict) else None
    said, came = (part.get(key) if isinstance(part, dict) else None for part in (after, entry["measured"]))
    if not isinstance(said, int | float) or not isinstance(came, int | float) or (relative and came <= 0):
        return None
    return said / came - 1 if relative else said - came
