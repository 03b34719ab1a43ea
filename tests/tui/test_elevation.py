"""What stands for a node on the smallest drawing: its worst GPU, the first of equals, and any mark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.telemetry.snapshot import NodeState
from tui.widgets.elevation import _by_node

NODES = st.lists(st.tuples(st.sampled_from(NodeState), st.lists(st.tuples(st.integers(-1, 15), st.booleans()))))


@given(NODES)
def test_a_node_stands_for_its_worst(nodes: list[tuple[NodeState, list[tuple[int, bool]]]]) -> None:
    told, rows = [], []
    for state, gpus in nodes:
        told.append(SimpleNamespace(state=state, rows=range(len(rows), len(rows) + len(gpus))))
        rows += gpus
    snapshot: Any = SimpleNamespace(nodes=told)
    levels, held = np.array([r[0] for r in rows], np.int64), np.array([r[1] for r in rows], bool)
    worst, marked = _by_node(snapshot, levels, held)
    for status, row, mark in zip(told, worst, marked, strict=True):
        if status.state not in (NodeState.LIVE, NodeState.STALE) or not len(status.rows):
            assert (row, mark) == (-1, False)
        else:
            assert row == max(status.rows, key=lambda r: (levels[r], -r))
            assert mark == any(held[r] for r in status.rows)
