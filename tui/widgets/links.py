"""Links against their peak, the busiest first; a group that idles beside a contended one is said."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from rich.text import Text

from engine.telemetry.snapshot import Snapshot
from tui.widgets.bundles import Bools, Floats, Groups, Key, Seen, look
from tui.widgets.figures import number
from tui.widgets.link_matrix import CONTENDED, IDLE, matrix
from tui.widgets.pane import Pane
from tui.widgets.plot import bar

OF_ALL, OF_NODE, RATES, BAR, MODEL, WHOSE = 20, 13, 22, 4, 8, 14
"""Columns of a label in the list of all nodes and of one, of the rates, of the shortest bar, of what the model expects,
and of a group's name."""


class Links(Pane):
    """`show` draws the links of the whole cluster, or of one node, as a list or `as_matrix`."""

    as_matrix = False

    def __init__(self, id: str, plain: bool = False) -> None:
        super().__init__(id, plain)
        self._seen: Seen | None = None

    def show(
        self,
        snapshot: Snapshot,
        node: str | None,
        carried: Mapping[Key, str],
        expected: Mapping[Key, float],
        wanted: str = "",
    ) -> None:
        """`node` limits it to one node, `wanted` to what holds these words; `carried` says whose traffic goes over a
        GPU's links or a port, `expected` how much the cost model expects there, GB/s in each direction."""
        seen = self._seen = look(snapshot.links, node, carried, expected, self._seen)
        self.fill(lambda w, h: links(seen, wanted, max(30, w or 60), max(4, h or 20), self.plain, self.as_matrix))


def links(seen: Seen, wanted: str, width: int, height: int, plain: bool, as_matrix: bool = False) -> Text:
    """The text of the pane."""
    chosen = seen.holding(wanted)
    text = Text(no_wrap=True)
    text.append(
        f"Links{' of ' + seen.node if seen.node else ''}, {'share of peak' if as_matrix else 'GB/s each way'}", "bold"
    )
    text.append("; ~ by the model" * (seen.modelled and not as_matrix), "bold")
    text.append(f"  /{wanted}\n" if wanted else "\n", "bold cyan")
    if not chosen.any():
        text.append(_nothing(wanted), "dim")
        return text
    share = np.where(chosen, seen.load.share, np.nan)
    text.append(links_beside(share) + groups_beside(seen.groups, share), "yellow")
    height -= text.plain.count("\n")
    text.append_text(matrix(seen, chosen, width, height) if as_matrix else _listed(seen, chosen, width, height, plain))
    return text


def links_beside(share: Floats) -> str:
    """Whether some idle while others are contended."""
    idle, contended = int((share < IDLE).sum()), int((share > CONTENDED).sum())
    return f"{idle} links idle beside {contended} contended ones\n" if idle and contended else ""


def groups_beside(groups: Groups, share: Floats) -> str:
    """Which parallel groups idle while others of their kind are contended: theirs is the traffic that could move."""
    busiest = groups.busiest(share)
    contended = [groups.name[g] for g in np.flatnonzero(busiest > CONTENDED)]
    kinds = {name.split()[0] for name in contended}
    idle = [groups.name[g] for g in np.flatnonzero(busiest < IDLE) if groups.name[g].split()[0] in kinds]
    return f"{_several(idle)} idle beside {_several(contended)}\n" if idle else ""


def _several(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _nothing(wanted: str) -> str:
    if wanted:
        return f"No link here holds '{wanted}'; / and enter show all.\n"
    return "No link is read yet: a node's NVLink, PCIe and network counters appear here.\n"


def _listed(seen: Seen, chosen: Bools, width: int, height: int, plain: bool) -> Text:
    """A line a bundle, the busiest first, its share of the peak as a bar."""
    text, count = Text(), int(chosen.sum())
    fit = height if count <= height else height - 1
    order = np.argsort(-np.where(chosen, np.nan_to_num(seen.load.share, nan=-1.0), -2.0), kind="stable")
    shown = [int(bundle) for bundle in order[: min(fit, count)]]
    columns = _Columns(seen, width, any(seen.whose(bundle) for bundle in shown))
    for bundle in shown:
        columns.write(text, bundle, plain)
    if count > fit:
        text.append(f"... and {count - fit} more, less loaded\n", "dim")
    return text


class _Columns:
    """How a line is laid out: what there is to say, and what has room."""

    def __init__(self, seen: Seen, width: int, carrying: bool) -> None:
        self.seen, self.named = seen, OF_NODE if seen.node else OF_ALL
        room = width - self.named - RATES
        self.model = seen.modelled and room >= BAR + MODEL
        room -= MODEL if self.model else 0
        self.whose = carrying and room >= BAR + WHOSE
        room -= WHOSE if self.whose else 0
        self.bar = max(BAR, min(20, room))

    def write(self, text: Text, bundle: int, plain: bool) -> None:
        seen, load = self.seen, self.seen.load
        share = float(load.share[bundle])
        label, busy = seen.bundles.label(bundle, seen.node is None), share > CONTENDED
        text.append(f"{label:<{self.named - 1}.{self.named - 1}}{'!' if busy else ' '}", "bold yellow" if busy else "")
        text.append(bar(share, self.bar, plain, CONTENDED))
        rx, tx, peak = (float(values[bundle]) for values in (load.rx, load.tx, load.peak))
        text.append(f" {number(rx, 1):>6}/{number(tx, 1):>6} of {number(peak):>4}")
        if self.model:
            rate = float(seen.model[bundle])
            text.append(" " * MODEL if np.isnan(rate) else f" {'~' + number(rate, 1):>{MODEL - 1}}", "cyan")
        text.append(f" {seen.whose(bundle):<{WHOSE - 1}}" if self.whose else "", "dim")
        wrong = seen.wrong(bundle)
        text.append(f" {wrong}\n" if wrong else "\n", "red")
