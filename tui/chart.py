"""A line over time as inline SVG: no script, no font and nothing else from elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, RIGHT = 960, 240, 64, 12, 28, 12
MOST = 900
"""Points of a line: one for each unit of its width."""


def chart(times: Floats, values: Floats, unit: str, marks: Sequence[tuple[float, str]] = (), peak: bool = False) -> str:
    """`values` over `times` (unix seconds), NaN a gap; `marks` are moments with what happened then. Where there are
    more values than points, each point is the mean of its share, or the largest where the `peak` matters."""
    begin, end = float(times[0]), float(times[-1])
    times, values = _thinned(times, values, peak)
    known = values[~np.isnan(values)]
    span_s = max(end - begin, 1e-9)
    ticks = _ticks(float(known.min()), float(known.max()))
    low, high = ticks[0], ticks[-1]

    def x(moment: float) -> float:
        return LEFT + (moment - begin) / span_s * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    out = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(unit)} over time">']
    for value in ticks:
        at = y(value)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        out.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>')
    out.append(f'<text x="8" y="{TOP + (HEIGHT - TOP - BOTTOM) / 2:.0f}">{escape(unit)}</text>')
    for share, anchor in ((0.0, "start"), (0.25, "middle"), (0.5, "middle"), (0.75, "middle"), (1.0, "end")):
        moment = begin + share * span_s
        said = time.strftime("%H:%M:%S", time.localtime(moment))
        out.append(f'<text x="{x(moment):.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{said}</text>')
    for moment, words in marks:
        if begin <= moment <= end:
            ends = f'x1="{x(moment):.1f}" x2="{x(moment):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"'
            out.append(f'<line class="mark" {ends}><title>{escape(words)}</title></line>')
    for stretch in _stretches(values):
        points = " ".join(f"{x(float(times[i])):.1f},{y(float(values[i])):.1f}" for i in stretch)
        if len(stretch) == 1:
            centre = points.split(",")
            out.append(f'<circle class="dot" cx="{centre[0]}" cy="{centre[1]}" r="2"/>')
        else:
            out.append(f'<polyline class="line" points="{points}"/>')
    return "\n".join([*out, "</svg>"])


def _thinned(times: Floats, values: Floats, peak: bool) -> tuple[Floats, Floats]:
    if len(times) <= MOST:
        return times, values
    of = np.nanmax if peak else np.nanmean
    bins = np.array_split(np.arange(len(times)), MOST)
    shares = [values[b] for b in bins]
    drawn = [float(of(s)) if not np.isnan(s).all() else np.nan for s in shares]
    return np.array([times[b].mean() for b in bins]), np.array(drawn)


def _ticks(low: float, high: float) -> list[float]:
    """Round figures around the values, four or so."""
    span = max(high - low, abs(high) * 0.02, 1e-6)
    rough = span / 4
    size = 10.0 ** np.floor(np.log10(rough))
    step = float(next(size * k for k in (1, 2, 5, 10) if size * k >= rough))
    first = np.floor(low / step)
    count = int(np.ceil(high / step) - first) or 1
    return [round(float((first + k) * step), 9) for k in range(count + 1)]


def _stretches(values: Floats) -> list[list[int]]:
    """Runs of values between gaps."""
    out: list[list[int]] = [[]]
    for at, value in enumerate(values):
        if np.isnan(value):
            out.append([])
        else:
            out[-1].append(at)
    return [run for run in out if run]
