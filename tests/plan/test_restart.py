"""The next start: layers leave the slow stage, the total stays, and nothing moves where nothing is slow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.predict import predict
from engine.plan.export import FORMATS
from engine.plan.restart import layers_of, restart
from engine.profile import Plan, catalog
from engine.profile.plan import Parallelism
from tests.parts.still import still
from tui.cli import main

MODEL, CLUSTER = catalog.model("llama3-70b"), catalog.cluster("h100x64")
STACK = catalog.stack("megatron-core")
DEEP = Plan("deep", Parallelism(tensor=8, pipeline=8), global_batch=128)
NODES = [n.name for n in CLUSTER.nodes]


def test_layers_leave_a_slow_stage_and_the_step_gets_shorter() -> None:
    found = restart(MODEL, CLUSTER, STACK, DEEP, {NODES[3]: 0.8})
    at = found.placement.hosts.index(NODES[3])
    layers = layers_of(MODEL, found.plan)
    assert sum(layers) == MODEL.layers
    assert layers[at] == min(layers) < MODEL.layers / 8
    assert found.then_s < found.now_s * 0.95
    assert any("Layers of the stages" in line for line in found.says)


def test_where_nothing_is_slow_the_end_stage_alone_gives() -> None:
    """Its head is work, too: an even split is never quite even."""
    found = restart(MODEL, CLUSTER, STACK, DEEP, {})
    layers = layers_of(MODEL, found.plan)
    assert max(layers) - min(layers) <= 2
    assert found.then_s <= found.now_s


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.5, 1.0), min_size=8, max_size=8))
def test_it_is_never_worse_and_loses_no_layer(shares: list[float]) -> None:
    found = restart(MODEL, CLUSTER, STACK, DEEP, dict(zip(NODES, shares, strict=True)))
    assert sum(layers_of(MODEL, found.plan)) == MODEL.layers
    assert min(layers_of(MODEL, found.plan)) >= 1
    assert found.then_s <= found.now_s * 1.0001
    assert sorted(found.placement.hosts) == sorted(NODES)
    assert predict(MODEL, found.plan, CLUSTER, STACK).fits


def test_the_frameworks_words_for_uneven_stages() -> None:
    plan = msgspec.structs.replace(DEEP, parallelism=Parallelism(tensor=8, pipeline=4, data=2, stages=(21, 19, 21, 19)))
    assert "--pipeline-model-parallel-layout 'Et*21|t*19|t*21|t*19L'" in FORMATS["megatron"](plan)[0]
    assert "model.pipeline_model_parallel_layout='Et*21|t*19|t*21|t*19L'" in FORMATS["nemo"](plan)[0]
    line = next(x for x in FORMATS["torchtitan"](plan)[0].splitlines() if x.startswith("module_fqns_per_model_part"))
    names: list[list[str]] = json.loads(line.partition("=")[2])
    assert [len(part) for part in names] == [22, 19, 21, 21]
    assert (names[0][:2], names[-1][-2:], names[1][0]) == (
        ["tok_embeddings", "layers.0"],
        ["norm", "output"],
        "layers.21",
    )


def test_from_the_running_rack(tmp_path: Path) -> None:
    """In the still console a GPU of n04 is held at 1905 of 1980 MHz; its job is data-parallel: only nodes move."""
    control = still(tmp_path).control
    (job,) = control.jobs.statuses.values()
    found = control.restart(job)
    assert found.now_s >= found.then_s > 0
    assert layers_of(catalog.model("llama3-8b"), found.plan) == (32,)


def test_a_job_that_is_none_is_a_sentence(inventory: Path, capsys: pytest.CaptureFixture[str], nvml: Any) -> None:
    assert main(["act", "--cluster", str(inventory), "rebalance", "ghost", "restart", "--wait", "5"]) == 2
    assert "There is no job 'ghost'" in capsys.readouterr().err
