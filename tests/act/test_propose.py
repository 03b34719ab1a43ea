"""Proposals: what would be sent, what it would do, and why it cannot be done."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.act import effect, propose
from engine.act.action import ClockLock, Microbatch, Rebalance, Throttle
from engine.act.effect import Load, Rack
from engine.act.propose import JobView, Target
from engine.model import pace, thermal
from engine.model.predict import predict, with_microbatch
from engine.profile import catalog

CLUSTER = catalog.cluster("h200x32-400g")
MODEL, PLAN = catalog.model("llama3-8b"), catalog.plan("data-parallel")
PREDICTED = predict(MODEL, PLAN, CLUSTER, catalog.stack(PLAN.stack))
RANKS = PREDICTED.dp
GPUS = CLUSTER.gpus


def rack(celsius: np.ndarray | float = 60.0, settled: np.ndarray | float | None = None) -> Rack:
    """Every GPU at 640 W under a limit of 700 W and 1900 MHz."""
    now = np.full(GPUS, 1.0) * celsius
    headed = now if settled is None else np.full(GPUS, 1.0) * settled
    return effect.rack_of(
        CLUSTER,
        thermal.chassis_of(CLUSTER),
        now,
        headed,
        np.full(GPUS, 640.0),
        np.full(GPUS, 700.0),
        np.full(GPUS, 1900.0),
    )


def load(counts: tuple[int, ...] | None = None) -> Load:
    split = counts or (PREDICTED.microbatches,) * RANKS
    return Load(
        pace=PREDICTED.pace,
        replica=pace.replica_of_gpu(PLAN, RANKS, GPUS),
        microbatches=np.asarray(split),
        step_s=PREDICTED.iteration_s,
        tokens=PREDICTED.tokens_per_iteration,
        memory_gib=PREDICTED.memory.total_gib,
    )


def job(counts: tuple[int, ...] | None = None, known: bool = True) -> JobView:
    split = counts or (PREDICTED.microbatches,) * RANKS

    def reload(value: int) -> Load | str:
        found = predict(MODEL, with_microbatch(PLAN, value), CLUSTER, catalog.stack(PLAN.stack))
        even = np.full(RANKS, found.microbatches)
        return Load(found.pace, load().replica, even, load().step_s, load().tokens, found.memory.total_gib)

    return JobView(
        name="run",
        global_batch=PLAN.global_batch,
        microbatch=PLAN.optimizations.microbatch,
        microbatches=split,
        can=frozenset({"microbatch", "rebalance"}),
        load=load(split) if known else None,
        reload=reload if known else None,
    )


def target(rows: range, reachable: bool = True) -> Target:
    count = len(rows)
    return Target(
        label="n01",
        rows=tuple(rows),
        node=tuple(CLUSTER.nodes[row // 8].name for row in rows),
        index=tuple(row % 8 for row in rows),
        min_w=(200.0,) * count,
        max_w=(700.0,) * count,
        default_w=(700.0,) * count,
        max_mhz=(1980.0,) * count,
        reachable=(reachable,) * count,
    )


def test_a_throttle_slows_cools_and_says_by_how_much() -> None:
    p = propose.throttle(rack(), load(), target(range(8)), 250.0)
    assert isinstance(p.action, Throttle)
    assert p.action.limits_w == {"n01": dict.fromkeys(range(8), 450.0)}
    assert p.refusal == ""
    assert p.scope == "8 GPUs on 1 node"
    assert p.before.step_s is not None
    assert p.after.step_s is not None
    assert p.before.power_w is not None
    assert p.after.power_w is not None
    assert 1.02 < p.after.step_s / p.before.step_s < 1.4, "one node of a synchronous job holds all of them up"
    assert p.before.power_w - p.after.power_w >= 8 * 185


def test_a_throttle_stops_at_what_the_board_allows() -> None:
    p = propose.throttle(rack(), None, target(range(2)), 600.0)
    assert isinstance(p.action, Throttle)
    assert p.action.limits_w == {"n01": {0: 200.0, 1: 200.0}}
    assert "2 of 2 GPUs stop at the limit their board allows." in p.notes
    raised = propose.throttle(rack(), None, target(range(2)), -100.0)
    assert raised.refusal == "The limit of n01 is already as high as the board allows."


def test_a_throttle_leaves_out_what_cannot_be_read() -> None:
    p = propose.throttle(rack(), None, target(range(2), reachable=False), 100.0)
    assert p.refusal == "None of n01 can be read now; wait until its node is live."


@settings(max_examples=25)
@given(st.floats(-600, 600), st.integers(1, GPUS))
def test_no_limit_leaves_the_boards_range(step_w: float, gpus: int) -> None:
    p = propose.throttle(rack(), load(), target(range(gpus)), step_w)
    assert isinstance(p.action, Throttle)
    assert all(200 <= w <= 700 for of_node in p.action.limits_w.values() for w in of_node.values())
    assert p.refusal or p.action.gpus == gpus


@pytest.mark.parametrize("lower", [50.0, 100.0, 200.0, 400.0])
def test_a_lower_limit_never_speeds_up_or_heats(lower: float) -> None:
    p = propose.throttle(rack(), load(), target(range(GPUS)), lower)
    assert p.after.step_s is not None
    assert p.before.step_s is not None
    assert p.after.step_s >= p.before.step_s * 0.999
    assert p.after.peak_c is not None
    assert p.after.peak_c <= 60.01


def test_a_microbatch_keeps_the_global_batch_and_changes_memory() -> None:
    now = PLAN.optimizations.microbatch
    p = propose.microbatch(rack(), job(), now // 2)
    assert p.action == Microbatch("run", now // 2)
    assert p.before.memory_gib is not None
    assert p.after.memory_gib is not None
    assert p.after.memory_gib < p.before.memory_gib
    assert p.after.step_s is not None
    assert p.before.step_s is not None
    assert p.after.step_s > p.before.step_s, "smaller matrices are less efficient"


@pytest.mark.parametrize(
    ("value", "says"),
    [(PLAN.optimizations.microbatch, "already"), (3, "does not fit"), (0, "does not fit"), (10**6, "does not fit")],
)
def test_a_microbatch_that_cannot_be_is_refused(value: int, says: str) -> None:
    assert says in propose.microbatch(rack(), job(), value).refusal


def test_without_a_cost_model_the_effect_is_not_made_up() -> None:
    p = propose.microbatch(rack(), job(known=False), 1)
    assert p.refusal == ""
    assert p.after.step_s is None
    assert any("not predicted" in note for note in p.notes)


def hot_rack(hot: list[int], cold: list[int], hot_c: float = 86.0) -> Rack:
    celsius = np.full(GPUS, 80.0)
    celsius[hot], celsius[cold] = hot_c, 55.0
    return rack(celsius)


def test_work_moves_from_hot_to_cold_and_the_total_stays() -> None:
    """S8: ranks above the threshold give, ranks well below it take."""
    p = propose.rebalance(hot_rack([29], [3, 4]), job(), threshold_c=83.0)
    assert isinstance(p.action, Rebalance)
    assert p.refusal == ""
    each = PREDICTED.microbatches
    assert sum(p.action.microbatches) == each * RANKS
    assert p.action.microbatches[29] == each - 1
    assert sorted(p.action.microbatches[r] for r in (3, 4)) == [each, each + 1]
    assert p.after.peak_c is not None
    assert p.before.peak_c is not None
    assert p.after.peak_c < p.before.peak_c, "the hot GPU rests while the others finish"


def test_without_a_hot_rank_nothing_moves() -> None:
    p = propose.rebalance(rack(70.0), job(), threshold_c=83.0)
    assert "No rank is above 83 C or headed there (the hottest: 70 C)" in p.refusal


def test_without_a_cold_rank_nothing_moves_and_nothing_breaks() -> None:
    """S8's own code indexes into an empty list here."""
    p = propose.rebalance(rack(86.0), job(), threshold_c=83.0)
    assert "there is no cold GPU to take work" in p.refusal


def test_no_rank_is_asked_for_its_last_microbatch() -> None:
    counts = [PREDICTED.microbatches] * RANKS
    counts[29], counts[3] = 1, counts[3] + counts[29] - 1
    p = propose.rebalance(hot_rack([29], [4]), job(tuple(counts)), threshold_c=83.0)
    assert "would itself cross" in p.refusal or p.refusal == ""
    assert isinstance(p.action, Rebalance)
    assert min(p.action.microbatches) >= 1


def test_a_receiver_that_would_cross_is_left_alone() -> None:
    """Rank 7 is below the line only because it waits most of the step; with work it would be the next hot one."""
    counts = [PREDICTED.microbatches] * RANKS
    counts[7], counts[6] = 1, 2 * PREDICTED.microbatches - 1
    celsius = np.full(GPUS, 86.0)
    celsius[7] = 77.9
    p = propose.rebalance(rack(celsius), job(tuple(counts)), threshold_c=83.0, moves=2)
    assert "would itself cross 83 C" in p.refusal
    assert p.action == Rebalance("run", tuple(counts))


def test_where_a_gpu_is_headed_counts_not_only_where_it_is() -> None:
    settled = np.full(GPUS, 70.0)
    settled[12] = 88.0
    p = propose.rebalance(rack(60.0, settled), job(), threshold_c=83.0)
    assert isinstance(p.action, Rebalance)
    assert p.action.microbatches[12] == PREDICTED.microbatches - 1


@settings(max_examples=40)
@given(st.lists(st.floats(30, 95) | st.just(float("nan")), min_size=GPUS, max_size=GPUS), st.integers(1, 4))
def test_a_rebalance_is_a_split_of_the_same_total(celsius: list[float], moves: int) -> None:
    p = propose.rebalance(rack(np.array(celsius)), job(), threshold_c=83.0, moves=moves)
    assert isinstance(p.action, Rebalance)
    assert sum(p.action.microbatches) == PREDICTED.microbatches * RANKS
    assert min(p.action.microbatches) >= 1
    hot = [r for r, c in enumerate(celsius) if c > 83]
    gave = [r for r, n in enumerate(p.action.microbatches) if n < PREDICTED.microbatches]
    assert set(gave) <= set(hot)


def test_a_hook_that_does_not_offer_it_is_named() -> None:
    view = job()
    view = JobView(**{**view.__dict__, "can": frozenset()})
    assert "does not offer rebalance" in propose.rebalance(rack(90.0), view, 83.0).refusal
    assert "does not offer microbatch" in propose.microbatch(rack(), view, 1).refusal


def test_undo_puts_back_what_was_and_names_what_it_undoes() -> None:
    done = propose.throttle(rack(), load(), target(range(8)), 100.0)
    back = Throttle(done.action.limits_w, restore=True)  # type: ignore[union-attr]
    p = propose.undo(done, back, "abc", rack(), load())
    assert (p.undoes, p.action, p.after) == ("abc", back, done.before)


def test_a_gpu_that_is_slowed_already_sets_the_pace_until_its_rank_has_less_to_do() -> None:
    """One GPU at 1,800 MHz beside others at 1,900: the step now is its own, the step afterwards the fuller ranks'.

    Seen in use: the step was 2.93 s, 3.65 s were predicted, 3.50 s came.
    """
    clocks = np.full(GPUS, 1900.0)
    clocks[5] = 1800.0
    even, watts = np.full(GPUS, 60.0), np.full(GPUS, 540.0)
    chassis = thermal.chassis_of(CLUSTER)
    slowed = effect.rack_of(CLUSTER, chassis, even, even, watts, np.full(GPUS, 700.0), clocks)
    counts = np.full(RANKS, PREDICTED.microbatches)
    counts[5], counts[0] = counts[5] - 1, counts[0] + 1
    found = effect.after(slowed, load(), effect.Change(load=effect.with_microbatches(load(), tuple(counts))))
    full = np.ones(1)
    now_s = pace.replica_s(PREDICTED.pace, np.array([PREDICTED.microbatches]), full * 1800 / 1900)[0]
    then_s = pace.replica_s(PREDICTED.pace, np.array([PREDICTED.microbatches + 1]), full)[0]
    assert found.step_s == pytest.approx(load().step_s * then_s / now_s, rel=1e-6)


def test_a_gpu_that_heat_holds_runs_free_again_once_it_has_cooled() -> None:
    """Its clock comes back with its work gone, and so does some of its heat: the prediction must not keep it slow."""
    chassis = thermal.chassis_of(CLUSTER)
    celsius, clocks, watts = np.full(GPUS, 60.0), np.full(GPUS, 1980.0), np.full(GPUS, 560.0)
    celsius[5], clocks[5], watts[5] = 86.0, 1815.0, 470.0
    held = effect.rack_of(CLUSTER, chassis, celsius, celsius, watts, np.full(GPUS, 700.0), clocks)
    assert list(np.flatnonzero(effect.held_by_heat(held, effect.activity(held)))) == [5]
    counts = np.full(RANKS, PREDICTED.microbatches)
    counts[5], counts[0] = counts[5] - 1, counts[0] + 1
    lighter = effect.with_microbatches(load(), tuple(counts))
    _, then = effect.settle(held, load(), effect.Change(load=lighter))
    slower = effect.rack_of(CLUSTER, chassis, celsius - np.eye(GPUS)[5] * 10, celsius, watts, held.limit_w, clocks)
    _, kept = effect.settle(slower, load(), effect.Change(load=lighter))  # held by a setting: it stays
    assert 1.0 < then[5] - kept[5] < 8.0
    assert then[5] < 87.0


def test_a_gpu_that_would_be_too_hot_again_stays_held() -> None:
    chassis = thermal.chassis_of(CLUSTER)
    celsius, clocks, watts = np.full(GPUS, 60.0), np.full(GPUS, 1980.0), np.full(GPUS, 560.0)
    celsius[5], clocks[5], watts[5] = 86.5, 1815.0, 470.0
    held = effect.rack_of(CLUSTER, chassis, celsius, celsius, watts, np.full(GPUS, 700.0), clocks)
    found, then = effect.settle(held, load(), effect.Change(load=load()))
    assert then[5] == pytest.approx(86.5, abs=1)
    assert found.step_s == pytest.approx(load().step_s, rel=0.02)


def test_a_limit_above_what_a_held_gpu_draws_changes_nothing() -> None:
    """Heat holds it at 584 W already: a limit of 600 W is no slower and no cooler, and one of 500 W is both."""
    chassis = thermal.chassis_of(CLUSTER)
    celsius, clocks, watts = np.full(GPUS, 60.0), np.full(GPUS, 1980.0), np.full(GPUS, 620.0)
    celsius[29], clocks[29], watts[29] = 86.8, 1870.0, 584.0
    held = effect.rack_of(CLUSTER, chassis, celsius, celsius, watts, np.full(GPUS, 700.0), clocks)

    def limited(to_w: float) -> tuple[float, float]:
        limit = np.where(np.arange(GPUS) == 29, to_w, 700.0)
        found, then = effect.settle(held, load(), effect.Change(limit_w=limit))
        assert found.step_s is not None
        return found.step_s / load().step_s, float(then[29])

    assert limited(600.0) == (pytest.approx(1.0, abs=0.005), pytest.approx(86.8, abs=0.6))
    slower, cooler = limited(500.0)
    assert slower > 1.03
    assert cooler < 84


def test_a_clock_lock_slows_and_cools_within_what_the_board_allows() -> None:
    p = propose.clock_lock(rack(), load(), target(range(8)), to_mhz=1200.0)
    assert isinstance(p.action, ClockLock)
    assert p.action.clocks_mhz == {"n01": dict.fromkeys(range(8), 1200.0)}
    assert p.before.step_s is not None
    assert p.after.step_s is not None
    assert p.after.step_s > p.before.step_s
    assert (p.after.power_w or 0) < (p.before.power_w or 0)
    low = propose.clock_lock(rack(), load(), target(range(1)), to_mhz=1.0).action
    assert isinstance(low, ClockLock)
    assert low.clocks_mhz == {"n01": {0: 390.0}}, "a fifth of the highest clock, on the grid"
    assert "no reading" in " ".join(propose.clock_lock(rack(), load(), target(range(2), False)).notes)
    assert propose.clock_lock(rack(), load(), target(range(2), False)).refusal


def test_a_limit_may_be_named_and_made_permanent_on_purpose() -> None:
    p = propose.throttle(rack(), load(), target(range(2)), to_w=500.0, permanent=True)
    assert isinstance(p.action, Throttle)
    assert (p.action.limits_w, p.action.permanent) == ({"n01": {0: 500.0, 1: 500.0}}, True)
    assert propose.PERMANENT in p.notes
    assert "is 700 W already" in propose.throttle(rack(), load(), target(range(2)), to_w=700.0).refusal


@pytest.mark.parametrize(
    ("can", "paused", "seconds", "says"),
    [
        ({"pause"}, False, 60, ""),
        ({"pause"}, False, 600, "takes pauses of at most 300 s"),
        ({"pause"}, True, 60, "is paused already"),
        (set(), False, 60, "does not offer pause"),
    ],
)
def test_a_pause(can: set[str], paused: bool, seconds: float, says: str) -> None:
    view = replace(job(), can=frozenset(can), max_pause_s=300.0, paused=paused)
    p = propose.pause(rack(), view, seconds)
    assert (says in p.refusal) if says else not p.refusal
    assert p.after.tokens_per_s == 0
    assert (p.after.power_w or 0) < (p.before.power_w or 0)
    assert (p.after.peak_c or 0) < (p.before.peak_c or 0)


def test_a_resume_says_what_the_step_was_and_nothing_that_is_not_known() -> None:
    view = replace(job(), can=frozenset({"resume"}), paused=True)
    p = propose.resume(rack(), view)
    assert (p.before.step_s, p.before.tokens_per_s) == (None, 0.0)
    assert p.after.step_s == load().step_s
    assert (p.after.power_w, p.after.step_kj) == (None, None), "a waiting rack does not tell what it will draw"
    assert "is not paused" in propose.resume(rack(), replace(view, paused=False)).refusal
