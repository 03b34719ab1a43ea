"""Colour of a value: 16 levels of the inferno map, monotone in luminance, so that grey screens and colour-blind eyes
read it too; a terminal of 16 colours gets eight of its own, one without colours gets none and reads the figures."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
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


def levels_of(values: npt.NDArray[np.float64], low: float, high: float) -> npt.NDArray[np.int64]:
    """0..15 for each value between low and high (clamped), -1 for NaN."""
    if high <= low:
        return np.full(len(values), -1)
    levels = np.clip((values - low) / (high - low) * LEVELS, 0, LEVELS - 1)
    return np.where(np.isnan(values), -1, np.nan_to_num(levels)).astype(np.int64)
