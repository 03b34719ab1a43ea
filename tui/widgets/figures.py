"""Numbers as they are written on the screen; what is not known is an em dash, never a zero."""

from __future__ import annotations

import math
import time

from engine.act.action import Outlook, Proposal

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


def effect_rows(p: Proposal) -> list[tuple[str, str]]:
    """What an action is predicted to do, a name and a change a row."""
    before, after = p.before, p.after
    step, power = after.step_band, after.power_band
    energy = None if step is None or power is None else math.hypot(step, power)
    rows = [
        ("step time", change(before.step_s, after.step_s, 2, "s") + _within(after.step_s, step, 2)),
        ("tokens/s", change(before.tokens_per_s, after.tokens_per_s, 0) + _within(after.tokens_per_s, step, 0)),
        ("hottest GPU", change(before.peak_c, after.peak_c, 0, "C") + _band(after)),
        ("GPU power", change(_kw(before.power_w), _kw(after.power_w), 1, "kW") + _within(_kw(after.power_w), power, 1)),
        ("energy a step", change(before.step_kj, after.step_kj, 1, "kJ") + _within(after.step_kj, energy, 1)),
    ]
    if before.memory_gib != after.memory_gib:
        rows.append(("memory a GPU", change(before.memory_gib, after.memory_gib, 0, "GiB")))
    return rows


def _within(value: float | None, share: float | None, digits: int) -> str:
    """Nine of ten outcomes."""
    if value is None or share is None or math.isnan(value):
        return ""
    return f"  {value * (1 - share):,.{digits}f}-{value * (1 + share):,.{digits}f}"


def _band(after: Outlook) -> str:
    band = after.peak_band_c
    return f"  {band[0]:.0f}-{band[1]:.0f} in 10 min" if band else ""


def _kw(watts: float | None) -> float | None:
    return None if watts is None else watts / 1000
