"""The cost model: parts sum to the whole, absences cost nothing, and published sizes come out."""

from __future__ import annotations

import dataclasses
import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model import pace
from engine.model.iteration import iteration
from engine.model.predict import PlanError, predict, replicas
from engine.model.rates import rates
from engine.model.work import columns
from engine.profile import Cluster, Network, Optimizations, Parallelism, Plan, ProfileError, catalog

H200 = catalog.cluster("h200x32-400g")
LLAMA = catalog.model("llama3-8b")
CORE = catalog.stack("megatron-core")


def plan(tensor: int = 1, pipeline: int = 1, microbatch: int = 1, batch: int = 128, **more: object) -> Plan:
    return Plan(
        name="test",
        parallelism=Parallelism(tensor=tensor, pipeline=pipeline, **more),  # type: ignore[arg-type]
        optimizations=Optimizations(microbatch=microbatch),
        global_batch=batch,
    )


def changed(p: Plan, **optimizations: object) -> Plan:
    return msgspec.structs.replace(p, optimizations=msgspec.structs.replace(p.optimizations, **optimizations))


def larger(cluster: Cluster, times: int) -> Cluster:
    nodes = [msgspec.structs.replace(n, name=f"{n.name}-{i}") for i in range(times) for n in cluster.nodes]
    return msgspec.structs.replace(cluster, nodes=tuple(nodes))


def limited(p: Plan, watts: float) -> Plan:
    return msgspec.structs.replace(p, optimizations=msgspec.structs.replace(p.optimizations, power_limit_w=watts))


plans = st.builds(
    plan,
    tensor=st.sampled_from([1, 2, 4, 8]),
    pipeline=st.sampled_from([1, 2, 4]),
    microbatch=st.sampled_from([1, 2]),
    batch=st.sampled_from([128, 256]),
    zero=st.sampled_from([0, 1, 2, 3]),
)


@settings(max_examples=60)
@given(plans)
def test_parts_sum_to_the_whole(p: Plan) -> None:
    found = predict(LLAMA, p, H200, CORE)
    b = found.breakdown
    parts = b.compute_s + b.attention_s + b.elementwise_s + b.optimizer_s + b.bubble_s + b.exposed_comm_s
    parts += b.straggler_s + b.host_s
    assert found.iteration_s == pytest.approx(parts)
    assert b.exposed_comm_s <= b.tp_s + b.pp_s + b.dp_s + b.cp_s + b.ep_s + 1e-9
    even = np.full(found.dp, found.microbatches)
    again = pace.replica_s(found.pace, even, np.ones(found.dp))
    assert again == pytest.approx(np.full(found.dp, found.iteration_s))


@settings(max_examples=40)
@given(plans, st.floats(1.1, 8))
def test_a_faster_network_never_slows(p: Plan, times: float) -> None:
    slow = msgspec.structs.replace(H200, network=Network(gbps_per_node=100))
    fast = msgspec.structs.replace(H200, network=Network(gbps_per_node=100 * times))
    assert predict(LLAMA, p, fast, CORE).iteration_s <= predict(LLAMA, p, slow, CORE).iteration_s * (1 + 1e-9)


@settings(max_examples=30)
@given(plans)
def test_a_lower_power_limit_never_speeds_up_or_heats(p: Plan) -> None:
    free, capped = predict(LLAMA, p, H200, CORE), predict(LLAMA, limited(p, 350), H200, CORE)
    assert capped.iteration_s >= free.iteration_s * (1 - 1e-9)
    assert capped.power_w <= 350 + 1e-6
    assert capped.temperature_c <= free.temperature_c + 1e-6


def test_sharding_never_raises_memory() -> None:
    sizes = [predict(LLAMA, plan(zero=z), H200, CORE).memory.total_gib for z in (0, 1, 2, 3)]
    assert sizes == sorted(sizes, reverse=True)


@settings(max_examples=30)
@given(plans, st.sampled_from([2, 4, 8]))
def test_more_gpus_never_raise_memory_under_zero(p: Plan, times: int) -> None:
    shape = msgspec.structs.replace(p.parallelism, zero=max(1, p.parallelism.zero))
    sharded = msgspec.structs.replace(p, parallelism=shape)
    wide = msgspec.structs.replace(sharded, global_batch=sharded.global_batch * times)
    few, many = predict(LLAMA, sharded, H200, CORE), predict(LLAMA, wide, larger(H200, times), CORE)
    assert many.memory.total_gib <= few.memory.total_gib + 1e-9


@settings(max_examples=30)
@given(plans, st.floats(1.1, 4))
def test_a_faster_fabric_never_slows(p: Plan, times: float) -> None:
    fabric = H200.device.fabric
    quick = msgspec.structs.replace(fabric, gb_s_per_link=fabric.gb_s_per_link * times)
    device = msgspec.structs.replace(H200.device, fabric=quick)
    fast = msgspec.structs.replace(H200, devices={device.name: device})
    assert predict(LLAMA, p, fast, CORE).iteration_s <= predict(LLAMA, p, H200, CORE).iteration_s * (1 + 1e-9)


@pytest.mark.parametrize("name", ["tensor", "pipeline", "context", "expert"])
def test_parallelism_of_one_costs_nothing(name: str) -> None:
    found = predict(LLAMA, plan(), H200, CORE)
    assert name not in {t.parallelism for t in found.communication}
    b = found.breakdown
    assert (b.tp_s, b.pp_s, b.cp_s, b.ep_s, b.bubble_s) == (0, 0, 0, 0, 0)


def test_units_agree() -> None:
    """Rates, times, energies and money are one another's products, in the units of their names."""
    found = predict(LLAMA, plan(tensor=2, pipeline=2), H200, CORE)
    assert found.tokens_per_s * found.iteration_s == pytest.approx(128 * LLAMA.seq)
    assert found.energy_j == pytest.approx(found.cluster_w * found.iteration_s)
    assert found.tokens_per_joule == pytest.approx(128 * LLAMA.seq / found.energy_j)
    assert found.samples_per_kwh == pytest.approx(128 / found.energy_j * 3.6e6)
    gpu_hours = 32 * found.iteration_s / 3600
    cost = gpu_hours * H200.price.per_gpu_hour + found.energy_j / 3.6e6 * H200.price.per_kwh
    assert found.cost_per_million_tokens == pytest.approx(cost / (128 * LLAMA.seq) * 1e6)
    peak = H200.device.peak_flops("bf16")
    assert found.mfu == pytest.approx(found.model_flops_per_iteration / (found.iteration_s * 32 * peak))


def test_columns_say_what_single_plans_say() -> None:
    """A thousand plans at once and one at a time are the same numbers: there is one model."""
    shapes = itertools.product((1, 2, 4), (1, 2, 4), (1, 2), (0, 1, 3))
    cases = [plan(tensor=t, pipeline=p, microbatch=m, zero=z) for t, p, m, z in shapes]
    w = columns([(LLAMA, one, H200) for one in cases], [replicas(LLAMA, one, H200) for one in cases])
    at_once = iteration(w, H200.device, rates(H200.device, CORE, "bf16")).iteration_s
    alone = [predict(LLAMA, one, H200, CORE).iteration_s for one in cases]
    assert at_once == pytest.approx(np.array(alone), rel=1e-12)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(catalog.names("model")),
    st.sampled_from(catalog.names("cluster")),
    st.sampled_from(catalog.names("stack")),
    st.builds(
        Plan,
        name=st.just("any"),
        parallelism=st.builds(
            Parallelism,
            tensor=st.sampled_from([1, 2, 4, 8, 16]),
            pipeline=st.sampled_from([1, 2, 4, 8]),
            context=st.sampled_from([1, 2]),
            expert=st.sampled_from([1, 2, 8]),
            interleave=st.sampled_from([1, 2]),
            sequence_parallel=st.booleans(),
            zero=st.sampled_from([0, 1, 2, 3]),
            zero_group=st.sampled_from([None, 2]),
            stages=st.sampled_from(["even", "ends"]),
            zero_bubble=st.booleans(),
        ),
        optimizations=st.builds(
            Optimizations,
            activation=st.sampled_from(["stash", "selective", "alternate", "recompute"]),
            overlap=st.booleans(),
            microbatch=st.sampled_from([1, 2, 4]),
            async_tensor=st.booleans(),
            power_limit_w=st.sampled_from([None, 250.0]),
        ),
        precision=st.sampled_from(["bf16", "fp16", "fp8", "tf32", "fp32"]),
        global_batch=st.sampled_from([64, 256]),
    ),
)
def test_whatever_is_asked_ends_in_numbers_or_a_sentence(model: str, cluster: str, stack: str, p: Plan) -> None:
    try:
        found = predict(catalog.model(model), p, catalog.cluster(cluster), catalog.stack(stack))
    except (PlanError, ProfileError) as error:
        assert str(error).endswith(".")
        return
    numbers = [getattr(found.breakdown, f.name) for f in dataclasses.fields(found.breakdown)]
    numbers += [found.memory.total_gib, found.power_w, found.mfu, found.temperature_c, found.pace.fill]
    assert all(np.isfinite(v) and v >= 0 for v in numbers)
    assert 0 < found.mfu < 1
    assert all(0 < t.achieved_fraction <= 1 for t in found.communication)
    assert all(t.link != "none" for t in found.communication)
    b = found.breakdown
    assert b.exposed_comm_s <= (b.tp_s + b.pp_s + b.dp_s + b.cp_s + b.ep_s) * (1 + 1e-9)


def test_what_recompute_and_overlap_trade() -> None:
    base = plan(tensor=2, microbatch=2)
    again = changed(base, activation="recompute")
    bare = changed(base, overlap=False)
    found, recomputed, exposed = (predict(LLAMA, p, H200, CORE) for p in (base, again, bare))
    assert recomputed.memory.activations_gib < 0.3 * found.memory.activations_gib
    assert 1.2 < recomputed.iteration_s / found.iteration_s < 1.4
    assert recomputed.hardware_flops_per_iteration > 1.3 * recomputed.model_flops_per_iteration * 0.98
    assert exposed.breakdown.exposed_comm_s > found.breakdown.exposed_comm_s


def test_a_clock_limit_slows_products_alone() -> None:
    slow = changed(plan(), sm_clock_mhz=990.0)
    found, limited_ = predict(LLAMA, plan(), H200, CORE), predict(LLAMA, slow, H200, CORE)
    assert limited_.breakdown.compute_s == pytest.approx(found.breakdown.compute_s * found.sm_clock_mhz / 990, rel=1e-6)
    assert limited_.breakdown.elementwise_s == pytest.approx(found.breakdown.elementwise_s)


def test_experts_travel_and_are_held_apart() -> None:
    mixtral = catalog.model("mixtral-8x7b")
    together, apart = (predict(mixtral, plan(expert=e), H200, CORE) for e in (1, 8))
    assert apart.breakdown.ep_s > 0 == together.breakdown.ep_s
    assert apart.memory.weights_gib < 0.3 * together.memory.weights_gib
    skewed = predict(mixtral, changed(plan(expert=8), expert_imbalance=1.5), H200, CORE)
    assert skewed.iteration_s > apart.iteration_s


def test_zero_bubble_shortens_the_bubble() -> None:
    found = predict(LLAMA, plan(pipeline=4), H200, CORE)
    zb = predict(LLAMA, plan(pipeline=4, zero_bubble=True), H200, CORE)
    assert 0 < zb.breakdown.bubble_s < 0.7 * found.breakdown.bubble_s


def test_each_stage_of_a_pipeline_has_its_own_memory() -> None:
    """The first holds the most microbatches, those inside no table, the last the head and its logits."""
    found = predict(LLAMA, plan(tensor=2, pipeline=4), H200, CORE)
    first, second, third, last = found.stages_gib
    assert first > second > third
    assert last > third
    assert found.memory.total_gib == max(found.stages_gib)
    ends = predict(LLAMA, plan(pipeline=2, stages=(8, 24)), H200, CORE)
    assert ends.stages_gib[1] > ends.stages_gib[0]


def test_states_shared_in_the_node_save_network_and_cost_memory() -> None:
    """Full sharding in the node, copies between nodes (HSDP): gathers stay on the fabric."""
    everywhere, in_node = (predict(LLAMA, plan(zero=3, zero_group=g), H200, CORE) for g in (None, 8))
    assert in_node.memory.total_gib > everywhere.memory.total_gib
    assert in_node.breakdown.dp_s < everywhere.breakdown.dp_s


def test_a_thin_spine_slows_what_climbs_it() -> None:
    thin = msgspec.structs.replace(H200, network=Network(gbps_per_node=3200, leaf_nodes=2, spine_share=0.25))
    wide = msgspec.structs.replace(H200, network=Network(gbps_per_node=3200))
    slow, fast = (predict(LLAMA, plan(zero=1), c, CORE) for c in (thin, wide))
    assert [t.link for t in slow.communication] == ["spine"]
    assert slow.breakdown.dp_s > 2 * fast.breakdown.dp_s


def test_a_tensor_group_over_numa_nodes_is_slower_where_no_switch_joins_them() -> None:
    mi250 = catalog.cluster("mi250x32")
    plans_ = [msgspec.structs.replace(plan(tensor=t), precision="fp16") for t in (2, 4)]
    inside, across = (predict(LLAMA, p, mi250, CORE).communication[0] for p in plans_)
    assert (inside.link, across.link) == ("nvlink", "numa")
    assert across.seconds / across.bytes > 3 * inside.seconds / inside.bytes


def test_a_prediction_says_how_sure_it_is() -> None:
    usual = predict(catalog.model("llama3-70b"), plan(tensor=4, pipeline=4), catalog.cluster("h100x64-400g"), CORE)
    assert 0.02 < usual.confidence.band < 0.25
    assert usual.confidence.beyond == ()
    odd = msgspec.structs.replace(plan(tensor=8), sequence=8 * 1024 * 1024, precision="tf32", global_batch=4)
    found = predict(LLAMA, odd, H200, CORE)
    assert found.confidence.band > usual.confidence.band
    assert any("tf32" in s for s in found.confidence.beyond)
    assert any("sequence length" in s for s in found.confidence.beyond)
    unknown = predict(LLAMA, msgspec.structs.replace(plan(), precision="fp16"), catalog.cluster("mi250x32"), CORE)
    assert "No measured run of mi250" in unknown.confidence.beyond[0]


def test_known_size_of_a_token() -> None:
    """Llama 3 70B: 6 N plus causal attention."""
    model = catalog.model("llama3-70b")
    found = predict(model, plan(tensor=8, pipeline=4), H200, CORE)
    active = model.parameters - model.embedding_parameters
    per_token = found.model_flops_per_iteration / found.tokens_per_iteration
    assert per_token == pytest.approx(6 * active + 6 * 80 * 8192 * 8192, rel=0.01)


def test_gpt3_on_32_h200_lands_where_such_runs_do() -> None:
    """Published Megatron runs of this model reach 0.40-0.55 MFU; the memory must be near the 100 GiB of such plans."""
    found = predict(catalog.model("gpt3-175b"), plan(tensor=8, pipeline=4), H200, CORE)
    assert 0.38 < found.mfu < 0.58
    assert 90 < found.memory.total_gib < 130
    assert found.fits


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (plan(tensor=3), "tensor 3 does not divide the 32 heads"),
        (plan(pipeline=3), "does not divide the 32 layers"),
        (plan(tensor=8, pipeline=8), "is not a multiple"),
        (plan(data=16), "data 32 would fill it"),
        (plan(batch=100), "96 or 128 would be"),
        (plan(context=3), "context 3 does not divide the sequence of 8192 tokens"),
        (plan(expert=2), "expert 2 does not divide the 1 experts of llama3-8b; 1 alone do"),
        (plan(pipeline=4, interleave=3), "does not divide the 32 layers of llama3-8b; 1, 2, 4, 8, 16, 32 do"),
        (plan(pipeline=2, stages=(20, 13)), "needs 2 stages of at least one layer, 32 in all"),
        (limited(plan(), 100), "power_limit_w 100 is outside what h200-sxm-141g takes: 200 to 700 W"),
        (changed(plan(), sm_clock_mhz=3000.0), "sm_clock_mhz 3000 is outside what h200-sxm-141g runs at"),
        (plan(zero_group=5), "zero_group 5 does not divide the 32 data-parallel ranks"),
    ],
)
def test_what_cannot_run_says_what_would(wrong: Plan, says: str) -> None:
    with pytest.raises(PlanError) as error:
        predict(LLAMA, wrong, H200, CORE)
    assert says in str(error.value)


def test_the_slowest_gpu_sets_the_pace() -> None:
    found = predict(LLAMA, plan(), H200, CORE)
    replica = pace.replica_of_gpu(found.plan, found.dp, found.gpus)
    clocks = np.ones(found.gpus)
    clocks[5] = 0.5
    share = pace.slowest(clocks, replica, found.dp)
    even = np.full(found.dp, found.microbatches)
    times = pace.replica_s(found.pace, even, share)
    assert times.argmax() == replica[5]
    assert times.max() > found.iteration_s
    # Moving a microbatch off the slow replica helps; that is what rebalance is for.
    moved = even.copy()
    moved[replica[5]] -= 1
    moved[0] += 1
    assert pace.replica_s(found.pace, moved, share).max() < times.max()
