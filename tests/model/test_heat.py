"""Power and temperature against what was measured in public."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from engine.model import power, thermal
from engine.profile import Inlet, catalog

H100 = catalog.device("h100-sxm-80g")


def test_idle() -> None:
    """Eight H100 SXM idle at 66-72 W, 29-32 C."""
    assert 62 < float(power.power_w(H100, 0.0, H100.clock.idle, 31)) < 76


def test_the_clock_under_a_limit_keeps_it() -> None:
    limits = np.arange(200.0, 701.0, 50.0)
    clock = power.clock_under_limit(H100, 1.0, limits, 70.0)
    assert np.all(np.diff(clock) >= 0)
    assert np.all(power.power_w(H100, 1.0, clock, 70.0) <= limits)
    assert np.all((clock - H100.clock.idle) % H100.clock.step == 0)


def test_activity_is_found_again() -> None:
    for activity in (0.2, 0.6, 1.0):
        watts = power.power_w(H100, activity, 1755, 66)
        assert float(power.activity_of(H100, watts, 1755.0, 66.0)) == pytest.approx(activity, abs=1e-3)


def test_rear_gpus_breathe_warmed_air() -> None:
    """73 C is a rear GPU's at 700 W and an inlet of 30 C."""
    chassis = thermal.chassis_of(catalog.cluster("h100x64"))
    settled = thermal.steady(chassis, np.full(64, 700.0)).junction_c - chassis.inlet_c + 30
    assert settled[4:8].max() == pytest.approx(73, abs=2)
    assert settled[4] - settled[0] == pytest.approx(14.5, abs=1.5)


def test_fans_follow_the_load() -> None:
    """Eight idle H100 sit 5 to 7 K above the air although a tenth of the power at full flow would make 3."""
    chassis = thermal.chassis_of(catalog.cluster("h100x64"))
    idle, busy = (thermal.steady(chassis, np.full(64, w)) for w in (69.0, 600.0))
    assert idle.junction_c[0] - chassis.inlet_c[0] == pytest.approx(4.2, abs=0.5)
    assert idle.junction_c[4] - chassis.inlet_c[4] == pytest.approx(7.0, abs=0.7)
    assert (busy.flow == 1).all()
    assert (idle.flow < 0.6).all()


def test_at_steady_state_it_is_the_linear_form_and_leakage_makes_the_square() -> None:
    """S6: T = T_ambient + P R against measured power, which holds leakage. Against power without it what is missing
    grows like a square: 0.4e-5 to 1.5e-5 K/W^2, far below the text's 7.3e-5."""
    chassis = thermal.chassis_of(catalog.cluster("h100x64"))
    watts = np.linspace(450, 700, 6)
    celsius = np.array([thermal.steady(chassis, np.full(64, w)).junction_c[0] for w in watts])
    square, linear, _ = np.polyfit(watts, celsius, 2)
    assert abs(square) < 1e-9
    assert linear == pytest.approx(chassis.r_die[0] + chassis.r_sink[0])
    for slot in (0, 4):  # a front and a rear GPU
        hot = thermal.steady(chassis, np.full(64, 700.0)).junction_c[slot]
        rise = hot - chassis.inlet_c[slot]
        without = 700.0 - float(power.leakage_w(H100, hot))
        assert 0.4e-5 < (rise - without * rise / 700.0) / without**2 < 1.5e-5


def test_cold_plates_have_no_fans() -> None:
    """Eight liquid-cooled H100 under load: 41 to 50 C, 6.99 kW with their node (arXiv 2507.16781)."""
    kind, base = catalog.node_type("hgx-h100-liquid"), catalog.cluster("h100x64")
    node = msgspec.structs.replace(base.nodes[0], type=kind.name)
    cluster = msgspec.structs.replace(base, nodes=(node,), types={kind.name: kind}, inlet=Inlet(bottom_c=30))
    chassis = thermal.chassis_of(cluster)
    for watts in (70.0, 614.0):
        assert (thermal.steady(chassis, np.full(8, watts)).flow == 1).all()
    settled = thermal.steady(chassis, np.full(8, 614.0)).junction_c
    assert settled.min() == pytest.approx(41, abs=1)
    assert settled.max() == pytest.approx(50, abs=1)
    assert kind.host_w + 8 * 614 == pytest.approx(6990, rel=0.01)


def test_power_is_the_sum_of_what_draws_it() -> None:
    parts = power.parts_w(H100, 0.9, 1755, 66)
    assert sum(parts.values()) == pytest.approx(float(power.power_w(H100, 0.9, 1755, 66)))
    assert 90 < parts["memory"] < 125
    assert 45 < parts["leakage"] < 65


def test_steps_of_any_length_settle_at_the_steady_state() -> None:
    chassis = thermal.chassis_of(catalog.cluster("h200x32"))
    watts = np.linspace(100, 700, 32)
    want = thermal.steady(chassis, watts)
    for seconds in (0.1, 1.0, 30.0):
        heat = thermal.steady(chassis, np.zeros(32))
        for _ in range(int(600 / seconds)):
            heat = thermal.step(chassis, heat, watts, seconds)
        assert heat.junction_c == pytest.approx(want.junction_c, abs=0.05)


def test_the_top_node_is_eleven_kelvin_hotter() -> None:
    chassis = thermal.chassis_of(catalog.cluster("h200x32"))
    settled = thermal.steady(chassis, np.full(32, 500.0)).junction_c
    assert settled[24:].max() - settled[:8].max() == pytest.approx(11, abs=0.01)


@pytest.mark.parametrize("name", catalog.names("device"))
def test_the_clock_under_a_limit_is_the_highest_step_that_fits(name: str) -> None:
    """Found by halving, the same as by trying every step."""
    device, random = catalog.device(name), np.random.default_rng(1)
    activity, celsius = random.uniform(0, 1.3, 500), random.uniform(20, 100, 500)
    limit = random.uniform(device.power_limit_w.min / 2, device.power_limit_w.max, 500)
    steps = np.arange(device.clock.max, device.clock.idle - 0.5, -device.clock.step)
    fits = power.power_w(device, activity[:, None], steps, celsius[:, None]) <= limit[:, None]
    tried = np.where(fits.any(axis=1), steps[fits.argmax(axis=1)], steps[-1])
    assert (power.clock_under_limit(device, activity, limit, celsius) == tried).all()


@pytest.mark.parametrize("name", catalog.names("cluster"))
def test_the_hottest_gpu_of_many_powers_is_the_networks_own(name: str) -> None:
    chassis, watts = thermal.chassis_of(catalog.cluster(name)), np.array([100.0, 350.0, 700.0])
    each = [thermal.steady(chassis, np.full(len(chassis.inlet_c), p)).junction_c.max() for p in watts]
    assert thermal.hottest_c(chassis, watts) == pytest.approx(each)
