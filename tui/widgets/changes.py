"""What of a line has to go to the terminal again: the less, the better a slow link carries it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from rich.segment import Segment
from textual.geometry import Region


def changed(y: int, before: Iterable[Segment], after: Iterable[Segment], width: int) -> Region | None:
    """The piece of line `y` that looks otherwise now, None when none does: from the first segment that differs to the
    last, or to the end from one that ends at another place. One piece, as Textual sends a widget's line from its left
    edge to the end of each piece again."""
    x, begin, end = 0, -1, -1
    for was, now in zip_longest(before, after):
        if was is None or now is None or was.cell_length != now.cell_length:
            begin, end = x if begin < 0 else begin, width
            break
        if was != now:
            begin, end = x if begin < 0 else begin, x + now.cell_length
        x += now.cell_length
    return Region(begin, y, end - begin, 1) if 0 <= begin < end else None
