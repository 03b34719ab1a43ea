"""Links as a matrix: a row a node, or a GPU where one node is looked at; a column a link; a cell its share of the peak.

What a cell says is in its characters, colour only repeats it: `!` above the 70 % line, `x` down or degraded, `.` idle,
nothing where it is not read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from rich.style import Style
from rich.text import Text

from tui.ramp import levels_of, style_of
from tui.widgets.bundles import Bools, Bundles, Floats, Ints, Seen

CONTENDED, IDLE = 0.70, 0.15
"""Shares of the peak: above the first a link holds up who uses it, below the second it has nothing to do."""
TITLES = {"nvlink": "NVLink", "xgmi": "xGMI", "pcie": "PCIe", "nic": "NIC"}
"""Kinds of links as their columns are headed, in this order; others come after them."""
PER_CENT, TENTH = 4, 1
"""Columns of a cell: a percentage and its mark, or where these do not fit one character, its tenths or its mark."""
MOST_GPUS = 64
"""GPUs of a node that have columns of their own by number."""
LABEL = 12
"""Columns of a row's name, at most."""
WRONG, WORD, DIM, BLANK = Style(color="red", bold=True), Style(bold=True), Style(dim=True), Style.null()


@dataclass(frozen=True)
class Places:
    """Where each bundle, or each link of one node, stands: rows by `label`, columns in blocks of a kind."""

    label: tuple[str, ...]
    row: Ints
    column: Ints
    blocks: tuple[tuple[str, int], ...]

    def cells(self, values: Floats) -> Floats:
        """`values` as rows and columns; NaN where there is no link."""
        out = np.full((len(self.label), sum(count for _, count in self.blocks)), np.nan)
        out[self.row, self.column] = values
        return out


@lru_cache(maxsize=2)
def places(bundles: Bundles, node: str | None) -> Places:
    """All bundles, a row a node; of one node all its links, a row a GPU and one for the ports."""
    if node is None:
        of = [(bundles.node[b], bundles.kind[b], bundles.gpu[b]) for b in range(len(bundles))]
    else:
        gpus = [f"GPU {gpu}" if gpu >= 0 else "ports" for gpu in bundles.gpu]
        of = [(gpus[b], bundles.kind[b], -1) for b in bundles.of.tolist()]
    rows: dict[str, int] = {}
    nth: Counter[tuple[str, str]] = Counter()
    widest: dict[str, int] = dict.fromkeys(TITLES, 0)
    row, place = [], []
    for label, kind, gpu in of:
        row.append(rows.setdefault(label, len(rows)))
        place.append(gpu if 0 <= gpu < MOST_GPUS else nth[label, kind])
        nth[label, kind] += 1
        widest[kind] = max(widest.get(kind, 0), place[-1] + 1)
    first = dict(zip(widest, np.cumsum([0, *widest.values()]).tolist(), strict=False))
    column = [first[kind] + at for (_, kind, _), at in zip(of, place, strict=True)]
    blocks = tuple((TITLES.get(kind, kind), count) for kind, count in widest.items() if count)
    return Places(tuple(rows), np.array(row, np.int64), np.array(column, np.int64), blocks)


@dataclass(frozen=True)
class Cells:
    """What is drawn: shares of the peak by row and column, NaN where there is none; which hold a link that is down or
    degraded; what the model expects of each column; rows' names, in the order in which they are drawn."""

    share: Floats
    wrong: Bools
    model: Floats
    label: tuple[str, ...]
    blocks: tuple[tuple[str, int], ...]


def cells(seen: Seen, chosen: Bools) -> Cells:
    """The matrix of the chosen bundles, the row with the most loaded link first."""
    at, load = places(seen.bundles, seen.node), seen.load
    share, bad, model, kept = load.share, load.bad > 0, seen.model / load.peak, chosen
    if seen.node is not None:  # each link of its own
        rx, tx, peak, well = (seen.table[c][seen.bundles.rows] for c in ("rx_gb_s", "tx_gb_s", "peak_gb_s", "well"))
        share, bad, model, kept = np.fmax(rx, tx) / peak, well == 0, model[seen.bundles.of], chosen[seen.bundles.of]
    shares = at.cells(np.where(kept, share, np.nan))
    wrong = at.cells(np.where(kept, bad, np.nan)) == 1
    some = at.cells(np.where(kept, 1.0, np.nan)) == 1
    expected = at.cells(np.where(kept, model, np.nan))
    known = (~np.isnan(expected)).sum(axis=0)
    busiest = np.where(np.isnan(shares), -1.0, shares).max(axis=1)
    order = np.argsort(-np.round(busiest, 2), kind="stable")  # rows that are alike stay where they are
    order = order[some.any(axis=1)[order]]
    with np.errstate(invalid="ignore"):
        mean = np.nansum(expected, axis=0) / known
    return Cells(shares[order], wrong[order], mean, tuple(at.label[row] for row in order), at.blocks)


def matrix(seen: Seen, chosen: Bools, width: int, height: int) -> Text:
    """As many rows as fit, under what the model expects of each column."""
    drawn = cells(seen, chosen)
    named = min(LABEL, max(len("model"), *(len(label) for label in drawn.label))) + 1
    wide = named + sum(max(len(title), PER_CENT * count) + 1 for title, count in drawn.blocks) <= width
    cell = PER_CENT if wide else TENTH
    text = Text()
    text.append(
        f"{'per cent' if wide else 'tenths'}; ! above {100 * CONTENDED:.0f} %, x degraded or down, . idle\n", DIM
    )
    text.append(" " * named + " ".join(f"{title:<{cell * count}}" for title, count in drawn.blocks) + "\n", WORD)
    text.append(" " * named + " ".join(_numbers(title, count, cell) for title, count in drawn.blocks) + "\n", DIM)
    if not np.isnan(drawn.model).all():
        text.append(f"{'model':<{named}}", "cyan")
        _line(text, drawn.blocks, drawn.model, np.zeros(len(drawn.model), bool), cell, idle=0.0)
    rows, fit = len(drawn.label), height - text.plain.count("\n")
    fit = fit if rows <= fit else max(1, fit - 1)
    for label, share, wrong in zip(drawn.label[:fit], drawn.share, drawn.wrong, strict=False):
        text.append(f"{label:<{named - 1}.{named - 1}} ")
        _line(text, drawn.blocks, share, wrong, cell)
    if rows > fit:
        text.append(f"... and {rows - fit} more, less loaded\n", "dim")
    return text


def _numbers(title: str, count: int, cell: int) -> str:
    """The numbers of a block's columns, as many of their digits as fit, under its title."""
    digits = "".join(f"{n % 10 ** min(cell, 3):>{min(cell, 3)}}{' ' * (cell > 3)}" for n in range(count))
    return f"{digits:<{len(title)}}"


def _line(
    text: Text, blocks: tuple[tuple[str, int], ...], share: Floats, wrong: Bools, cell: int, idle: float = IDLE
) -> None:
    """One row's cells. Neighbours of one colour are one piece: pieces are what a screen's drawing costs."""
    levels, first = levels_of(share, 0.0, 1.0).tolist(), 0
    pieces: list[tuple[str, Style]] = []
    for title, count in blocks:
        for at in range(first, first + count):
            style = WRONG if wrong[at] else BLANK if levels[at] < 0 else style_of(levels[at], False, False)
            _join(pieces, _cell(float(share[at]), bool(wrong[at]), cell, idle), style)
        _join(pieces, " " * (1 + max(0, len(title) - cell * count)), BLANK)
        first += count
    for piece, style in pieces:
        text.append(piece, style)
    text.append("\n")


def _join(pieces: list[tuple[str, Style]], word: str, style: Style) -> None:
    if pieces and pieces[-1][1] == style:
        word = pieces.pop()[0] + word
    pieces.append((word, style))


def _cell(share: float, wrong: bool, cell: int, idle: float) -> str:
    """A percentage and its mark, or one character: the mark, or else the tenths."""
    known = not np.isnan(share)
    mark = "x" if wrong else "" if not known else "!" if share > CONTENDED else "." if share < idle else ""
    if cell == PER_CENT:
        return f"{f'{100 * share:.0f}' if known else '':>3}{mark:<1}"
    return mark or (str(int(10 * share)) if known else " ")
