"""Links against their peak, the busiest first; a group that idles beside a contended one is said."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from rich.text import Text

from engine.telemetry.snapshot import Snapshot
from tui.widgets.figures import number
from tui.widgets.pane import Pane
from tui.widgets.plot import Floats, bar

CONTENDED = 0.70
IDLE = 0.15
WIDE = 66
"""Columns from which a row has room to say whose traffic it carries."""

Carried = Mapping[tuple[str, int | str], str]


class Links(Pane):
    """`show` draws the links of the whole cluster, or of one node."""

    def show(self, snapshot: Snapshot, node: str | None, plain: bool, carried: Carried) -> None:
        """`node` limits the list to one node; `carried` says whose traffic goes over a GPU's links or a port."""
        size = self.size
        self.draw(links(snapshot, node, max(30, size.width or 60), max(4, size.height or 20), plain, carried))


def links(
    snapshot: Snapshot, node: str | None, width: int, height: int, plain: bool, carried: Carried | None = None
) -> Text:
    """The text of the pane: links of one kind and GPU added up, sorted by share of their peak."""
    table, text = snapshot.links, Text(no_wrap=True)
    text.append(f"Links{' of ' + node if node else ''}, GB/s each way\n", "bold")
    groups: dict[tuple[str, str, str], list[int]] = {}
    for row in range(len(table)) if node is None else table.of.get(node, range(0)):
        kind = table.kind[row]
        label = table.name[row] if kind == "nic" else f"GPU {table.gpu[row]} {kind}"
        groups.setdefault((table.node[row], kind, label), []).append(row)
    if not groups:
        text.append("No link is read yet: a node's NVLink, PCIe and network counters appear here.\n", "dim")
        return text
    whose = {key: _whose(snapshot, key, members[0], carried or {}) for key, members in groups.items()}
    rows = sorted(
        ((*_sum(snapshot, *key, members), whose[key]) for key, members in groups.items()), key=lambda r: -r[0]
    )
    shares = np.array([r[0] for r in rows])
    if (shares > CONTENDED).any() and (shares < IDLE).any():
        text.append(
            f"{(shares < IDLE).sum()} links idle beside {(shares > CONTENDED).sum()} contended ones\n", "yellow"
        )
    named = width >= WIDE and any(whose.values())
    body, fit = width - 42 - (14 if named else 0), height - text.plain.count("\n")
    fit = fit if len(rows) <= fit else fit - 1
    for share, label, rx, tx, peak, state, who in rows[:fit]:
        mark = "!" if share > CONTENDED else " "
        text.append(f"{label:<19.19}{mark}", "bold yellow" if share > CONTENDED else "")
        text.append(bar(max(share, 0.0) if share >= 0 else float("nan"), max(4, min(20, body)), plain))
        text.append(f" {number(rx, 1):>6}/{number(tx, 1):>6} of {number(peak, 0):>4}")
        text.append(f" {who:<13}" if named else "", "dim")
        text.append(f" {state}\n" if state else "\n", "red")
    if len(rows) > fit:
        text.append(f"... and {len(rows) - fit} more, less loaded\n", "dim")
    return text


def _whose(snapshot: Snapshot, key: tuple[str, str, str], row: int, carried: Carried) -> str:
    """Which parallel group's traffic a row carries; PCIe carries the host's and is nobody's."""
    node, kind, label = key
    if kind == "nic":
        return carried.get((node, label), "")
    return carried.get((node, snapshot.links.gpu[row]), "") if kind in ("nvlink", "xgmi") else ""


def _sum(
    snapshot: Snapshot, node: str, kind: str, label: str, rows: list[int]
) -> tuple[float, str, float, float, float, str]:
    """Share of the peak (-1: not known), label, received, sent and peak GB/s, and what is wrong with the group."""
    table = snapshot.links
    rx, tx, peak = (_total(table[c][rows]) for c in ("rx_gb_s", "tx_gb_s", "peak_gb_s"))
    with np.errstate(invalid="ignore", divide="ignore"):
        share = float(np.fmax(rx, tx) / np.float64(peak))
    bad = [table.state[r] for r in rows if table.state[r] in ("inactive", "degraded")]
    return (-1.0 if np.isnan(share) else share, f"{node} {label}", rx, tx, peak, f"{len(bad)} {bad[0]}" if bad else "")


def _total(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.sum()) if len(known) else float("nan")
