"""Fitting one's own runs: a curve that made the runs is found again, few runs move it little, files stay readable."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml

from engine.control import offline
from engine.model.predict import predict
from engine.plan.runs import case_of
from engine.profile import ProfileError, catalog, edit
from engine.profile.run import Run, RunBatch, RunModel, RunParallel

SIZES = [(2048, 24, 16), (4096, 32, 32), (5120, 40, 40), (8192, 48, 64)]


def runs(tmp_path: Path, share: float, count: int) -> Path:
    """Runs of a node whose products reach `share` of what the built-in H100's reach."""
    out = []
    for number, (hidden, layers, heads) in enumerate(SIZES[:count]):
        model = RunModel(layers=layers, hidden=hidden, heads=heads, seq=2048)
        run = Run(
            id=f"own-{number}",
            hardware="h100-sxm-80g",
            gpus=8,
            model=model,
            framework="Megatron-Core",
            recompute="none",
            parallel=RunParallel(tp=1 if hidden < 5000 else 4),
            batch=RunBatch(micro=1, whole=64),
        )
        case = case_of(run)
        device = case.cluster.device
        curve = msgspec.structs.replace(device.curve, best=device.curve.best * share)
        slow = msgspec.structs.replace(
            case.cluster, devices={device.name: msgspec.structs.replace(device, curve=curve)}
        )
        seconds = predict(case.model, case.plan, slow, case.stack).iteration_s
        row = {"measured": {"iteration_s": seconds}, **msgspec.to_builtins(run)}
        row["measured"] = {"iteration_s": seconds}
        out.append(row)
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({"runs": out}))
    return path


def test_a_slower_device_is_found(tmp_path: Path) -> None:
    fit = offline.calibrate_device(runs(tmp_path, 0.85, 4), "h100-sxm-80g")
    summary = offline.fit_summary(fit)
    assert summary["before"]["median_abs_error"] > 0.08
    assert summary["after"]["median_abs_error"] < 0.02
    assert summary["left_out"]["median_abs_error"] < 0.05
    assert len(summary["sources"]) == 1


def test_the_written_profile_loads_and_keeps_its_sources(tmp_path: Path) -> None:
    fit = offline.calibrate_device(runs(tmp_path, 0.85, 3), "h100-sxm-80g")
    out = tmp_path / "mine.yaml"
    out.write_text(fit.files["h100-sxm-80g"])
    mine, built_in = catalog.device(str(out)), catalog.device("h100-sxm-80g")
    assert mine.curve.best < built_in.curve.best
    assert mine.fitted is not None
    assert mine.fitted.runs == 3
    assert mine.power == built_in.power
    assert "nvidia-smi -q of 8 H100 SXM" in out.read_text()


def test_too_few_runs_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="2 runs on h100-sxm-80g can be predicted; a fit needs at least three"):
        offline.calibrate_device(runs(tmp_path, 0.9, 2), "h100-sxm-80g")
    with pytest.raises(ProfileError, match="0 runs on a100-sxm-80g"):
        offline.calibrate_device(runs(tmp_path, 0.9, 4), "a100-sxm-80g")


def test_numbers_change_and_nothing_else_does() -> None:
    text = "name: d\ncurve:   # why\n  best: 0.5   # source\n  half: 3\npower:\n  best: 9\n"
    out = edit.with_numbers(text, {"best": 0.61234, "extra": 2e-6}, "curve")
    assert out == "name: d\ncurve:   # why\n  best: 0.6123   # source\n  half: 3\n  extra: 2.0e-06\npower:\n  best: 9\n"
    assert yaml.safe_load(out)["curve"] == {"best": 0.6123, "half": 3, "extra": 2e-6}


def test_a_block_is_replaced_where_it_is_known() -> None:
    once = edit.with_block("name: d\n", "fitted", {"runs": 3, "error": {"bf16": 0.1}, "links": ["nvlink"]}, "why")
    twice = edit.with_block(once, "fitted", {"runs": 4, "spans": {"seq": (512.0, 524288.0)}}, "why")
    assert yaml.safe_load(twice) == {"name": "d", "fitted": {"runs": 4, "spans": {"seq": [512, 524300.0]}}}
