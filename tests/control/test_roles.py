"""Ranks, their parallel groups, and whose traffic a link carries."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.control.roles import KINDS, carried, expected, role, roles
from engine.job import JobStatus
from engine.model.links import LinkLoad
from engine.model.predict import predict
from engine.profile import Parallelism, Plan, catalog
from engine.telemetry.reading import decode
from engine.telemetry.snapshot import Snapshot
from engine.telemetry.store import Store
from tests.parts.still import still

CLUSTER = catalog.cluster("h100x64-400g")
PLAN = Plan(name="p", parallelism=Parallelism(tensor=4, pipeline=4), global_batch=128)


def running(plan: Plan = PLAN, **more: Any) -> JobStatus:
    told = {"model": "llama3-70b", "plan": msgspec.to_builtins(plan)}
    return JobStatus("run", "n", "/s.sock", attached=True, world_size=4, microbatch=1, plan=told, **more)


def seen(ranks: dict[tuple[int, int], str] | None = None) -> Snapshot:
    """A snapshot of the cluster; `ranks` what processes on (node number, slot) name in their environment."""
    store = Store([(n.name, 8) for n in CLUSTER.nodes])
    for number, node in enumerate(CLUSTER.nodes):
        facts = [{"index": slot, "near": [f"mlx5_{slot}"]} for slot in range(8)]
        store.apply(node.name, decode(json.dumps({"hello": 1, "hostname": "h", "gpus": facts}).encode()), 1.0)  # type: ignore[arg-type]
        told = [{"gpu": s, "pid": 9, "rank": r} for (n, s), r in (ranks or {}).items() if n == number]
        store.apply(node.name, decode(json.dumps({"tick": 1, "time": 1.0, "processes": told}).encode()), 1.0)  # type: ignore[arg-type]
    return store.publish(1.0)


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(["tp-cp-dp-pp", "tp-cp-pp-dp"]),
)
def test_groups_part_the_ranks(tp: int, cp: int, pp: int, dp: int, order: Any) -> None:
    """Of each kind every rank is in one group, at a place of its own there, and all groups have the kind's size."""
    p = Parallelism(tensor=tp, context=cp, pipeline=pp, order=order)
    of = [role(p, dp, rank) for rank in range(tp * cp * pp * dp)]
    for kind in KINDS:
        groups: dict[int, list[int]] = defaultdict(list)
        for r in of:
            groups[r.group[kind]].append(r.place[kind])
        assert sorted(groups) == list(range(len(of) // of[0].size[kind]))
        assert all(sorted(places) == list(range(of[0].size[kind])) for places in groups.values())
    assert len({tuple(r.place.values()) for r in of}) == len(of)


def test_a_job_that_fills_the_cluster_is_placed_in_rank_order() -> None:
    found = roles(CLUSTER, seen(), running())
    assert len(found) == 64
    second = found[CLUSTER.nodes[0].name, 5]
    assert second.text() == "rank 5: TP 1 of group 1, DP 1 of group 1, PP 0 of group 5"
    assert found[CLUSTER.nodes[2].name, 0].place == {"TP": 0, "CP": 0, "DP": 0, "PP": 1}


def test_ranks_that_processes_name_come_first() -> None:
    found = roles(CLUSTER, seen({(0, 0): "40", (0, 1): "x", (0, 2): "999"}), running())
    assert [(place, r.rank) for place, r in found.items()] == [((CLUSTER.nodes[0].name, 0), 40)]


def test_a_link_is_named_for_the_group_that_uses_it() -> None:
    snapshot = seen()
    names = carried(CLUSTER, snapshot, roles(CLUSTER, snapshot, running()))
    first = CLUSTER.nodes[0].name
    assert names[first, 0] == "TP group 0"
    assert names[first, 7] == "TP group 1"
    assert names[first, "mlx5_2"] == "DP group 2", "4 x 4 GPUs are wider than a node"


def test_what_leaves_a_node_is_spread_over_its_ports() -> None:
    snapshot = seen()
    names = carried(CLUSTER, snapshot, roles(CLUSTER, snapshot, running()))
    first = CLUSTER.nodes[0].name
    told = expected({**names, (first, "mlx5_8"): "DP group 0"}, LinkLoad(40.0, 9.0))
    assert told[first, 0] == 40.0
    ports = [rate for (node, link), rate in told.items() if node == first and isinstance(link, str)]
    assert len(ports) == 9
    assert ports == pytest.approx([8.0] * 9), "as much leaves by nine ports as eight GPUs send"


def test_of_links_that_the_model_does_not_know_or_use_nothing_is_said() -> None:
    snapshot = seen()
    names = carried(CLUSTER, snapshot, roles(CLUSTER, snapshot, running()))
    assert {type(link) for _, link in expected(names, LinkLoad(float("nan"), 1.0))} == {str}
    assert {type(link) for _, link in expected(names, LinkLoad(1.0, 0.0))} == {int}
    assert expected({}, LinkLoad(1.0, 1.0)) == {}


def test_what_is_expected_is_worked_out_once_and_only_for_an_attached_job(tmp_path: Path) -> None:
    control = still(tmp_path).control
    own = predict(catalog.model("llama3-8b"), catalog.plan("data-parallel"), control.cluster, catalog.stack("pytorch"))
    told = control.expected(own)
    assert set(told) == {(n.name, slot) for n in control.cluster.nodes for slot in range(8)}, "no port is near a GPU"
    assert control.expected(own) is told
    job = control.jobs.current
    assert job is not None
    control.jobs.statuses[job.key] = replace(job, attached=False)
    assert control.expected(own) == {}
    assert control.expected(None) is control.expected(None)


def test_without_a_plan_nothing_is_said() -> None:
    assert roles(CLUSTER, seen(), None) == {}
    assert roles(CLUSTER, seen(), JobStatus("run", "n", "/s", attached=True)) == {}
