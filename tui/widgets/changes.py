"""What of a line has to go to the terminal again: the less, the better a slow link carries it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from rich.segment import Segment
from textual.geometry import Region


def changed(y: int, before: Iterable[Segment], after: Iterable[Segment], width: int) -> list[Region]:
    """The pieces of line `y` that look otherwise now: those segments that differ, and everything from the first that
    ends at another place."""
    found: list[Region] = []
    x, begin = 0, -1
    for was, now in zip_longest(before, after):
        if was is None or now is None or was.cell_length != now.cell_length:
            begin, x = x if begin < 0 else begin, width
            break
        if was != now:
            begin = x if begin < 0 else begin
        elif begin >= 0:
            found.append(Region(begin, y, x - begin, 1))
            begin = -1
        x += now.cell_length
    if 0 <= begin < x:
        found.append(Region(begin, y, x - begin, 1))
    return found
