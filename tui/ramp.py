"""Colour of a value: 16 levels of the inferno map, monotone in luminance, so that grey screens and colour-blind eyes
read it too; a terminal of 16 colours gets eight of its own, one without colours gets none and reads the figures."""

from __future__ import annotations

import math
from functools import lru_cache

from rich.color import Color
from rich.style import Style

# Inferno (matplotlib, CC0) sampled at 16 even places, the darkest end left out.
# fmt: off
INFERNO = (
    "#0c0826", "#200c4a", "#390963", "#510e6c", "#69166e", "#801f6c", "#982766", "#af315b",
    "#c43c4e", "#d74b3f", "#e65d2f", "#f1731d", "#f98c0a", "#fca60c", "#f9c932", "#f2e661",
)
# fmt: on
LEVELS = len(INFERNO)


@lru_cache(maxsize=64)
def style_of(level: int, selected: bool, mark: bool) -> Style:
    """Cell style of a level 0..15, or -1 for no value. Text is dark on light levels."""
    if level < 0:
        style = Style(color="grey62", dim=True)
    else:
        background = Color.parse(INFERNO[level])
        style = Style(color="#000000" if level >= 10 else "#ffffff", bgcolor=background.name, bold=mark)
    return style + Style(reverse=True, bold=True) if selected else style


def level_of(value: float, low: float, high: float) -> int:
    """0..15 for a value between low and high (clamped), -1 for NaN."""
    if math.isnan(value) or high <= low:
        return -1
    share = (value - low) / (high - low)
    return max(0, min(LEVELS - 1, int(share * LEVELS)))
