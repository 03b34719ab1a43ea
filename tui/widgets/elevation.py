"""Rack elevations: every node at its place, every GPU a cell with its figure and colour. Drawn with the Line API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.scroll_view import ScrollView
from textual.strip import Strip

from engine.profile import Cluster
from engine.telemetry.snapshot import NodeState, NodeStatus, Snapshot
from tui.metrics import HELD_BACK, METRICS, Floats, Metric
from tui.ramp import level_of, style_of

CELL = 5
PER_ROW = 4
RACK_WIDTH = CELL * PER_ROW + 1
NODE_LINES = 3
PLAIN = Style.null()

STATE_MARK = {
    NodeState.CONNECTING: ("~", Style(color="bright_cyan")),
    NodeState.LIVE: ("*", Style(color="green")),
    NodeState.STALE: ("?", Style(color="yellow", bold=True)),
    NodeState.DOWN: ("x", Style(color="red", bold=True)),
    NodeState.ERROR: ("!", Style(color="red", bold=True)),
}


@dataclass(frozen=True, slots=True)
class Placed:
    """A node on the drawing: column and first line, number in the cluster, first GPU slot and count."""

    x: int
    y: int
    node: int
    gpus: int


def place(cluster: Cluster) -> tuple[list[Placed], dict[str, int], int]:
    """Where each node is drawn: racks side by side, the highest unit on top. Returns racks' columns and the height."""
    racks: dict[str, list[int]] = {}
    for number, node in enumerate(cluster.nodes):
        racks.setdefault(node.rack, []).append(number)
    placed, columns, height = [], {}, 1
    for column, (rack, numbers) in enumerate(racks.items()):
        columns[rack] = column * (RACK_WIDTH + 2)
        y = 1
        for number in sorted(numbers, key=lambda n: -cluster.nodes[n].u):
            gpus = cluster.type_of(cluster.nodes[number]).gpus
            placed.append(Placed(columns[rack], y, number, gpus))
            y += 1 + -(-gpus // PER_ROW)
        height = max(height, y)
    return placed, columns, height


class Elevation(ScrollView, can_focus=True):
    """The racks. The cursor is one GPU; arrows and hjkl move it, a click puts it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "move(-1, 0)", "left", show=False),
        Binding("right,l", "move(1, 0)", "right", show=False),
        Binding("up,k", "move(0, -1)", "up", show=False),
        Binding("down,j", "move(0, 1)", "down", show=False),
        Binding("home", "ends(0)", "first", show=False),
        Binding("end", "ends(1)", "last", show=False),
    ]

    metric: reactive[Metric] = reactive(METRICS[0])
    cursor: reactive[tuple[int, int]] = reactive((0, 0))
    """Node number in the cluster, GPU slot in the node."""

    class Selected(Message):
        """The cursor went to another GPU."""

        def __init__(self, node: int, slot: int) -> None:
            super().__init__()
            self.node, self.slot = node, slot

    def __init__(self, cluster: Cluster, plain: bool, id: str) -> None:
        super().__init__(id=id)
        self.cluster, self.plain = cluster, plain
        self.placed, self.columns, height = place(cluster)
        self._lines: dict[int, list[Placed]] = {}
        for node in self.placed:
            for line in range(node.y, node.y + 1 + -(-node.gpus // PER_ROW)):
                self._lines.setdefault(line, []).append(node)
        self.virtual_size = Size(len(self.columns) * (RACK_WIDTH + 2), height)
        self._snapshot: Snapshot | None = None
        self._values: Floats = np.array([])
        self._held: npt.NDArray[np.bool_] = np.array([], bool)
        self._alarmed: frozenset[int] = frozenset()
        self.cursor = (self.placed[0].node, 0) if self.placed else (0, 0)

    def show(self, snapshot: Snapshot, alarmed: frozenset[int]) -> None:
        """Draw another snapshot; `alarmed` are rows that carry a mark."""
        self._snapshot, self._alarmed = snapshot, alarmed
        self._recolour()

    def watch_metric(self) -> None:
        self._recolour()

    def watch_cursor(self, cursor: tuple[int, int]) -> None:
        place_of = self._cell_region(*cursor)
        if place_of is not None and self.is_mounted:
            self.scroll_to_region(place_of, animate=False, force=True)
        self.refresh()
        self.post_message(self.Selected(*cursor))

    def _recolour(self) -> None:
        if self._snapshot is not None:
            table = self._snapshot.gpus
            self._values = self.metric.values(table)
            bits = np.nan_to_num(table["throttle"]).astype(np.int64)
            self._held = (bits & (HELD_BACK & ~0x4)) != 0
        self.refresh()

    def render_line(self, y: int) -> Strip:
        line = y + self.scroll_offset.y
        x, segments = 0, []
        if line == 0:
            for rack, column in self.columns.items():
                segments.append(Segment(" " * (column - x), PLAIN))
                segments.append(Segment(f" {rack}"[:RACK_WIDTH].ljust(RACK_WIDTH), Style(bold=True, underline=True)))
                x = column + RACK_WIDTH
        for node in self._lines.get(line, []):
            if node.x > x:
                segments.append(Segment(" " * (node.x - x), PLAIN))
            row = line - node.y
            segments += self._title(node) if row == 0 else self._cells(node, row - 1)
            x = node.x + RACK_WIDTH
        strip = Strip(segments or [Segment(" ", PLAIN)])
        return strip.crop(self.scroll_offset.x, self.scroll_offset.x + self.size.width).extend_cell_length(
            self.size.width, PLAIN
        )

    def _status(self, node: Placed) -> NodeStatus | None:
        return self._snapshot.nodes[node.node] if self._snapshot else None

    def _title(self, node: Placed) -> list[Segment]:
        status = self._status(node)
        state = status.state if status else NodeState.CONNECTING
        mark, style = STATE_MARK[state]
        profile = self.cluster.nodes[node.node]
        word = "" if state is NodeState.LIVE else state.value
        text = f" {profile.name} {word}"[: RACK_WIDTH - 7].ljust(RACK_WIDTH - 6)
        return [
            Segment(mark, style),
            Segment(text, Style(dim=state is not NodeState.LIVE)),
            Segment(f"u{profile.u:<4}", Style(dim=True)),
        ]

    def _cells(self, node: Placed, row: int) -> list[Segment]:
        status = self._status(node)
        segments = [Segment(" ", PLAIN)]
        for slot in range(row * PER_ROW, (row + 1) * PER_ROW):
            if slot >= node.gpus:
                segments.append(Segment(" " * CELL, PLAIN))
                continue
            value, held = float("nan"), False
            if status is not None and slot < len(status.rows) and status.state in (NodeState.LIVE, NodeState.STALE):
                gpu = status.rows[slot]
                value, held = float(self._values[gpu]), bool(self._held[gpu]) or gpu in self._alarmed
            level = level_of(value, self.metric.low, self.metric.high)
            text = self.metric.cell(value) if level >= 0 else (" - " if self.plain else " — ")
            chosen = self.cursor == (node.node, slot)
            left, right = ("[", "]") if chosen else (("!", "!") if held else (" ", " "))
            segments.append(Segment(f"{left}{text[:3]:>3}{right}", style_of(level, chosen, held)))
        return segments

    def action_move(self, right: int, down: int) -> None:
        """One cell over; past a node's edge into the next node or rack."""
        node = next((p for p in self.placed if p.node == self.cursor[0]), None)
        if node is None:
            return
        slot = self.cursor[1]
        x, y = node.x // (RACK_WIDTH + 2) * PER_ROW + slot % PER_ROW + right, node.y + 1 + slot // PER_ROW
        lines = sorted({(p.y + 1 + r) for p in self.placed for r in range(-(-p.gpus // PER_ROW))})
        if down:
            at = lines.index(y) + down
            if not 0 <= at < len(lines):
                return
            y = lines[at]
        column = x // PER_ROW * (RACK_WIDTH + 2)
        there = next((p for p in self._lines.get(y, []) if p.x == column), None)
        if there is not None and x >= 0:
            self.cursor = (there.node, min((y - there.y - 1) * PER_ROW + x % PER_ROW, there.gpus - 1))

    def action_ends(self, last: int) -> None:
        """First or last GPU as drawn."""
        node = self.placed[-1 if last else 0]
        self.cursor = (node.node, node.gpus - 1 if last else 0)

    def on_click(self, event: events.Click) -> None:
        x, y = event.x + self.scroll_offset.x, event.y + self.scroll_offset.y
        for node in self._lines.get(y, []):
            row, column = y - node.y - 1, (x - node.x - 1) // CELL
            slot = row * PER_ROW + column
            if row >= 0 and 0 <= column < PER_ROW and slot < node.gpus:
                self.cursor = (node.node, slot)

    def _cell_region(self, number: int, slot: int) -> Region | None:
        node = next((p for p in self.placed if p.node == number), None)
        if node is None:
            return None
        return Region(node.x + 1 + slot % PER_ROW * CELL, node.y, CELL, 2 + slot // PER_ROW)
