"""Sweeps over model size: the crossover is found where there is one, and not where there is none."""

from __future__ import annotations

import pytest

from engine.plan.search import Ranked
from engine.plan.sweep import Size, overtakes, sweep
from engine.profile import Parallelism, Plan, catalog


def size(billions: float, one: float | None, other: float | None) -> Size:
    plan = Plan(name="p", parallelism=Parallelism())

    def ranked(rate: float | None) -> Ranked | None:
        return Ranked(plan, {"tokens_per_s_per_gpu": rate}) if rate else None

    return Size(billions, {"one": ranked(one), "other": ranked(other)})


def test_a_crossover_lies_between_the_sizes_around_it() -> None:
    sizes = [size(10, 80, 100), size(100, 120, 100), size(1000, None, None)]
    assert overtakes(sizes, "one", "other") == pytest.approx(10 * 10**0.5)
    assert overtakes(sizes, "other", "one") is None
    assert [s.leader for s in sizes] == ["other", "one", ""]


def test_scale_up_leads_per_gpu_where_it_has_the_same_network() -> None:
    """Half as many GPUs share the same batch and the same network of each node."""
    clusters = [catalog.cluster("h200x32"), catalog.cluster("h100x64")]
    sizes = sweep(clusters, catalog.stack("megatron-core"), Plan(name="s", parallelism=Parallelism()))
    assert overtakes(sizes, "h200x32", "h100x64") is None
    assert all(ratio > 1 for s in sizes if (ratio := s.ratio("h200x32", "h100x64")))
    assert sizes[-1].leader == ""  # 530 billion weights fit neither
