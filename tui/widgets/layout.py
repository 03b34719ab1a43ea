"""Where racks, nodes and GPUs stand on the drawing: racks side by side in rows, the highest unit on top."""

from __future__ import annotations

import enum
from bisect import bisect_left
from dataclasses import dataclass

from engine.profile import Cluster

CELL, PER_ROW, GAP = 5, 4, 2
RACK_WIDTH = CELL * PER_ROW + 1
NAME = 7
"""Columns of a rack's name where a rack is one line."""


class Zoom(enum.IntEnum):
    """How much a character stands for: a node, a GPU, or a fifth of a GPU's cell with its figure."""

    NODES = 0
    GPUS = 1
    FULL = 2


class Kind(enum.Enum):
    """What a block of a line shows."""

    RACK = "rack"
    TITLE = "title"
    CELLS = "cells"
    DOTS = "dots"
    NODES = "nodes"


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a line: `of` names the rack, or gives node numbers; the cells are slots from `first` on."""

    x: int
    width: int
    kind: Kind
    rack: str = ""
    nodes: tuple[int, ...] = ()
    first: int = 0
    count: int = 0

    @property
    def filled(self) -> int:
        """Columns that something stands in."""
        if self.kind is Kind.DOTS:
            return self.count
        return NAME + len(self.nodes) if self.kind is Kind.NODES else self.width


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a GPU (or with `slot` -1 a node) is drawn."""

    x: int
    y: int
    node: int
    slot: int
    width: int


@dataclass(frozen=True)
class Layout:
    """Blocks of each line from left to right, and every spot the cursor can stand on, by line."""

    zoom: Zoom
    width: int
    height: int
    lines: dict[int, list[Block]]
    spots: dict[int, list[Spot]]
    rows: list[int]
    """Lines with spots."""
    at: dict[tuple[int, int], Spot]

    def spot(self, node: int, slot: int) -> Spot | None:
        """Where a GPU is drawn; its node where nodes are."""
        return self.at.get((node, slot)) or self.at.get((node, -1))

    def beside(self, spot: Spot, right: int, down: int) -> Spot | None:
        """The next spot in a direction; None at the edge."""
        if down:
            at = self.rows.index(spot.y) + down
            if not 0 <= at < len(self.rows):
                return None
            return min(self.spots[self.rows[at]], key=lambda s: abs(s.x - spot.x))
        line = self.spots[spot.y]
        at = line.index(spot) + right
        return line[at] if 0 <= at < len(line) else None

    def under(self, x: int, y: int) -> Spot | None:
        """What is drawn there."""
        return next((s for s in self.spots.get(y, []) if s.x <= x < s.x + s.width), None)


def fitting(cluster: Cluster, width: int, height: int) -> Layout:
    """The largest drawing that fits, or the smallest there is."""
    for zoom in (Zoom.FULL, Zoom.GPUS):
        found = lay_out(cluster, zoom, width)
        if found.height <= height and found.width <= max(width, RACK_WIDTH):
            return found
    return lay_out(cluster, Zoom.NODES, width)


def lay_out(cluster: Cluster, zoom: Zoom, width: int) -> Layout:
    """Racks in rows of the width that there is."""
    racks: dict[str, list[int]] = {}
    for number, node in enumerate(cluster.nodes):
        racks.setdefault(node.rack, []).append(number)
    gpus = [cluster.type_of(node).gpus for node in cluster.nodes]
    for numbers in racks.values():
        numbers.sort(key=lambda n: -cluster.nodes[n].u)
    most = max(map(len, racks.values()), default=1)
    wide = {Zoom.FULL: RACK_WIDTH, Zoom.GPUS: max(max(gpus, default=1), 4), Zoom.NODES: NAME + most}[zoom]
    per_row = max(1, (width + GAP) // (wide + GAP))
    lines: dict[int, list[Block]] = {}
    spots: dict[int, list[Spot]] = {}
    top, names = 0, list(racks)
    for begin in range(0, len(names), per_row):
        bottom = top
        for column, rack in enumerate(names[begin : begin + per_row]):
            y = _rack(rack, racks[rack], gpus, zoom, column * (wide + GAP), top, wide, lines, spots)
            bottom = max(bottom, y)
        top = bottom + (0 if zoom is Zoom.NODES else 1)
    at = {(s.node, s.slot): s for line in spots.values() for s in line}
    columns = min(per_row, len(names))
    height = top if zoom is Zoom.NODES else top - 1
    return Layout(zoom, columns * (wide + GAP) - GAP, max(1, height), lines, spots, sorted(spots), at)


def _rack(
    rack: str,
    numbers: list[int],
    gpus: list[int],
    zoom: Zoom,
    x: int,
    y: int,
    wide: int,
    lines: dict[int, list[Block]],
    spots: dict[int, list[Spot]],
) -> int:
    """Draw one rack from `y` on; the line after it."""

    def block(line: int, **more: object) -> None:
        lines.setdefault(line, []).append(Block(x, wide, **more))  # type: ignore[arg-type]

    if zoom is Zoom.NODES:
        block(y, kind=Kind.NODES, rack=rack, nodes=tuple(numbers))
        spots.setdefault(y, []).extend(Spot(x + NAME + i, y, n, -1, 1) for i, n in enumerate(numbers))
        return y + 1
    block(y, kind=Kind.RACK, rack=rack)
    y += 1
    for number in numbers:
        if zoom is Zoom.GPUS:
            block(y, kind=Kind.DOTS, nodes=(number,), count=gpus[number])
            spots.setdefault(y, []).extend(Spot(x + i, y, number, i, 1) for i in range(gpus[number]))
            y += 1
            continue
        block(y, kind=Kind.TITLE, nodes=(number,))
        y += 1
        for first in range(0, gpus[number], PER_ROW):
            count = min(PER_ROW, gpus[number] - first)
            block(y, kind=Kind.CELLS, nodes=(number,), first=first, count=count)
            spots.setdefault(y, []).extend(Spot(x + 1 + i * CELL, y, number, first + i, CELL) for i in range(count))
            y += 1
    return y


def visible(blocks: list[Block], first: int, width: int) -> list[Block]:
    """Those of a line that stand in view."""
    begin = bisect_left(blocks, first, key=lambda b: b.x + b.width - 1)
    end = bisect_left(blocks, first + width, key=lambda b: b.x)
    return blocks[begin:end]
