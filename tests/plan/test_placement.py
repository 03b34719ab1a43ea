"""Where ranks go: rank order decides which links are crossed, and heat decides which node gets which ranks."""

from __future__ import annotations

import msgspec
import pytest

from engine.model import pace
from engine.model.predict import predict
from engine.plan.placement import coolest, place
from engine.profile import Cluster, Network, Parallelism, Plan, catalog

LLAMA = catalog.model("llama3-70b")
CORE = catalog.stack("megatron-core")
H100 = catalog.cluster("h100x64-400g")


def plan(**shape: object) -> Plan:
    return Plan(name="p", parallelism=Parallelism(**shape), global_batch=128)  # type: ignore[arg-type]


def links(shape: Plan, cluster: Cluster = H100) -> dict[str, str]:
    return {t.parallelism: t.link for t in predict(LLAMA, shape, cluster, CORE).communication}


def test_the_rank_order_decides_what_crosses_the_network() -> None:
    outside = plan(tensor=2, pipeline=4, zero=1)
    inside = plan(tensor=2, pipeline=4, zero=1, order="tp-cp-pp-dp")
    assert links(outside) == {"tensor": "nvlink", "pipeline": "network", "data": "network"}
    assert links(inside) == {"tensor": "nvlink", "pipeline": "nvlink", "data": "network"}
    assert list(pace.replica_of_gpu(outside, 8, 64)[:4]) == [0, 0, 1, 1]
    assert list(pace.replica_of_gpu(inside, 8, 64)[:10]) == [0] * 8 + [1] * 2
    assert list(pace.stage_of_gpu(inside, 8, 64)[:10]) == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0]
    assert list(pace.stage_of_gpu(outside, 8, 64)[14:18]) == [0, 0, 1, 1]


def test_data_groups_share_a_nodes_ports_when_stages_stand_in_it() -> None:
    """Eight stages of one GPU each fill a node: eight data groups cross its ports at once, not one."""
    found = {
        order: next(
            t
            for t in predict(LLAMA, plan(pipeline=8, order=order), H100, CORE).communication
            if t.parallelism == "data"
        )
        for order in ("tp-cp-dp-pp", "tp-cp-pp-dp")
    }
    assert found["tp-cp-dp-pp"].link == "nvlink"  # eight replicas of one stage fill a node
    assert found["tp-cp-pp-dp"].link == "network"
    assert found["tp-cp-pp-dp"].seconds > 4 * found["tp-cp-dp-pp"].seconds


def test_leaf_switches_keep_neighbouring_ranks() -> None:
    two_leaves = msgspec.structs.replace(H100, network=Network(gbps_per_node=3200, leaf_nodes=4, spine_share=0.5))
    assert links(plan(tensor=8, pipeline=2, zero=1), two_leaves)["data"] == "network"
    assert links(plan(tensor=8, pipeline=2, zero=1), two_leaves)["pipeline"] == "spine"
    seats = place(two_leaves, predict(LLAMA, plan(tensor=8, pipeline=2, zero=1), two_leaves, CORE))
    first = {node.name for node in two_leaves.nodes[:4]}
    assert set(seats.hosts[:4]) == first or set(seats.hosts[4:]) == first


def test_the_lightest_stage_goes_where_it_is_hottest() -> None:
    """With stages that count embedding and head as layers, the ends have less to do; the top nodes of both racks get
    them, and the hottest GPU is cooler than in the order of the file."""
    shape = plan(tensor=8, pipeline=8, stages=(4, 12, 12, 12, 12, 12, 12, 4), zero=1)
    found = predict(LLAMA, shape, H100, CORE)
    seats = place(H100, found)
    assert sorted(found.stage_load)[:2] == [found.stage_load[0], found.stage_load[7]]
    assert {seats.hosts[0], seats.hosts[7]} == {"n04", "n08"}
    assert seats.hottest_c < seats.listed_c - 1
    assert sorted(seats.hosts) == sorted(n.name for n in H100.nodes)
    assert [seat.stages for seat in seats.seats] == [(i, i) for i in range(8)]


def test_fewer_gpus_than_there_are_leave_the_hot_nodes_idle() -> None:
    part = coolest(H100, 32)
    assert {n.name for n in part.nodes} == {"n01", "n02", "n05", "n06"}
    warm = msgspec.structs.replace(
        H100, nodes=tuple(msgspec.structs.replace(n, warmer_k=9.0 if n.name == "n01" else 0.0) for n in H100.nodes)
    )
    assert "n01" not in {n.name for n in coolest(warm, 32).nodes}


@pytest.mark.parametrize("gpus", [8, 64])
def test_every_rank_has_a_seat(gpus: int) -> None:
    part = coolest(H100, gpus)
    model = catalog.model("llama3-8b")
    seats = place(part, predict(model, plan(tensor=2), part, CORE))
    assert [seat.ranks for seat in seats.seats] == [(8 * i, 8 * i + 7) for i in range(gpus // 8)]
