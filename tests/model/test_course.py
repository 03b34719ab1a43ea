"""A plan's course on a rack, and the directions that the source paper found (arXiv 2509.10371)."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from engine.model import course as courses
from engine.model import limiter, thermal
from engine.model.course import course
from engine.model.predict import Prediction, predict
from engine.profile import Inlet, Optimizations, Parallelism, Plan, catalog

CORE = catalog.stack("megatron-core")
HOT = catalog.cluster("h200x32-hot")


def predicted(model: str = "gpt3-175b", **given: object) -> Prediction:
    shape = {k: v for k, v in given.items() if k in Parallelism.__struct_fields__}
    rest = {k: v for k, v in given.items() if k not in shape}
    plan = Plan(name="p", parallelism=Parallelism(**shape), optimizations=Optimizations(**rest), global_batch=128)  # type: ignore[arg-type]
    return predict(catalog.model(model), plan, HOT, CORE)


def test_it_settles_where_the_prediction_says() -> None:
    """On a rack that throttles nothing: temperature, power and step of one prediction."""
    cool = catalog.cluster("h200x32")
    plan = Plan(name="p", parallelism=Parallelism(tensor=8, pipeline=4), global_batch=128)
    found = predict(catalog.model("gpt3-175b"), plan, cool, CORE)
    run = course(cool, found, 20)
    assert run.step_s[-1] == pytest.approx(found.iteration_s, rel=0.02)
    assert run.celsius[-1].max() == pytest.approx(found.temperature_c, abs=3)
    assert run.gpus_w[-1] / cool.gpus == pytest.approx(found.power_w, rel=0.05)
    assert run.energy_j == pytest.approx(found.cluster_w * 20 * 60, rel=0.06)
    assert (run.heat_share == 0).all()


def test_the_slowest_rank_sets_the_pace() -> None:
    """S7: a node that is held by heat slows every rank, and the others wait and cool."""
    warmer = msgspec.structs.replace(HOT, inlet=Inlet(bottom_c=16, gradient_k_per_u=0.8))
    found = predicted(tensor=4, pipeline=8)
    run = course(warmer, found, 30)
    held = run.node == 3
    assert run.heat_share[held].max() > 0.2
    assert run.heat_share[~held].max() == 0
    assert run.step_s[-30:].mean() > 1.002 * found.iteration_s


def test_rear_gpus_are_hotter_by_about_a_quarter_and_slower() -> None:
    cool = catalog.cluster("h200x32")
    settled = thermal.steady(thermal.chassis_of(cool), np.full(32, 690.0)).junction_c
    assert 1.15 < settled[4] / settled[0] < 1.35
    held = courses.held(HOT, 705.0)
    top = held.node == 3
    rear = np.arange(32) % 8 >= 4
    assert held.clock_mhz[top & rear].max() < held.clock_mhz[top & ~rear].min()


def test_deep_pipelines_throttle_more_and_tensor_heavy_plans_less() -> None:
    """In the bursts of a microbatch: under a tight power limit the deeper pipeline is held to lower clocks, since a
    tensor-heavy plan waits for its all-reduces in between. Over the whole step the model has it the other way round:
    a pipeline's bubbles cool, which the paper's mean temperatures do not show."""
    heavy, deep, deeper = (predicted(tensor=t, pipeline=p, power_limit_w=550.0) for t, p in ((8, 4), (2, 16), (1, 32)))
    assert heavy.busy_activity < deep.busy_activity < deeper.busy_activity
    assert heavy.sm_clock_mhz >= deep.sm_clock_mhz >= deeper.sm_clock_mhz
    assert heavy.power_w > deeper.power_w


def test_a_microbatch_past_its_best_raises_the_peak_all_the_same() -> None:
    found = {m: predicted(tensor=8, pipeline=4, microbatch=m) for m in (1, 2, 4, 8)}
    best = max(found, key=lambda m: found[m].tokens_per_s)
    assert best < 8
    past = [m for m in found if m >= best]
    rates = [found[m].tokens_per_s for m in past]
    assert rates == sorted(rates, reverse=True)
    peaks = [float(limiter_w(found[m])) for m in past]
    assert peaks == sorted(peaks)


def limiter_w(found: Prediction) -> np.floating:
    """Power of a burst at one temperature."""
    boards = limiter.boards_of(HOT)
    state = limiter.resting(boards)
    running = limiter.Demand(np.full(32, found.busy_activity), np.ones(32))
    return limiter.power_of(boards, running, np.full(32, 1980.0), np.full(32, 60.0))[0] + 0 * state.power_w[0]


def test_overlap_raises_the_peak_temperature() -> None:
    together, apart = predicted(tensor=8, pipeline=4), predicted(tensor=8, pipeline=4, overlap=False)
    assert together.temperature_c > apart.temperature_c + 2
    assert together.iteration_s < apart.iteration_s


def test_recompute_heats_data_parallel_plans_and_not_deep_pipelines() -> None:
    """With data-parallel Llama3-70B it fills what communication leaves; in a deep pipeline of GPT3-175B it is one more
    thing to wait for."""
    wide, wide_again = (predicted("llama3-70b", tensor=8, activation=a) for a in ("stash", "recompute"))
    deep, deep_again = (predicted(tensor=1, pipeline=32, activation=a) for a in ("stash", "recompute"))
    assert wide_again.temperature_c > wide.temperature_c + 1
    assert deep_again.temperature_c < deep.temperature_c


def test_bursts_draw_more_than_the_mean() -> None:
    run = course(HOT, predicted(tensor=2, pipeline=16), 10)
    assert (run.peak_w > run.mean_w * 1.05).all()


@pytest.mark.parametrize("watts", [300.0, 705.0])
def test_the_limiter_holds_a_gpu_at_its_own_point_and_lets_it_go_below(watts: float) -> None:
    held = courses.held(HOT, watts)
    operating = HOT.device.temperature_c.operating
    assert held.peak_c.max() <= operating + 1.5
    free = held.clock_mhz > HOT.device.clock.max - 1
    assert free.all() == (watts == 300.0)
    if watts == 705.0:
        assert held.celsius[held.clock_mhz < 0.97 * HOT.device.clock.max].min() > operating - 5
