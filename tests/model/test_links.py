"""What the links should carry: hand-computed volumes, and no byte lost between the fabric and the network."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engine.model.links import link_load
from engine.model.predict import PlanError, predict
from engine.profile import Optimizations, Parallelism, Plan, catalog

H200 = catalog.cluster("h200x32-400g")
LLAMA = catalog.model("llama3-8b")
CORE = catalog.stack("megatron-core")


def plan(batch: int = 128, **shape: object) -> Plan:
    return Plan(
        name="test",
        parallelism=Parallelism(**shape),  # type: ignore[arg-type]
        optimizations=Optimizations(microbatch=1),
        global_batch=batch,
    )


def test_a_tensor_group_that_fills_a_node_uses_nvlink_and_its_replicas_the_network() -> None:
    """By hand: 4 all-reduces of 2 x tokens x hidden bytes a layer and microbatch, 2 x 7/8 of them sent by each GPU; of
    the gradients and weights, 4 replicas send 3/4 of what each holds, once reduced and once gathered."""
    found = predict(LLAMA, plan(tensor=8, zero=1, sequence_parallel=False), H200, CORE)
    load, step_s = link_load(found), found.iteration_s
    microbatches = 128 // 4
    reduced = 4 * LLAMA.layers * microbatches * 2 * LLAMA.seq * LLAMA.hidden
    assert load.inside_gb_s == pytest.approx(reduced * 2 * 7 / 8 / step_s / 1e9)
    (data,) = [t for t in found.communication if t.parallelism == "data"]
    assert data.inside_bytes == 0, "one GPU of each replica group stands in a node"
    assert load.outside_gb_s == pytest.approx(data.bytes / step_s / 1e9)
    weights = 8.03e9 / 8
    wire = CORE.gradient_bytes + 2
    assert data.bytes == pytest.approx(weights * wire * 3 / 4, rel=0.01)


def test_of_a_group_that_fills_its_nodes_one_gpu_in_eight_sends_out() -> None:
    found = predict(LLAMA, plan(), H200, CORE)
    (data,) = found.communication
    assert data.outside_bytes == pytest.approx(data.bytes / 8)
    load = link_load(found)
    assert load.inside_gb_s == pytest.approx(7 * load.outside_gb_s)


@given(
    tensor=st.sampled_from([1, 2, 4, 8, 16]),
    pipeline=st.sampled_from([1, 2, 4]),
    context=st.sampled_from([1, 2]),
    zero=st.sampled_from([0, 1, 3]),
    zero_group=st.sampled_from([None, 2, 4]),
    order=st.sampled_from(["tp-cp-dp-pp", "tp-cp-pp-dp"]),
)
def test_every_byte_goes_over_the_fabric_or_out_of_the_node(**shape: object) -> None:
    try:
        found = predict(LLAMA, plan(**shape), H200, CORE)  # type: ignore[arg-type]
    except PlanError:
        assume(False)
    for t in found.communication:
        assert t.inside_bytes + t.outside_bytes == pytest.approx(t.bytes)
        assert (t.outside_bytes > 0) == (t.link in ("network", "spine"))
    load = link_load(found)
    sent = sum(t.bytes for t in found.communication) / 1e9
    assert (load.inside_gb_s + load.outside_gb_s) * found.iteration_s == pytest.approx(sent)


def test_no_more_leaves_a_node_than_its_ports_carry_at_the_time_that_the_model_gives_it() -> None:
    for shape in ({}, {"tensor": 8}, {"tensor": 2, "pipeline": 4}, {"tensor": 4, "context": 2, "zero": 3}):
        found = predict(LLAMA, plan(**shape), H200, CORE)
        for t in found.communication:
            assert t.outside_bytes * 8 / 1e9 <= H200.node_gb_s * t.seconds * 1.001


def test_experts_that_stand_apart_use_the_fabric_and_the_network() -> None:
    moe = catalog.model("mixtral-8x7b")
    found = predict(moe, plan(expert=8), H200, CORE)
    (near,) = [t for t in found.communication if t.parallelism == "expert"]
    assert near.outside_bytes == 0
    assert near.inside_bytes == near.bytes
    (far,) = [t for t in predict(moe, plan(tensor=4, expert=8), H200, CORE).communication if t.parallelism == "expert"]
    assert far.outside_bytes == far.bytes > 0
    assert far.inside_bytes > 0


def test_where_traffic_hops_between_numa_nodes_nothing_is_said_of_the_inside() -> None:
    mi250 = catalog.cluster("mi250x32")
    assert math.isnan(link_load(predict(LLAMA, plan(tensor=8), mi250, CORE)).inside_gb_s)
