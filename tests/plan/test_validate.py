"""Files of runs as people write them: keys missing, rows that cannot be, metrics of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from engine.control import offline
from engine.plan.runs import case_of
from engine.plan.validate import kendall_tau
from engine.profile import ProfileError
from engine.profile.run import Run, RunModel, RunParallel

MODEL = {"layers": 32, "hidden": 4096, "heads": 32}
ROW: dict[str, Any] = {"id": "one", "hardware": "h100-sxm-80g", "gpus": 8, "model": MODEL}
MEASURED = {"measured": {"tokens_per_s_per_gpu": 9000}}


def written(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "runs.yaml"
    path.write_text(yaml.safe_dump({"runs": list(rows)}))
    return path


def test_a_row_with_little_said_is_predicted_and_says_what_it_assumed(tmp_path: Path) -> None:
    found = offline.validation(written(tmp_path, {**ROW, **MEASURED}))
    (row,) = found.rows
    assert found.failed == ()
    assert row.metric == "tokens_per_s_per_gpu"
    assert row.error == pytest.approx(9000 / row.predicted - 1)
    assert "microbatch 1" in row.assumed
    assert any(text.startswith("global batch") for text in row.assumed)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hardware": "h900"}, "There is no device named 'h900'"),
        ({"precision": "int8"}, "precision 'int8' is not one of bf16, fp16, fp8"),
        ({"hardware": "a100-sxm-80g", "precision": "fp8"}, "a100-sxm-80g has no fp8 matrix product"),
        ({"parallel": {"tp": 3}}, "does not divide its 8 GPUs"),
        ({"parallel": {"tp": 8, "dp": 4}}, "needs 32 GPUs"),
        ({"model": {**MODEL, "heads": 30}, "parallel": {"tp": 4}}, "tensor 4 does not divide the 30 heads"),
        ({"parallel": {"pp": 8}, "model": {**MODEL, "layers": 4}}, "pipeline 8 of model needs 8 stages"),
        ({"model": {**MODEL, "layers": 0}}, "model.layers: expected a whole number >= 1"),
        ({"measured": {}}, "it has none of tokens_per_s_per_gpu, iteration_s"),
        ({"measured": {"iteration_s": "soon"}}, "it has none of tokens_per_s_per_gpu, iteration_s"),
        ({"gpus": "many"}, "gpus: expected a whole number, got text"),
        ({"model": "big"}, "model: expected a mapping (key: value), got text"),
    ],
)
def test_a_row_that_cannot_be_predicted_is_named_and_not_dropped(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    bad = {**ROW, **MEASURED, "id": "bad", **change}
    found = offline.validation(written(tmp_path, {**ROW, **MEASURED}, bad))
    assert len(found.rows) == 1
    ((name, reason),) = found.failed
    assert name == "bad"
    assert says in reason


def test_a_row_without_its_hardware_says_which_key_is_missing(tmp_path: Path) -> None:
    found = offline.validation(written(tmp_path, {"id": "bare"}))
    assert found.failed == (("bare", "the key 'hardware' is missing."),)


def test_a_row_that_is_no_mapping_is_named_by_its_place(tmp_path: Path) -> None:
    found = offline.validation(written(tmp_path, {**ROW, **MEASURED}, "nonsense"))
    assert found.failed[0][0] == "row 2"


def test_a_batch_that_does_not_divide_is_rounded_and_said(tmp_path: Path) -> None:
    found = offline.validation(written(tmp_path, {**ROW, **MEASURED, "batch": {"micro": 3, "global": 100}}))
    assert "global batch 96: 100 is no multiple of dp 8 x microbatch 3" in found.rows[0].assumed


def test_no_rows_at_all_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="'runs' is empty"):
        offline.validation(written(tmp_path))


@pytest.mark.parametrize("metric", ["iteration_s", "hardware_tflops_per_gpu", "model_tflops_per_gpu"])
def test_every_metric_means_the_same_run(tmp_path: Path, metric: str) -> None:
    """A measurement that is exactly the prediction has no error, in whatever unit it came."""
    first = offline.validation(written(tmp_path, {**ROW, "measured": {metric: 1.0}})).rows[0]
    again = offline.validation(written(tmp_path, {**ROW, "measured": {metric: first.predicted}})).rows[0]
    assert again.error == pytest.approx(0, abs=1e-9)
    slower = first.predicted * (1.1 if metric == "iteration_s" else 1 / 1.1)
    late = offline.validation(written(tmp_path, {**ROW, "measured": {metric: slower}})).rows[0]
    assert late.error == pytest.approx(1 / 1.1 - 1)


def test_memory_in_either_unit(tmp_path: Path) -> None:
    rows = [{**ROW, "id": name, "measured": {name: 10.0}} for name in ("memory_gib", "memory_gb")]
    found = offline.validation(written(tmp_path, *rows))
    gib, gb = found.memory
    assert gb.predicted == pytest.approx(gib.predicted * 1.073741824)
    assert found.rows == ()
    assert offline.validation_json(found)["memory"]["n"] == 2


@pytest.mark.parametrize(
    ("said", "gbps"),
    [
        ("4 x 100 Gb/s RoCE per node", 400),
        ("400 Gb/s RDMA per GPU", 3200),
        ("RoCE 1600 Gb/s per node", 1600),
        ("8x200Gbps HDR", 1600),
        ("Selene", None),
    ],
)
def test_a_network_in_words(said: str, gbps: float | None) -> None:
    run = Run(id="r", hardware="a100-sxm-80g", gpus=16, model=RunModel(layers=2, hidden=64, heads=2), interconnect=said)
    assert run.node_gbps == gbps


@pytest.mark.parametrize(
    ("note", "tp", "group"),
    [
        ("ZeRO-1 group: inside 8 GPUs; packing off", 1, 8),
        ("ZeRO-1 group: inside 8 GPUs", 2, 4),
        ("ZeRO-1 group: inside 4 DP ranks", 2, 4),
        ("ZeRO-1 group: across all DP", 1, None),
    ],
)
def test_a_sharding_group_in_words(note: str, tp: int, group: int | None) -> None:
    model = RunModel(layers=2, hidden=64, heads=2)
    run = Run(id="r", hardware="a100-sxm-80g", gpus=16, model=model, note=note, parallel=RunParallel(tp=tp))
    assert run.zero_group == group


def test_layers_that_do_not_divide_are_laid_out_with_the_ends_counted() -> None:
    """Llama 3 405B has 126 layers so that 16 stages hold 8 each when embedding and head count as one."""
    model = RunModel(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, gated_mlp=True, seq=8192)
    run = Run(id="r", hardware="h100-sxm-80g", gpus=1024, model=model, parallel=RunParallel(tp=8, pp=16))
    assert case_of(run).plan.parallelism.stages == "ends"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=8))
def test_kendall_tau_is_bounded_and_symmetric(pairs: list[tuple[int, int]]) -> None:
    a, b = np.array(pairs, float).T
    assert -1 <= kendall_tau(a, b) <= 1
    assert kendall_tau(a, b) == pytest.approx(kendall_tau(b, a))
    assert kendall_tau(a, -b) == pytest.approx(-kendall_tau(a, b))


def test_kendall_tau_known() -> None:
    assert kendall_tau(np.array([1.0, 2, 3, 4]), np.array([1.0, 2, 4, 3])) == pytest.approx(4 / 6)
