"""Numbers as they are written on the screen; what is not known is an em dash, never a zero."""

from __future__ import annotations

import math
import time

DASH = "—"


def number(value: float | None, digits: int = 0, unit: str = "") -> str:
    """`value` with its unit, or an em dash."""
    if value is None or math.isnan(value):
        return DASH
    return f"{value:,.{digits}f}{' ' + unit if unit else ''}"


def large(value: float | None) -> str:
    """12,345 as 12.3k, 4,500,000 as 4.50M."""
    if value is None or math.isnan(value):
        return DASH
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def change(before: float | None, after: float | None, digits: int = 1, unit: str = "") -> str:
    """`before -> after (+x %)`; a dash where one side is not known."""
    if before is None or after is None or math.isnan(before) or math.isnan(after):
        return f"{number(before, digits, unit)} -> {number(after, digits, unit)}"
    share = f" ({after / before - 1:+.1%})" if before else ""
    return f"{number(before, digits)} -> {number(after, digits, unit)}{share}"


def clock(unix_s: float) -> str:
    """Local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def age(seconds: float) -> str:
    """How long: 45 s, 12 min, 3.2 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
