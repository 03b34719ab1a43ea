"""Power and temperature against what was measured in public."""

from __future__ import annotations

import numpy as np
import pytest

from engine.model import power, thermal
from engine.profile import catalog

H100 = catalog.device("h100-sxm-80g")
# arXiv 2604.11391: board power of an H100 against SM clock under a compute-bound training load.
DRAW_W = np.array([199, 298, 395, 493, 591, 647])
CLOCK_MHZ = np.array([625, 1132, 1501, 1731, 1889, 1969])


def test_the_h100_power_clock_line() -> None:
    """Within 4 % at the temperature a front GPU settles at under that power (inlet 30 C)."""
    celsius = 30 + 0.042 * DRAW_W
    found = power.power_w(H100, 1.0, CLOCK_MHZ, celsius)
    assert found == pytest.approx(DRAW_W, rel=0.04)


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
    """Four H100s at 690 W read 54 to 68 C in one chassis; 73 C is a rear GPU's at 700 W and 30 C inlet."""
    cluster = catalog.cluster("h100x64")
    chassis = thermal.chassis_of(cluster)
    settled = thermal.steady(chassis, np.full(64, 690.0)).junction_c - chassis.inlet_c
    assert settled[0] == pytest.approx(29.0, abs=0.2)
    assert settled[4] - settled[0] == pytest.approx(13.8, abs=0.2)


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
