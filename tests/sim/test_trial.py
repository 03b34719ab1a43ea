"""The twin against racks that are finer than it and up to a quarter unlike their profile: the figures it must reach."""

from __future__ import annotations

import numpy as np

from engine.profile import catalog
from engine.sim.fine import DIE, FineRack
from engine.sim.trial import accuracy, step_ms, warnings


def test_a_minute_ahead() -> None:
    found = accuracy(11)
    assert len(found.steady_k) > 1000
    assert len(found.step_k) > 1000
    assert found.steady_k.mean() <= 1.0
    assert found.step_k.mean() <= 2.0
    assert found.inside.mean() >= 0.9


def test_a_throttle_is_announced_half_a_minute_before() -> None:
    several = [warnings(seed, steps=3) for seed in (21, 22)]
    told, missed = sum(w.announced for w in several), sum(w.missed for w in several)
    assert told + missed >= 15
    assert told >= 9 * missed
    assert sum(w.false_announced for w in several) <= 0.1 * sum(w.quiet for w in several)


def test_the_fine_rack_settles_near_its_constants() -> None:
    """Without spread: within a few kelvin of the two-node form at the same power, and never quite it."""
    from engine.model import thermal

    rack = FineRack(catalog.cluster("h100x64"), np.random.default_rng(1), spread=0.0)
    rack.demand = type(rack.demand)(np.full(64, 0.9), np.full(64, 0.9))
    rack.advance(400.0)
    plain = thermal.steady(rack.boards.chassis, rack.power_w).junction_c
    off = rack.now_c[DIE] - plain
    assert np.abs(off).max() < 5
    assert np.abs(off).max() > 0.2


def test_a_step_of_many_gpus_gives_both_times() -> None:
    physics, reading = step_ms(gpus=64, rounds=3)
    assert physics > 0
    assert reading > 0
