"""Rack elevations: every node at its place, every GPU a cell with its figure and colour. Drawn with the Line API."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import ClassVar

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
from tui.metrics import METRICS, Metric
from tui.widgets.changes import changed
from tui.widgets.glyphs import (
    READ,
    STATE_MARK,
    UNREAD,
    Shades,
    by_node,
    cell,
    chosen_dot,
    dots,
    merged,
    node_dots,
    shaded,
)
from tui.widgets.layout import CELL, NAME, PER_ROW, Block, Kind, Layout, Spot, Zoom, fitting, lay_out, visible

PLAIN, DIM = Style.null(), Style(dim=True)
RACK = Style(bold=True, underline=True)


@lru_cache(maxsize=256)
def _gap(columns: int) -> Segment:
    return Segment(" " * columns, PLAIN)


@lru_cache(maxsize=4096)
def _name(rack: str, gap: int) -> Segment:
    return Segment(f"{'':<{gap}}{rack[: NAME - 1]:<{NAME}}", DIM)


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
        self._shades: Shades | None = None
        self._dots: list[Segment] = []
        """Where a character is a GPU or a node: that of each row, or of each node."""
        self._worst: list[int] = []
        self._of_nodes: Shades | None = None
        """Each node's worst row (-1: none is read), and its shades."""
        self._alarmed: frozenset[int] = frozenset()
        self._ahead: Ahead | None = None
        self._drawn: dict[int, Strip] = {}
        self._view = (0, 0, 0)
        """The lines that were drawn, and for which scroll offset and width."""
        self._ground: Style | None = None
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

    def watch_cursor(self, before: tuple[int, int], cursor: tuple[int, int]) -> None:
        self._into_view()
        self._changed(s.y for s in (self._drawing.spot(*before), self._drawing.spot(*cursor)) if s is not None)

    def _into_view(self) -> None:
        spot = self._drawing.spot(*self.cursor)
        if spot is not None and self.is_mounted:
            above = 1 if self._drawing.zoom is Zoom.FULL else 0  # the node's title, too
            self.scroll_to_region(Region(spot.x, spot.y - above, spot.width, 1 + above), animate=False, force=True)

    def _recolour(self) -> None:
        snapshot, metric, before = self._snapshot, self.metric, self._dots
        if snapshot is not None:
            self._shades = shaded(snapshot.gpus, self._alarmed, self._ahead, metric)
            if self._drawing.zoom is Zoom.NODES:
                self._worst, self._of_nodes = by_node(snapshot.nodes, self._shades)
                self._dots = node_dots(snapshot.nodes, self._of_nodes, metric)
            elif self._drawing.zoom is Zoom.GPUS:
                self._dots = dots(self._shades, metric)
        self._changed(self._otherwise(before))

    def _otherwise(self, before: list[Segment]) -> set[int] | None:
        """Lines on which a node looks otherwise than `before`; None where all have to be compared."""
        if self._drawing.zoom is not Zoom.NODES or len(before) != len(self._dots):
            return None
        at = self._drawing.at
        return {
            at[node, -1].y for node, (was, now) in enumerate(zip(before, self._dots, strict=True)) if was is not now
        }

    @property
    def told(self) -> str:
        """The cursor's GPU in words: its name and what the metric says of it."""
        node, slot = self.cursor
        row, value = self._row(node, slot), ""
        if self._shades is not None and row >= 0 and self._shades.levels[row] >= 0:
            value = f" {self.metric.cell(float(self._shades.values[row])).strip()} {self.metric.unit}"
        return f"{self.cluster.nodes[node].name} GPU {slot}{value}"

    # Drawing.

    def _changed(self, lines: Iterable[int] | None = None) -> None:
        """Have the lines drawn again that look otherwise now, of some or of all: a slow line to the terminal carries no
        more than that."""
        before, view = self._drawn, self._view
        if not before or self._looked() != view:
            self._drawn = {}
            self.refresh()
            return
        again = sorted(before) if lines is None else sorted({y - view[1] for y in lines} & before.keys())
        self._drawn = {} if lines is None else {y: strip for y, strip in before.items() if y not in again}
        regions = [r for y in again if (r := changed(y, before[y], self.render_line(y), view[2]))]
        if regions:
            self.refresh(*regions)

    def _looked(self) -> tuple[int, int, int]:
        """What is in view now. Asked once for all lines: Textual works it out anew each time."""
        view = (*self.scroll_offset, self.size.width)
        if view != self._view:
            self._view, self._drawn = view, {}
        # Gaps between blocks in the theme's ground would be a quarter more for a slow line to carry: the terminal's own
        # does as well, where it is dark.
        self._ground = None if self.app.current_theme.dark else self.rich_style
        return view

    def notify_style_update(self) -> None:
        """Another theme."""
        self._drawn = {}
        super().notify_style_update()

    def render_lines(self, crop: Region) -> list[Strip]:
        self._looked()
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        known = self._drawn.get(y)
        if known is None:
            known = self._drawn[y] = self._line(y + self._view[1])
        return known

    def _line(self, line: int) -> Strip:
        """What stands in view on a line of the drawing: racks left and right of it cost nothing."""
        first, _, width = self._view
        segments: list[Segment] = []
        blocks = visible(self._drawing.lines.get(line, []), first, width)
        cursor = self.cursor
        x = begins = min(first, blocks[0].x) if blocks else first
        for block in blocks:
            segments += self._block(block, block.x - x, cursor)
            x = block.x + block.filled
        if (rest := first + width - x) > 0:
            segments.append(_gap(rest))
        strip = Strip(segments, max(x, first + width) - begins)
        if strip.cell_length > width:
            strip = strip.crop(first - begins, first - begins + width)
        return strip if self._ground is None else strip.apply_style(self._ground)

    def _block(self, block: Block, gap: int, cursor: tuple[int, int]) -> list[Segment]:
        """The block, and the columns that are free before it."""
        if block.kind is Kind.NODES:  # thousands of GPUs: the fewer segments, the better
            return [_name(block.rack, gap), *merged(self._node_dots(block, cursor))]
        if block.kind is Kind.RACK:
            found = [Segment(f" {block.rack}"[: block.width].ljust(block.width), RACK)]
        elif block.kind is Kind.TITLE:
            found = self._title(block)
        elif block.kind is Kind.CELLS:
            found = self._cells(block, cursor)
        else:
            found = merged(self._gpu_dots(block, cursor))
        return [_gap(gap), *found] if gap else found

    def _status(self, node: int) -> NodeStatus | None:
        return self._snapshot.nodes[node] if self._snapshot else None

    def _state(self, node: int) -> NodeState:
        return self._snapshot.nodes[node].state if self._snapshot else NodeState.CONNECTING

    def _title(self, block: Block) -> list[Segment]:
        (node,) = block.nodes
        state, profile = self._state(node), self.cluster.nodes[node]
        word = "" if state is NodeState.LIVE else state.value
        text = f" {profile.name} {word}"[: block.width - 7].ljust(block.width - 6)
        return [
            STATE_MARK[state],
            Segment(text, PLAIN if state is NodeState.LIVE else DIM),
            Segment(f"u{profile.u:<4}", DIM),
        ]

    def _cells(self, block: Block, cursor: tuple[int, int]) -> list[Segment]:
        (node,), metric = block.nodes, self.metric
        segments = [_gap(1)]
        for slot in range(block.first, block.first + block.count):
            row = self._row(node, slot)
            segments.append(cell(self._shades, row, metric, cursor == (node, slot), self.plain))
        if block.count < PER_ROW:
            segments.append(_gap(CELL * (PER_ROW - block.count)))
        return segments

    def _row(self, node: int, slot: int) -> int:
        """The snapshot's row of a GPU that is read; -1 where none is."""
        status = self._status(node)
        read = status is not None and status.state in READ and slot < len(status.rows)
        return status.rows[slot] if read and status is not None else -1

    def _gpu_dots(self, block: Block, cursor: tuple[int, int]) -> list[Segment]:
        (node,), status = block.nodes, self._status(block.nodes[0])
        if status is None or status.state is not NodeState.LIVE:
            found = [STATE_MARK[self._state(node)]] * block.count
        else:
            found = self._dots[status.rows.start : status.rows.stop][: block.count]
            found += [UNREAD] * (block.count - len(found))
        if cursor[0] == node and cursor[1] < block.count:
            live = status is not None and status.state is NodeState.LIVE
            row = self._row(node, cursor[1]) if live else -1
            found[cursor[1]] = chosen_dot(found[cursor[1]], self._shades, row)
        return found

    def _node_dots(self, block: Block, cursor: tuple[int, int]) -> list[Segment]:
        """A node by its worst GPU; marked when any of its GPUs is."""
        nodes = block.nodes
        if self._snapshot is None:
            found = [STATE_MARK[NodeState.CONNECTING]] * len(nodes)
        else:
            found = [self._dots[node] for node in nodes]
        if cursor[0] in nodes:
            at, live = nodes.index(cursor[0]), self._state(cursor[0]) is NodeState.LIVE
            found[at] = chosen_dot(found[at], self._of_nodes, cursor[0] if live else -1)
        return found

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
