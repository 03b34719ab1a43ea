"""Where racks stand: nothing overlaps, nothing is lost, the cursor reaches every GPU, at any size and zoom."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.profile import Cluster, catalog
from tui.widgets.layout import Kind, Zoom, fitting, lay_out, visible

BASE = catalog.cluster("h100x64")


def cluster(racks: list[int]) -> Cluster:
    """So many nodes in each rack."""
    nodes = [
        msgspec.structs.replace(BASE.nodes[0], name=f"n{rack}-{i}", rack=f"r{rack}", u=1 + 8 * i)
        for rack, count in enumerate(racks)
        for i in range(count)
    ]
    return msgspec.structs.replace(BASE, nodes=tuple(nodes))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=40), st.integers(1, 400), st.sampled_from(Zoom))
def test_nothing_overlaps_and_nothing_is_lost(racks: list[int], width: int, zoom: Zoom) -> None:
    made = cluster(racks)
    found = lay_out(made, zoom, width)
    for blocks in found.lines.values():
        assert all(a.x + a.width <= b.x for a, b in pairwise(blocks))
    drawn = {(n, s) for n, s in found.at}
    want = (
        {(n, -1) for n in range(sum(racks))}
        if zoom is Zoom.NODES
        else {(n, s) for n in range(sum(racks)) for s in range(8)}
    )
    assert drawn == want
    assert max(found.lines) + 1 == found.height
    assert all(b.x + b.width <= found.width for blocks in found.lines.values() for b in blocks)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(20, 200), st.sampled_from(Zoom))
def test_arrows_reach_everything(racks: list[int], width: int, zoom: Zoom) -> None:
    found = lay_out(cluster(racks), zoom, width)
    start = found.spots[found.rows[0]][0]
    seen, left = {(start.x, start.y)}, [start]
    while left:
        spot = left.pop()
        for right, down in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            there = found.beside(spot, right, down)
            if there is not None and (there.x, there.y) not in seen:
                seen.add((there.x, there.y))
                left.append(there)
    assert len(seen) == len(found.at)


@pytest.mark.parametrize(
    ("racks", "size", "zoom"),
    [
        ([4], (60, 40), Zoom.FULL),
        ([4] * 16, (80, 40), Zoom.GPUS),
        ([4] * 256, (100, 56), Zoom.NODES),
        ([4], (20, 3), Zoom.NODES),
    ],
)
def test_the_largest_drawing_that_fits(racks: list[int], size: tuple[int, int], zoom: Zoom) -> None:
    found = fitting(cluster(racks), *size)
    assert found.zoom is zoom
    assert found.height <= size[1]


@given(st.integers(0, 300), st.integers(1, 120))
def test_what_is_in_view_is_what_is_drawn(first: int, width: int) -> None:
    blocks = lay_out(cluster([2] * 12), Zoom.FULL, 400).lines[0]
    seen = visible(blocks, first, width)
    assert seen == [b for b in blocks if b.x < first + width and b.x + b.width > first]
    assert all(b.kind is Kind.RACK for b in seen)
