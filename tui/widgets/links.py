"""Links against their peak, the busiest first; a group that idles beside a contended one is said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from rich.text import Text

from engine.telemetry.snapshot import Snapshot
from tui.widgets.figures import number
from tui.widgets.pane import Pane
from tui.widgets.plot import Floats, bar

CONTENDED = 0.70
IDLE = 0.15
OF_ALL, OF_NODE, RATES, BAR, WHOSE = 20, 13, 22, 4, 14
"""Columns of a label in the list of all nodes and of one, of the rates, of the shortest bar, and of a group's name."""

Carried = Mapping[tuple[str, int | str], str]


class Links(Pane):
    """`show` draws the links of the whole cluster, or of one node."""

    def show(self, snapshot: Snapshot, node: str | None, plain: bool, carried: Carried, wanted: str = "") -> None:
        """`node` limits the list to one node, `wanted` to rows that hold these words; `carried` says whose traffic goes
        over a GPU's links or a port."""
        self.fill(lambda w, h: links(snapshot, node, max(30, w or 60), max(4, h or 20), plain, carried, wanted))


@dataclass(frozen=True)
class Row:
    """Links of one kind and GPU, or one port, added up. `share` of the peak is -1 where it is not known; rates and the
    peak in GB/s; `wrong` what is the matter with some of them, `whose` the parallel group whose traffic they carry."""

    label: str
    share: float
    rx: float
    tx: float
    peak: float
    wrong: str
    whose: str


def links(
    snapshot: Snapshot,
    node: str | None,
    width: int,
    height: int,
    plain: bool,
    carried: Carried | None = None,
    wanted: str = "",
) -> Text:
    """The text of the pane: the busiest links first."""
    text = Text(no_wrap=True)
    text.append(f"Links{' of ' + node if node else ''}, GB/s each way", "bold")
    text.append(f"  /{wanted}\n" if wanted else "\n", "bold cyan")
    rows = sorted(_rows(snapshot, node, carried or {}), key=lambda row: -row.share)
    rows = [r for r in rows if wanted.lower() in f"{r.label} {r.whose} {r.wrong}".lower()]
    if not rows and wanted:
        text.append(f"No link here holds '{wanted}'; / and enter show all.\n", "dim")
        return text
    if not rows:
        text.append("No link is read yet: a node's NVLink, PCIe and network counters appear here.\n", "dim")
        return text
    shares = np.array([row.share for row in rows])
    if (shares > CONTENDED).any() and (shares < IDLE).any():
        text.append(
            f"{(shares < IDLE).sum()} links idle beside {(shares > CONTENDED).sum()} contended ones\n", "yellow"
        )
    named = OF_NODE if node else OF_ALL
    told = width >= named + RATES + BAR + WHOSE and any(row.whose for row in rows)
    room, fit = width - named - RATES - (WHOSE if told else 0), height - text.plain.count("\n")
    fit = fit if len(rows) <= fit else fit - 1
    for row in rows[:fit]:
        busy = row.share > CONTENDED
        text.append(f"{row.label:<{named - 1}.{named - 1}}{'!' if busy else ' '}", "bold yellow" if busy else "")
        text.append(bar(row.share if row.share >= 0 else float("nan"), max(BAR, min(20, room)), plain))
        text.append(f" {number(row.rx, 1):>6}/{number(row.tx, 1):>6} of {number(row.peak, 0):>4}")
        text.append(f" {row.whose:<{WHOSE - 1}}" if told else "", "dim")
        text.append(f" {row.wrong}\n" if row.wrong else "\n", "red")
    if len(rows) > fit:
        text.append(f"... and {len(rows) - fit} more, less loaded\n", "dim")
    return text


def _rows(snapshot: Snapshot, node: str | None, carried: Carried) -> list[Row]:
    """A row for each port, and for each GPU's links of one kind."""
    table = snapshot.links
    groups: dict[tuple[str, str, int, str], list[int]] = {}
    for row in range(len(table)) if node is None else table.of.get(node, range(0)):
        port = table.name[row] if table.kind[row] == "nic" else ""
        groups.setdefault((table.node[row], table.kind[row], table.gpu[row], port), []).append(row)
    out = []
    for (of, kind, gpu, port), members in groups.items():
        rx, tx, peak = (_total(table[c][members]) for c in ("rx_gb_s", "tx_gb_s", "peak_gb_s"))
        with np.errstate(invalid="ignore", divide="ignore"):
            share = float(np.fmax(rx, tx) / np.float64(peak))
        bad = [table.state[r] for r in members if table.state[r] in ("inactive", "degraded")]
        # PCIe carries the host's traffic, too, and is nobody's.
        whose = "" if kind == "pcie" else carried.get((of, port or gpu), "")
        label = ("" if node else f"{of} ") + (port or f"GPU {gpu} {kind}")
        wrong = f"{len(bad)} {bad[0]}" if bad else ""
        out.append(Row(label, -1.0 if np.isnan(share) else share, rx, tx, peak, wrong, whose))
    return out


def _total(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.sum()) if len(known) else float("nan")
