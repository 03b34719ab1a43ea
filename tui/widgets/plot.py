"""A line of history in block characters: pure text from numbers, at any width, with or without Unicode."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-:=+*#"

Floats = npt.NDArray[np.float64]


def sparkline(
    values: Floats, width: int, low: float | None = None, high: float | None = None, plain: bool = False
) -> str:
    """`width` characters, the newest value at the right; each is the mean of its share of the values, a gap where none
    was read. The span is low..high where given, else that of the values."""
    steps = ASCII if plain else BLOCKS
    if width <= 0 or not len(values):
        return " " * max(width, 0)
    known = values[~np.isnan(values)]
    if not len(known):
        return " " * width
    floor = float(known.min()) if low is None else low
    top = float(known.max()) if high is None else high
    means = binned(values, width)
    levels = np.nan_to_num((means - floor) / max(top - floor, 1e-9) * len(steps)).astype(int)
    glyphs = np.array(list(steps))[np.clip(levels, 0, len(steps) - 1)]
    return "".join(np.where(np.isnan(means), " ", glyphs).tolist()).rjust(width)


def columns(low: Floats, high: Floats, rows: int, bottom: float, top: float, plain: bool = False) -> list[str]:
    """`rows` lines, the highest first, a character for each value: filled up to `low`, hatched from there to `high`, in
    steps of an eighth of a line; where both end in one character, it shows what takes more of it. A gap where either is
    not known."""
    solid, hatched, steps = ("#", ":", ASCII) if plain else ("█", "▒", BLOCKS)
    known = ~(np.isnan(low) | np.isnan(high))
    scale = rows * len(steps) / max(top - bottom, 1e-9)
    lines = []
    for row in reversed(range(rows)):
        under, over = (
            np.clip(np.nan_to_num(edge - bottom) * scale - row * len(steps), 0, len(steps)).round().astype(int)
            for edge in (low, high)
        )
        glyphs = np.array([" ", *steps])
        inside = np.where(over == len(steps), hatched, glyphs[over])
        below = np.where(under == len(steps), solid, glyphs[under])
        line = np.where((under == len(steps)) | (under >= over - under), below, inside)
        lines.append("".join(np.where(known, line, " ").tolist()))
    return lines


def binned(values: Floats, width: int) -> Floats:
    """At most `width` means of neighbours, NaN where none is known."""
    if len(values) <= width:
        return values
    each, more = divmod(len(values), width)  # the first ones have one more
    starts = np.arange(width) * each + np.minimum(np.arange(width), more)
    known = ~np.isnan(values)
    count = np.add.reduceat(known.astype(int), starts)
    total = np.add.reduceat(np.where(known, values, 0.0), starts)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def bar(share: float, width: int, plain: bool = False, line: float | None = None) -> str:
    """A horizontal bar of `width` characters filled to `share` (0..1), with a tick at `line` where one is given; empty
    where the share is not known."""
    if np.isnan(share):
        return " " * width
    filled = round(max(0.0, min(1.0, share)) * width)
    drawn = ("#" if plain else "█") * filled + ("." if plain else "░") * (width - filled)
    if line is None:
        return drawn
    at = min(width - 1, round(line * width))
    return drawn[:at] + ("|" if plain else "│") + drawn[at + 1 :]
