"""What-if from the live job: this minute's clocks, limits, links and warmth go into the plans that are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from engine.control.conditions import conditions
from engine.control.control import Control
from engine.model import thermal
from engine.model.predict import Prediction
from engine.plan.compare import Compared
from engine.plan.conditions import Conditions, limited, under
from engine.profile import Parallelism, Plan, catalog
from tests.parts.still import still


def changed(control: Control, **columns: dict[int, float]) -> None:
    """The snapshot with some readings of some rows replaced."""
    s = control.snapshot
    gpus = {name: values.copy() for name, values in s.gpus.columns.items()}
    for name, rows in columns.items():
        for row, value in rows.items():
            gpus[name][row] = value
    control.snapshot = replace(s, gpus=replace(s.gpus, columns=MappingProxyType(gpus)))


def first(rows: Sequence[Compared]) -> Prediction:
    found = rows[0].prediction
    assert not isinstance(found, str)
    return found


@pytest.fixture
def control(tmp_path: Path) -> Control:
    return still(tmp_path).control


def test_a_healthy_rack_changes_nothing(control: Control) -> None:
    changed(control, throttle=dict.fromkeys(range(32), 0.0))
    found = control.conditions()
    assert (found.clock_mhz, found.power_limit_w, found.fabric_share, found.network_share) == (None, None, 1.0, 1.0)


def test_a_gpu_held_by_heat_slows_every_plan(control: Control) -> None:
    healthy = first(control.alternatives(Conditions()))
    changed(control, sm_clock_mhz={29: 1413.0}, throttle={29: float(0x20)})
    now = control.conditions()
    assert now.clock_mhz == 1410
    assert "n04 GPU 5 is held at 1413 MHz" in now.told
    rows = control.alternatives(now)
    assert first(rows).sm_clock_mhz == 1410
    assert first(rows).iteration_s > 1.05 * healthy.iteration_s
    assert all(r.prediction.sm_clock_mhz <= 1410 for r in rows if not isinstance(r.prediction, str))


def test_a_low_limit_is_taken_into_account(control: Control) -> None:
    changed(control, power_limit_w={3: 400.0})
    now = control.conditions()
    assert now.power_limit_w == 400
    assert "n01 GPU 3 is limited to 400 W" in now.told
    assert first(control.alternatives(now)).power_w <= 400


def test_links_that_are_down_carry_nothing(control: Control) -> None:
    links = control.snapshot.links
    state = list(links.state)
    lost = next(
        i
        for i, (n, g, k) in enumerate(zip(links.node, links.gpu, links.kind, strict=True))
        if (n, g, k) == ("n02", 3, "nvlink")
    )
    port = next(i for i, (n, k) in enumerate(zip(links.node, links.kind, strict=True)) if (n, k) == ("n03", "nic"))
    state[lost] = state[port] = "inactive"
    control.snapshot = replace(control.snapshot, links=replace(links, state=tuple(state)))
    now = control.conditions()
    assert now.fabric_share == pytest.approx(0.5)  # one of the two links that these nodes show
    assert now.network_share == pytest.approx(7 / 8)
    assert "n02 GPU 3 has 50% of its NVLinks' bandwidth" in now.told
    assert "n03 has 88% of its network ports" in now.told
    healthy, hurt = control.cluster, under(control.cluster, now)
    assert hurt.device.fabric.gb_s == pytest.approx(healthy.device.fabric.gb_s / 2)
    assert hurt.node_gb_s == pytest.approx(healthy.node_gb_s * 7 / 8)


def test_a_node_that_is_warmer_than_its_power_explains(control: Control) -> None:
    watts = control.snapshot.gpus["power_w"]
    expected = thermal.steady(thermal.chassis_of(control.cluster), watts).junction_c
    expected[8:16] += 9.0
    now = conditions(control.cluster, control.snapshot, expected)
    assert now.warmer_k["n02"] == pytest.approx(8.0)
    assert now.warmer_k["n01"] == 0
    assert "n02 is 8 K warmer than its power and place explain" in now.told
    before, after = control.cluster, under(control.cluster, now)
    assert after.inlet_c(after.nodes[1]) == pytest.approx(before.inlet_c(before.nodes[1]) + 8.0)


def test_what_is_not_read_is_taken_for_healthy(control: Control) -> None:
    nothing = {row: float("nan") for row in range(32)}
    changed(control, sm_clock_mhz=nothing, throttle=nothing, power_limit_w=nothing, power_w=nothing)
    found = conditions(control.cluster, control.snapshot, np.full(32, np.nan))
    assert found == Conditions(warmer_k={})


def test_a_plans_own_limits_stay_where_they_are_lower() -> None:
    plan = catalog.plan("data-parallel")
    own = limited(Plan(name="p", parallelism=Parallelism()), Conditions(clock_mhz=1200.0, power_limit_w=500.0))
    assert (own.optimizations.sm_clock_mhz, own.optimizations.power_limit_w) == (1200.0, 500.0)
    lower = limited(own, Conditions(clock_mhz=1500.0, power_limit_w=600.0))
    assert lower.optimizations == own.optimizations
    assert limited(plan, Conditions()) == plan
