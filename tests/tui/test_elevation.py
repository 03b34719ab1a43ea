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
from tui.metrics import METRICS, Metric
from tui.widgets.glyphs import NONE, WRONG, Shades, by_node

NODES = st.lists(st.tuples(st.sampled_from(NodeState), st.lists(st.tuples(st.integers(-1, 15), st.booleans()))))


@given(NODES)
def test_a_node_stands_for_its_worst(nodes: list[tuple[NodeState, list[tuple[int, bool]]]]) -> None:
    told, rows = [], []
    for state, gpus in nodes:
        told.append(SimpleNamespace(state=state, rows=range(len(rows), len(rows) + len(gpus))))
        rows += gpus
    levels, held = np.array([r[0] for r in rows], np.int64), np.array([r[1] for r in rows], bool)
    shades = Shades(np.arange(len(rows)) + 0.5, levels, np.where(held, WRONG, NONE))
    statuses: Any = tuple(told)
    worst, of = by_node(statuses, shades)
    for number, (status, row) in enumerate(zip(told, worst, strict=True)):
        mark = of.marks[number] == WRONG
        assert of.levels[number] == (levels[row] if row >= 0 else -1)
        assert row < 0 or of.values[number] == shades.values[row]
        if status.state not in (NodeState.LIVE, NodeState.STALE) or not len(status.rows):
            assert (row, mark) == (-1, False)
        else:
            assert row == max(status.rows, key=lambda r: (levels[r], -r))
            assert mark == any(held[r] for r in status.rows)


@given(st.sampled_from(METRICS), st.floats(-50, 2500))
def test_the_character_of_a_value(metric: Metric, value: float) -> None:
    """Against a plain reading of what it is to be."""
    if metric.key == "throttle":
        value = float(abs(int(value)) % 3)
        told = "-cH"[int(value)]
    elif metric.key == "limit":
        value = abs(value) % metric.high
        told = metric.cell(value)[-1]
    elif metric.unit == "C":
        told = str(max(0, min(9, int(value / 10))))
    else:
        told = str(max(0, min(9, int(10 * (value - metric.low) / (metric.high - metric.low)))))
    assert chr(metric.digits(np.array([value]))[0]) == told
    assert len(chr(metric.digits(np.array([np.nan]))[0])) == 1


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
