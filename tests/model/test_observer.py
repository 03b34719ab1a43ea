"""The twin: it finds constants it was not told, believes no sensor that lies, and its forecasts come true."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.model import anomaly, observer, thermal
from engine.model.forecast import forecast
from engine.model.observer import JUMP, OK, RANGE, STUCK, Twin
from engine.model.thermal import Chassis, Floats, Heat
from engine.profile import catalog

BUILT = thermal.chassis_of(catalog.cluster("h100x64"))
N = len(BUILT.inlet_c)
OPERATING = np.full(N, 87.0)


class Node:
    """Sixty-four GPUs of the twin's own form with constants of their own, and sensors that round and scatter."""

    def __init__(self, seed: int = 1, spread: float = 0.2, **changes: Floats) -> None:
        self.chance = np.random.default_rng(seed)

        def near(values: Floats) -> Floats:
            return np.asarray(values * self.chance.uniform(1 - spread, 1 + spread, N))

        self.chassis: Chassis = replace(
            BUILT, r_sink=near(BUILT.r_sink), c_sink=near(BUILT.c_sink), r_die=near(BUILT.r_die)
        )
        self.chassis = replace(self.chassis, **changes)
        self.heat: Heat = thermal.steady(self.chassis, np.full(N, 80.0))
        self.twin: Twin = observer.begin(BUILT)
        self.watts: Floats = np.full(N, 80.0)

    def read(self) -> Floats:
        return np.asarray(np.round(self.heat.junction_c + self.chance.standard_normal(N)))

    def run(self, seconds: int, watts: float | None = None, lie: dict[int, float] | None = None) -> Node:
        if watts is not None:
            self.watts = watts * self.chance.uniform(0.95, 1.05, N)
        for _ in range(seconds):
            self.heat = thermal.step(self.chassis, self.heat, self.watts, 1.0)
            celsius = self.read()
            for row, value in (lie or {}).items():
                celsius[row] = value
            self.twin = observer.advance(self.twin, celsius, self.watts, 1.0)
        return self


def test_it_finds_the_constants_it_was_not_told() -> None:
    node = Node().run(60).run(200, 650).run(150, 350).run(200, 600)
    learned, before = observer.learned(node.twin), np.abs(BUILT.r_sink / node.chassis.r_sink - 1)
    total = (learned.r_sink + learned.r_die) / (node.chassis.r_sink + node.chassis.r_die) - 1
    assert before.mean() > 0.08
    assert np.abs(total).mean() < 0.03
    assert np.abs(learned.c_sink / node.chassis.c_sink - 1).mean() < 0.12
    assert np.abs(observer.junction_c(node.twin) - node.heat.junction_c).mean() < 0.4
    settled = thermal.steady(node.chassis, node.watts).junction_c
    assert np.abs(observer.settled_c(node.twin) - settled).mean() < 0.5


def test_a_forecast_comes_true_and_says_when_a_limit_is_passed() -> None:
    node = Node(inlet_c=BUILT.inlet_c + 20).run(60).run(200, 500).run(150, 300)
    node.run(5, 690)
    found = forecast(node.twin, node.twin.mean_w, OPERATING)
    passed = np.full(N, np.inf)
    inside, errors, heat = [], [], node.heat
    for second in range(1, 301):
        heat = thermal.step(node.chassis, heat, node.watts, 1.0)
        passed = np.where((heat.junction_c >= 87) & np.isinf(passed), second, passed)
        at = np.flatnonzero(found.times_s == second)
        if len(at):
            free = np.minimum(heat.junction_c, 88.0)
            inside.append((free >= found.low[:, at[0]]) & (free <= found.high[:, at[0]]))
            errors.append(np.abs(free - found.celsius[:, at[0]]))
    assert np.mean(errors) < 1.0
    assert np.mean(inside) > 0.85
    both = np.isfinite(found.reaches_s) & np.isfinite(passed)
    assert both.sum() > 10
    assert np.abs(found.reaches_s[both] - passed[both]).mean() < 5
    assert (np.isfinite(found.reaches_s) == np.isfinite(passed)).mean() > 0.9


def test_a_stuck_sensor_is_named_and_not_believed() -> None:
    node = Node().run(60).run(120, 400)
    held = float(round(node.heat.junction_c[3]))
    node.run(90, 650, lie={3: held})
    assert node.twin.fault[3] == STUCK
    assert abs(observer.junction_c(node.twin)[3] - node.heat.junction_c[3]) < 2.5
    assert (np.delete(node.twin.fault, 3) == OK).all()
    node.run(30)
    assert node.twin.fault[3] == OK


def test_a_steady_reading_at_steady_load_is_not_stuck() -> None:
    """Whole degrees stand still for minutes when nothing changes."""
    node = Node().run(60).run(120, 500)
    value = float(round(node.heat.junction_c[5]))
    node.run(300, lie={5: value})
    assert node.twin.fault[5] == OK


def test_a_torn_reading_moves_nothing_and_values_out_of_range_are_refused() -> None:
    node = Node().run(60).run(200, 500)
    before = observer.junction_c(node.twin)
    node.run(1, lie={2: 12.0, 7: 255.0, 9: -60.0})
    assert [node.twin.fault[row] for row in (2, 7, 9)] == [JUMP, RANGE, RANGE]
    assert np.abs(observer.junction_c(node.twin) - before)[[2, 7, 9]].max() < 1
    node.run(1)
    assert [node.twin.fault[row] for row in (2, 7, 9)] == [OK, OK, OK]


def test_a_gpu_that_really_changed_is_believed_after_a_while() -> None:
    """A fan stops: the reading climbs far beyond the band and stays there."""
    node = Node().run(60).run(200, 500)
    node.heat = replace(node.heat, sink_c=node.heat.sink_c + np.where(np.arange(N) == 4, 25.0, 0.0))
    node.chassis = replace(node.chassis, inlet_c=node.chassis.inlet_c + np.where(np.arange(N) == 4, 25.0, 0.0))
    node.run(3)
    assert node.twin.fault[4] == JUMP
    node.run(60)
    assert node.twin.fault[4] == OK
    assert abs(observer.junction_c(node.twin)[4] - node.heat.junction_c[4]) < 1.5


def test_missing_readings_are_bridged_and_a_late_node_joins() -> None:
    node = Node()
    nothing = np.full(N, np.nan)
    twin = observer.advance(node.twin, nothing, nothing, 1.0)
    assert np.isnan(observer.junction_c(twin)).all()
    node.run(60).run(120, 500)
    gap = node.twin
    for _ in range(30):
        node.heat = thermal.step(node.chassis, node.heat, node.watts, 1.0)
        gap = observer.advance(gap, nothing, nothing, 1.0)
    assert np.abs(observer.junction_c(gap) - node.heat.junction_c).mean() < 1


def test_a_clogged_heatsink_stands_out_and_its_neighbours_are_the_evidence() -> None:
    factor = np.ones(N)
    factor[5] = 1.6
    node = Node(spread=0.03, r_sink=BUILT.r_sink * factor).run(60).run(200, 600).run(150, 400).run(200, 620)
    found = forecast(node.twin, node.twin.mean_w, OPERATING)
    seen = anomaly.excess(node.twin, found.settled_sd)
    assert list(np.flatnonzero(seen.odd)) == [5]
    assert seen.own_k[5] == pytest.approx(0.6 * BUILT.r_sink[5] * node.watts[5], abs=2.5)
    assert seen.rest_k[5] < 4


def test_a_warm_node_is_the_nodes_and_not_its_gpus() -> None:
    warm = BUILT.inlet_c + np.where(BUILT.node == 2, 9.0, 0.0)
    node = Node(spread=0.03, inlet_c=warm).run(60).run(200, 600)
    found = forecast(node.twin, node.twin.mean_w, OPERATING)
    seen = anomaly.excess(node.twin, found.settled_sd)
    assert not seen.odd.any()
    assert seen.node_k[16] == pytest.approx(9, abs=2)
    assert abs(seen.node_k[0]) < 2


@pytest.mark.parametrize("unknown", [0.0, 0.3, 0.9, 1.0])
def test_neighbours_are_those_of_the_node_however_its_gpus_are_numbered(unknown: float) -> None:
    """All nodes at once, compared with each GPU by itself."""
    chance = np.random.default_rng(1)
    node = np.repeat(np.arange(9), chance.integers(1, 9, 9))
    chance.shuffle(node)
    off = np.where(chance.random(len(node)) < unknown, np.nan, chance.normal(0, 3, len(node)))
    common, stray = anomaly._by_node(off, node), anomaly._stray(off, node)
    for n in range(9):
        known = off[node == n][~np.isnan(off[node == n])]
        assert common[n] == pytest.approx(np.median(known) if len(known) else np.nan, nan_ok=True)
    for row, n in enumerate(node):
        others = np.abs(np.delete(off, row)[np.delete(node, row) == n])
        others = others[~np.isnan(others)]
        assert stray[row] == pytest.approx(np.quantile(others, 0.9) if len(others) else np.nan, nan_ok=True)
