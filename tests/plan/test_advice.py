"""Advice: said when there is reason, with the reason and the model's own effect; silent when all is well."""

from __future__ import annotations

import re

import msgspec
import pytest

from engine.model.predict import predict
from engine.plan.advice import advice, numactl
from engine.profile import Cluster, Network, Optimizations, Parallelism, Plan, catalog

LLAMA = catalog.model("llama3-70b")
CORE = catalog.stack("megatron-core")
H100 = catalog.cluster("h100x64-400g")


def said(plan: Plan, cluster: Cluster = H100, model: str = "llama3-70b") -> list[str]:
    what = catalog.model(model)
    return advice(what, cluster, CORE, predict(what, plan, cluster, CORE))


def plan(precision: str = "bf16", optimizations: Optimizations | None = None, **shape: object) -> Plan:
    whole = Plan(name="p", parallelism=Parallelism(**shape), optimizations=optimizations or Optimizations())  # type: ignore[arg-type]
    return msgspec.structs.replace(whole, precision=precision, global_batch=128)


def test_a_good_plan_is_left_alone() -> None:
    assert said(plan(tensor=4, pipeline=4, context=2, interleave=5)) == []


def test_what_does_not_fit_is_told_how_it_would() -> None:
    (text,) = [s for s in said(plan(tensor=8, pipeline=1, context=1)) if s.startswith("Does not fit")]
    assert "With recompute it fits" in text or "Weights and states take most of it" in text
    crowded = said(plan(tensor=8, pipeline=2, optimizations=Optimizations(microbatch=4)))[0]
    assert re.search(r"With recompute it fits, \d+ GiB free: step [\d.]+ -> [\d.]+ s \(\+\d+%\)", crowded)


def test_recompute_that_is_not_needed() -> None:
    texts = said(plan(tensor=4, pipeline=4, context=2, optimizations=Optimizations(activation="recompute")))
    assert re.search(r"not needed for room: without it \d+ GiB stay free, step .* \(-2\d%\)", texts[0])


def test_bf16_on_mi250() -> None:
    texts = said(plan(tensor=2), catalog.cluster("mi250x32"), "llama3-8b")
    assert any("use fp16 with dynamic loss scaling" in s for s in texts)


def test_a_tensor_group_over_numa_nodes_gets_its_lines() -> None:
    texts = said(plan("fp16", tensor=4), catalog.cluster("mi250x32"), "llama3-8b")
    (text,) = [s for s in texts if "crosses NUMA nodes" in s]
    assert "local ranks 2, 3: numactl --cpunodebind=1 --membind=1" in text
    assert re.search(r"tensor 2 stays inside one: step [\d.]+ -> [\d.]+ s \(-\d+%\)", text)
    assert numactl(H100)[0] == "local ranks 0, 1, 2, 3: numactl --cpunodebind=0 --membind=0"


def test_a_tensor_group_over_nodes() -> None:
    (text,) = [s for s in said(plan(tensor=16, pipeline=2)) if "spans nodes" in s]
    assert re.search(r"tensor 8 in a pipeline 2 times as deep .*\(-\d+%\)", text)


def test_above_the_70_percent_line_the_three_remedies() -> None:
    thin = msgspec.structs.replace(H100, network=Network(gbps_per_node=25))
    texts = said(plan(tensor=8, pipeline=2, zero=1), thin)
    (text,) = [s for s in texts if "70 % line" in s]
    assert "lower the tensor size" in text
    assert "GPUDirect RDMA" in text
    assert re.search(r"twice the bandwidth: step .* \(-\d+%\)", text)


def test_an_idle_fabric_beside_a_contended_network() -> None:
    thin = msgspec.structs.replace(H100, network=Network(gbps_per_node=100))
    texts = said(plan(zero=1), thin, "llama3-8b")
    assert any("The fabric idles" in s for s in texts)


def test_a_long_bubble_and_a_low_limit() -> None:
    texts = said(plan(tensor=4, pipeline=8, optimizations=Optimizations(microbatch=8, power_limit_w=300.0)))
    assert any(re.search(r"microbatch 4 makes twice as many, step .* \(-\d+%\)", s) for s in texts)
    assert any("The power limit of 300 W holds the clock at" in s for s in texts)


@pytest.mark.parametrize("name", ["communication-bound", "compute-bound"])
def test_the_templates_get_some(name: str) -> None:
    assert said(catalog.plan(name))
