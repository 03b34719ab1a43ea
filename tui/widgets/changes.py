"""What of a line has to go to the terminal again: the less, the better a slow link carries it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import compress, count
from operator import ne

from rich.cells import cell_len
from rich.segment import Segment
from textual.geometry import Region


def changed(y: int, before: Iterable[Segment], after: Iterable[Segment], width: int) -> Region | None:
    """The piece of line `y` that looks otherwise now, None when none does: from the first segment that differs to the
    last, or to the end from one that ends at another place. One piece, as Textual sends a widget's line from its left
    edge to the end of each piece again."""
    was, now = list(before), list(after)
    differ = list(compress(count(), map(ne, was, now)))  # most are the very same ones, which C sees at once
    shorter = min(len(was), len(now))
    if len(was) != len(now):
        differ.append(shorter)
    if not differ:
        return None
    moved = any(at == shorter or was[at].cell_length != now[at].cell_length for at in differ)
    begin = _cells(now[: differ[0]])
    end = width if moved else begin + _cells(now[differ[0] : differ[-1] + 1])
    return Region(begin, y, end - begin, 1) if begin < end else None


def _cells(segments: list[Segment]) -> int:
    return cell_len("".join(s.text for s in segments))
