"""Rack elevations: every node at its place, every GPU a cell with its figure and colour. Drawn with the Line API."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from engine.control.ahead import Ahead
from engine.profile import Cluster
from engine.telemetry.snapshot import NodeState, NodeStatus, Snapshot
from tui.metrics import HELD_BACK, METRICS, Metric
from tui.ramp import levels_of, style_of
from tui.widgets.layout import CELL, NAME, PER_ROW, Block, Kind, Layout, Spot, Zoom, fitting, lay_out, visible

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
PLAIN, DIM = Style.null(), Style(dim=True)
RACK = Style(bold=True, underline=True)

STATE_MARK = {
    NodeState.CONNECTING: ("~", Style(color="bright_cyan")),
    NodeState.LIVE: ("*", Style(color="green")),
    NodeState.STALE: ("?", Style(color="yellow", bold=True)),
    NodeState.DOWN: ("x", Style(color="red", bold=True)),
    NodeState.ERROR: ("!", Style(color="red", bold=True)),
}
NONE, COMING, WRONG = " ", "^", "!"
"""Marks of a GPU: will reach its limit, has an alarm or is held back by its board."""
READ = (NodeState.LIVE, NodeState.STALE)


@lru_cache(maxsize=4096)
def _cell(text: str, level: int, chosen: bool, mark: str) -> Segment:
    left, right = ("[", "]") if chosen else (mark, mark)
    return Segment(f"{left}{text[:3]:>3}{right}", style_of(level, chosen, mark != NONE))


@lru_cache(maxsize=1024)
def _dot(text: str, level: int, chosen: bool, marked: bool) -> Segment:
    return Segment(text, style_of(level, chosen, marked))


def _by_node(snapshot: Snapshot, levels: Ints, held: Bools) -> tuple[list[int], list[bool]]:
    """The worst row of each node, -1 where none is read, and whether any of its rows is held back or alarmed."""
    worst, marked = np.full(len(snapshot.nodes), -1), np.zeros(len(snapshot.nodes), bool)
    read = [i for i, s in enumerate(snapshot.nodes) if s.state in READ and len(s.rows)]
    if read:
        sizes = np.array([len(snapshot.nodes[i].rows) for i in read])
        rows = np.concatenate([np.arange(r.start, r.stop) for r in (snapshot.nodes[i].rows for i in read)])
        starts = np.cumsum(sizes) - sizes
        keyed = levels[rows] * len(levels) + len(levels) - 1 - rows  # the first of equals
        most = np.maximum.reduceat(keyed, starts)
        worst[read] = len(levels) - 1 - most % len(levels)
        marked[read] = np.logical_or.reduceat(held[rows], starts)
    return worst.tolist(), marked.tolist()


class Elevation(ScrollView, can_focus=True):
    """The racks. The cursor is one GPU; arrows and hjkl move it, a click puts it. Drawn as large as fits, until the
    zoom is chosen by hand."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "move(-1, 0)", "left", show=False),
        Binding("right,l", "move(1, 0)", "right", show=False),
        Binding("up,k", "move(0, -1)", "up", show=False),
        Binding("down,j", "move(0, 1)", "down", show=False),
        Binding("home", "ends(0)", "first", show=False),
        Binding("end", "ends(1)", "last", show=False),
    ]

    metric: reactive[Metric] = reactive(METRICS[0], repaint=False)
    cursor: reactive[tuple[int, int]] = reactive((0, 0), repaint=False)
    """Node number in the cluster, GPU slot in the node."""

    def __init__(self, cluster: Cluster, plain: bool, id: str) -> None:
        super().__init__(id=id)
        self.cluster, self.plain = cluster, plain
        self.zoom: Zoom | None = None
        """As it was chosen; None: whatever fits."""
        self._drawing: Layout = lay_out(cluster, Zoom.FULL, 10**6)
        self._snapshot: Snapshot | None = None
        self._values: list[float] = []
        self._levels: list[int] = []
        self._marks: list[str] = []
        self._worst: list[int] = []
        self._node_held: list[bool] = []
        """Each node's worst row (-1: none is read), and whether any of its rows is marked."""
        self._alarmed: frozenset[int] = frozenset()
        self._ahead: Ahead | None = None
        self._drawn: dict[int, Strip] = {}
        self._view = (0, 0, 0)
        """The lines that were drawn, and for which scroll offset and width."""
        self._place()
        top = self._drawing.rows[0] if self._drawing.rows else None
        self.cursor = (0, 0) if top is None else self._gpu_at(self._drawing.spots[top][0])

    def _place(self) -> None:
        self.virtual_size = Size(self._drawing.width, self._drawing.height)
        self._drawn = {}
        self.refresh()

    def on_resize(self, event: events.Resize) -> None:
        self.fit(event.size)

    def fit(self, size: Size) -> None:
        """Lay the racks out for a size."""
        if self.zoom is None:
            self._drawing = fitting(self.cluster, size.width, size.height)
        else:
            self._drawing = lay_out(self.cluster, self.zoom, size.width)
        self._place()
        self._recolour()
        self._into_view()

    def closer(self, by: int) -> None:
        """Zoom in or out, from what is drawn now."""
        self.zoom = Zoom(max(Zoom.NODES, min(Zoom.FULL, self._drawing.zoom + by)))
        self.fit(self.size)

    def show(self, snapshot: Snapshot, alarmed: frozenset[int], ahead: Ahead | None = None) -> None:
        """Draw another snapshot; `alarmed` are rows that carry a mark, and so do those that will reach their limit."""
        self._snapshot, self._alarmed, self._ahead = snapshot, alarmed, ahead
        self._recolour()

    def watch_metric(self) -> None:
        self._recolour()

    def watch_cursor(self, cursor: tuple[int, int]) -> None:
        self._into_view()
        self._changed()

    def _into_view(self) -> None:
        spot = self._drawing.spot(*self.cursor)
        if spot is not None and self.is_mounted:
            above = 1 if self._drawing.zoom is Zoom.FULL else 0  # the node's title, too
            self.scroll_to_region(Region(spot.x, spot.y - above, spot.width, 1 + above), animate=False, force=True)

    def _recolour(self) -> None:
        if self._snapshot is not None:
            table = self._snapshot.gpus
            values = self.metric.values(table, self._ahead)
            bits = np.nan_to_num(table["throttle"]).astype(np.int64)
            held = (bits & (HELD_BACK & ~0x4)) != 0
            marked = held.copy()
            marked[[row for row in self._alarmed if row < len(held)]] = True
            coming = np.zeros(len(held), bool) if self._ahead is None else np.isfinite(self._ahead.reaches_s) & ~held
            marks = np.where(coming, COMING, np.where(marked, WRONG, NONE))
            self._values, self._marks = values.tolist(), marks.tolist()
            levels = levels_of(values, self.metric.low, self.metric.high)
            self._levels = levels.tolist()
            if self._drawing.zoom is Zoom.NODES:
                self._worst, self._node_held = _by_node(self._snapshot, levels, marked | coming)
        self._changed()

    @property
    def told(self) -> str:
        """The cursor's GPU in words: its name and what the metric says of it."""
        node, slot = self.cursor
        row = self._row(node, slot)
        value = self.metric.cell(self._values[row]).strip() if row >= 0 and self._levels[row] >= 0 else ""
        return f"{self.cluster.nodes[node].name} GPU {slot} {value} {self.metric.unit if value else ''}".rstrip()

    # Drawing.

    def _changed(self) -> None:
        """Have the lines drawn again that look otherwise now: a slow line to the terminal carries no more than that."""
        before, view = self._drawn, self._view
        self._drawn = {}
        if not before or view != self._in_view:
            self.refresh()
            return
        changed = [y for y, strip in sorted(before.items()) if self.render_line(y) != strip]
        first = 0
        for at, y in enumerate(changed):  # neighbours go together
            if at + 1 == len(changed) or changed[at + 1] != y + 1:
                self.refresh(Region(0, changed[first], self.size.width, y + 1 - changed[first]))
                first = at + 1

    @property
    def _in_view(self) -> tuple[int, int, int]:
        return (*self.scroll_offset, self.size.width)

    def notify_style_update(self) -> None:
        """Another theme."""
        self._drawn = {}
        super().notify_style_update()

    def render_line(self, y: int) -> Strip:
        if self._view != self._in_view:
            self._view, self._drawn = self._in_view, {}
        known = self._drawn.get(y)
        if known is None:
            known = self._drawn[y] = self._line(y + self.scroll_offset.y)
        return known

    def _line(self, line: int) -> Strip:
        """What stands in view on a line of the drawing: racks left and right of it cost nothing."""
        first, width = self.scroll_offset.x, self.size.width
        segments: list[Segment] = []
        blocks = visible(self._drawing.lines.get(line, []), first, width)
        x = begins = blocks[0].x if blocks else first
        for block in blocks:
            if block.x > x:
                segments.append(Segment(" " * (block.x - x), PLAIN))
            drawn = self._block(block)
            segments += drawn
            x = block.x + sum(len(s.text) for s in drawn)
        if begins > first:
            segments.insert(0, Segment(" " * (begins - first), PLAIN))
            begins = first
        strip = Strip(segments or [Segment(" ", PLAIN)])
        whole = strip.crop(first - begins, first - begins + width).extend_cell_length(width, PLAIN)
        # Gaps between blocks in the theme's ground would be a quarter more for a slow line to carry: the terminal's own
        # does as well, where it is dark.
        return whole if self.app.current_theme.dark else whole.apply_style(self.rich_style)

    def _block(self, block: Block) -> list[Segment]:
        if block.kind is Kind.RACK:
            return [Segment(f" {block.rack}"[: block.width].ljust(block.width), RACK)]
        if block.kind is Kind.TITLE:
            return self._title(block)
        if block.kind is Kind.CELLS:
            return self._cells(block)
        if block.kind is Kind.DOTS:
            return [self._gpu_dot(block.nodes[0], slot) for slot in range(block.count)]
        name = f"{block.rack[: NAME - 1]:<{NAME}}"
        return [Segment(name, DIM), *(self._node_dot(node) for node in block.nodes)]

    def _status(self, node: int) -> NodeStatus | None:
        return self._snapshot.nodes[node] if self._snapshot else None

    def _title(self, block: Block) -> list[Segment]:
        (node,) = block.nodes
        status = self._status(node)
        state = status.state if status else NodeState.CONNECTING
        mark, style = STATE_MARK[state]
        profile = self.cluster.nodes[node]
        word = "" if state is NodeState.LIVE else state.value
        text = f" {profile.name} {word}"[: block.width - 7].ljust(block.width - 6)
        return [
            Segment(mark, style),
            Segment(text, PLAIN if state is NodeState.LIVE else DIM),
            Segment(f"u{profile.u:<4}", DIM),
        ]

    def _cells(self, block: Block) -> list[Segment]:
        (node,) = block.nodes
        segments = [Segment(" ", PLAIN)]
        for slot in range(block.first, block.first + block.count):
            row = self._row(node, slot)
            level, mark = (self._levels[row], self._marks[row]) if row >= 0 else (-1, NONE)
            text = self.metric.cell(self._values[row]) if level >= 0 else (" - " if self.plain else " — ")
            segments.append(_cell(text, level, self.cursor == (node, slot), mark))
        if block.count < PER_ROW:
            segments.append(Segment(" " * CELL * (PER_ROW - block.count), PLAIN))
        return segments

    def _row(self, node: int, slot: int) -> int:
        """The snapshot's row of a GPU that is read; -1 where none is."""
        status = self._status(node)
        read = status is not None and status.state in READ and slot < len(status.rows)
        return status.rows[slot] if read and status is not None else -1

    def _gpu_dot(self, node: int, slot: int) -> Segment:
        row, chosen = self._row(node, slot), self.cursor == (node, slot)
        return self._dot(node, row, chosen, self._marks[row] if row >= 0 else NONE)

    def _node_dot(self, node: int) -> Segment:
        """A node by its worst GPU; marked when any of its GPUs is."""
        if node >= len(self._worst):
            return self._dot(node, -1, self.cursor[0] == node, NONE)
        mark = WRONG if self._node_held[node] else NONE
        return self._dot(node, self._worst[node], self.cursor[0] == node, mark)

    def _dot(self, node: int, row: int, chosen: bool, mark: str) -> Segment:
        """One character: the tens of a temperature, of others their share in tenths, or a mark instead."""
        status = self._status(node)
        state = status.state if status else NodeState.CONNECTING
        if row < 0 or state is not NodeState.LIVE:
            mark, style = STATE_MARK[state]
            return Segment("." if state is NodeState.LIVE else mark, Style(reverse=True) if chosen else style)
        level = self._levels[row]
        text = mark if mark != NONE else "." if level < 0 else self.metric.digit(self._values[row])
        return _dot(text, level, chosen, mark != NONE)

    # Moving.

    def action_move(self, right: int, down: int) -> None:
        """One cell over; past a node's edge into the next node or rack."""
        spot = self._drawing.spot(*self.cursor)
        there = None if spot is None else self._drawing.beside(spot, right, down)
        if there is not None:
            self.cursor = self._gpu_at(there)

    def action_ends(self, last: int) -> None:
        """First or last GPU as drawn."""
        if self._drawing.rows:
            self.cursor = self._gpu_at(self._drawing.spots[self._drawing.rows[-last]][-last])

    def on_click(self, event: events.Click) -> None:
        found = self._drawing.under(event.x + self.scroll_offset.x, event.y + self.scroll_offset.y)
        if found is not None:
            self.cursor = self._gpu_at(found)

    def _gpu_at(self, spot: Spot) -> tuple[int, int]:
        """A node's worst GPU stands for it."""
        if spot.slot >= 0:
            return spot.node, spot.slot
        status = self._status(spot.node)
        worst = self._worst[spot.node] if spot.node < len(self._worst) else -1
        return spot.node, status.rows.index(worst) if status is not None and worst in status.rows else 0
