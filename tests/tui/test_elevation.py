"""The racks: what stands for a node on the smallest drawing, and marks for what is to come."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.control.ahead import ahead
from engine.control.watch import Watch
from engine.telemetry.snapshot import NodeState
from tests.parts.still import still
from tui.metrics import METRICS
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


async def test_a_gpu_that_will_reach_its_limit_is_marked_and_told_when(tmp_path: Path) -> None:
    app = still(tmp_path)
    snapshot = app.control.snapshot
    watch = app.control.watch
    forecast = watch.ahead()
    assert forecast is not None
    coming = np.full(32, np.inf)
    coming[3 * 8 + 2], coming[0] = 150.0, 500.0
    watch._forecast = replace(forecast, reaches_s=coming)
    found = ahead(watch, snapshot)
    assert found is not None
    assert [(r, found.reaches_s[r]) for r in np.flatnonzero(np.isfinite(found.reaches_s))] == [(0, 500.0), (26, 150.0)]
    course = found.of(26)
    assert course is not None
    assert (course.reaches_s, course.limit_c) == (150.0, 87.0)
    async with app.run_test(size=(120, 36)) as pilot:
        await pilot.pause()
        drawn = "\n".join(app.racks.render_line(y).text for y in range(app.racks.size.height))
        assert drawn.count("^") == 4
        app.racks.metric = next(m for m in METRICS if m.key == "limit")
        await pilot.pause()
        drawn = "\n".join(app.racks.render_line(y).text for y in range(app.racks.size.height))
        assert "^  2^" in drawn
        assert "^  8^" in drawn


def test_nothing_is_foreseen_before_anything_is_seen(tmp_path: Path) -> None:
    control = still(tmp_path).control
    assert ahead(Watch(control.cluster), control.snapshot) is None
    for metric in METRICS:
        values = metric.values(control.snapshot.gpus, None)
        assert np.isnan(values).all() == (metric.key in ("settled", "limit"))
