"""What stands for a GPU or a node in the racks: a cell with a figure, or one character. Shades and characters are made
for all rows at once, so that thousands of GPUs cost little more than a few."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from rich.segment import Segment
from rich.style import Style

from engine.control.ahead import Ahead
from engine.telemetry.snapshot import GpuTable, NodeState, NodeStatus
from tui.metrics import HELD_BACK, Metric
from tui.ramp import levels_of, style_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

STATE_MARK = {
    NodeState.CONNECTING: Segment("~", Style(color="bright_cyan")),
    NodeState.LIVE: Segment("*", Style(color="green")),
    NodeState.STALE: Segment("?", Style(color="yellow", bold=True)),
    NodeState.DOWN: Segment("x", Style(color="red", bold=True)),
    NodeState.ERROR: Segment("!", Style(color="red", bold=True)),
}
UNREAD = Segment(".", STATE_MARK[NodeState.LIVE].style)
NONE, COMING, WRONG = ord(" "), ord("^"), ord("!")
"""Marks of a GPU: will reach its limit, has an alarm or is held back by its board."""
READ = (NodeState.LIVE, NodeState.STALE)


@dataclass(frozen=True)
class Shades:
    """Of every GPU row: the metric's value, the level of its colour (-1: it has none), and its mark."""

    values: Floats
    levels: Ints
    marks: Ints


def shaded(table: GpuTable, alarmed: frozenset[int], ahead: Ahead | None, metric: Metric) -> Shades:
    """`alarmed` are rows that carry a mark, and so do those that will reach their limit."""
    values = metric.values(table, ahead)
    bits = np.nan_to_num(table["throttle"]).astype(np.int64)
    held = (bits & (HELD_BACK & ~0x4)) != 0
    wrong = held.copy()
    wrong[[row for row in alarmed if row < len(held)]] = True
    coming = np.zeros(len(held), bool) if ahead is None else np.isfinite(ahead.reaches_s) & ~held
    marks = np.where(coming, COMING, np.where(wrong, WRONG, NONE))
    return Shades(values, levels_of(values, metric.low, metric.high), marks)


@lru_cache(maxsize=4096)
def _cell(text: str, level: int, mark: int, chosen: bool) -> Segment:
    left, right = ("[", "]") if chosen else (chr(mark), chr(mark))
    return Segment(f"{left}{text[:3]:>3}{right}", style_of(level, chosen, mark != NONE))


def cell(shades: Shades | None, row: int, metric: Metric, chosen: bool, plain: bool) -> Segment:
    """Five columns with a GPU's figure; a row of -1 is of none that was read."""
    mark = int(shades.marks[row]) if shades is not None and row >= 0 else NONE
    if shades is None or row < 0 or shades.levels[row] < 0:
        return _cell(" - " if plain else " — ", -1, mark, chosen)
    return _cell(metric.cell(float(shades.values[row])), int(shades.levels[row]), mark, chosen)


class _Dots(dict[int, Segment]):
    """One character in its colour, by its code, level and whether it is marked, packed."""

    def __missing__(self, key: int) -> Segment:
        made = self[key] = Segment(chr(key >> 6), style_of((key >> 1 & 31) - 1, False, bool(key & 1)))
        return made


_DOTS = _Dots()


def dots(shades: Shades, metric: Metric) -> list[Segment]:
    """One character for each row: the tens of a temperature, of others their share in tenths, or a mark instead."""
    codes = np.where(shades.levels < 0, ord("."), metric.digits(shades.values))
    marked = shades.marks != NONE
    keys = np.where(marked, shades.marks, codes) << 6 | (shades.levels + 1) << 1 | marked
    return [_DOTS[key] for key in keys.tolist()]


def merged(found: list[Segment]) -> list[Segment]:
    """The same with neighbours of one style in one segment: what is drawn costs by the segment."""
    out: list[Segment] = []
    text, style = "", None
    for dot in found:
        if dot.style is style:
            text += dot.text
            continue
        if text:
            out.append(Segment(text, style))
        text, style = dot.text, dot.style
    return [*out, Segment(text, style)] if text else out


def chosen_dot(dot: Segment, shades: Shades | None, row: int) -> Segment:
    """The same under the cursor; a row of -1 is of none that was read."""
    level = int(shades.levels[row]) if shades is not None and row >= 0 else -1
    if shades is None or level < 0:
        return Segment(dot.text, Style(reverse=True))
    return Segment(dot.text, style_of(level, True, bool(shades.marks[row] != NONE)))


def by_node(nodes: tuple[NodeStatus, ...], shades: Shades) -> tuple[list[int], Shades]:
    """The worst row of each node, -1 where none is read; and the shades of nodes: each of its worst row, marked when
    any of its rows is."""
    worst = np.full(len(nodes), -1)
    marked = np.zeros(len(nodes), bool)
    read = [i for i, s in enumerate(nodes) if s.state in READ and len(s.rows)]
    if read:
        starts = np.array([nodes[i].rows.start for i in read])
        sizes = np.array([len(nodes[i].rows) for i in read])
        begins = np.cumsum(sizes) - sizes
        rows = np.repeat(starts - begins, sizes) + np.arange(int(sizes.sum()))
        count = len(shades.levels)
        keyed = shades.levels[rows] * count + count - 1 - rows  # the first of equals
        worst[read] = count - 1 - np.maximum.reduceat(keyed, begins) % count
        marked[read] = np.logical_or.reduceat(shades.marks[rows] != NONE, begins)
    known = worst >= 0
    of = Shades(np.full(len(nodes), np.nan), np.full(len(nodes), -1), np.where(marked, WRONG, NONE))
    of.values[known], of.levels[known] = shades.values[worst[known]], shades.levels[worst[known]]
    return worst.tolist(), of


def node_dots(nodes: tuple[NodeStatus, ...], of: Shades, metric: Metric) -> list[Segment]:
    """One character for each node, by `by_node`; its state, where it is not live."""
    found = dots(of, metric)
    for number, status in enumerate(nodes):
        if status.state is not NodeState.LIVE:
            found[number] = STATE_MARK[status.state]
        elif not len(status.rows):
            found[number] = UNREAD
    return found
