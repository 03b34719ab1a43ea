"""The commands without a node, as a shell runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.profile import catalog
from tui.cli import main
from tui.offline import PARTS, bar

PREDICT = ["predict", "--model", "llama3-70b", "--cluster", "h100x64-400g", "--plan"]
KEYS = {
    "iteration_s", "tokens_per_s", "tokens_per_s_per_gpu", "model_tflops_per_gpu", "hardware_tflops_per_gpu", "mfu",
    "memory_gib", "fits", "breakdown", "communication", "power_w", "energy_j", "tokens_per_joule", "samples_per_kwh",
    "temperature_c", "advice",
}  # fmt: skip
BREAKDOWN = {
    "compute_s", "attention_s", "elementwise_s", "tp_s", "pp_s", "dp_s", "cp_s", "ep_s", "bubble_s", "optimizer_s",
    "exposed_comm_s",
}  # fmt: skip


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = tmp_path / "plan.yaml"
    path.write_text(
        "name: mine\nparallelism: {tensor: 4, pipeline: 4, context: 2, interleave: 5}\nprecision: bf16\n"
        "global_batch: 128\nsequence: 8192\nstack: megatron-core-2024\n"
    )
    return str(path)


def test_predict_json(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan that was measured (14.72 s, DGX Cloud recipes): the keys, and a band that holds it."""
    assert main([*PREDICT, plan, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) >= KEYS
    assert set(told["breakdown"]) >= BREAKDOWN
    assert {"parallelism", "link", "bytes", "count", "achieved_fraction"} <= set(told["communication"][0])
    assert told["iteration_s"] == pytest.approx(14.72, rel=0.05)
    assert told["band"][0] < 14.72 < told["band"][1]
    seen = [told["breakdown"][name] for name, _, _ in PARTS]
    assert sum(seen) == pytest.approx(told["iteration_s"])


def test_predict_to_read(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PREDICT, plan]) == 0
    text = capsys.readouterr().out
    assert "TP4 PP4 CP2" in text
    assert "matrix products" in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("  - ")) <= 120


def test_bars_are_full() -> None:
    assert len(bar([1.0] * len(PARTS))) == 48
    assert bar([1.0] + [0.0] * (len(PARTS) - 1)) == PARTS[0][2] * 48


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*PREDICT, "compute-bound", "--model", "nothing"], "There is no model named 'nothing'"),
        ([*PREDICT[:-1], "--plan", "communication-boundd"], "Did you mean 'communication-bound'"),
        (["validate", "nowhere.yaml"], "There is no file nowhere.yaml"),
        (["calibrate", "nowhere.yaml", "-o", "x"], "There is no file nowhere.yaml"),
    ],
)
def test_mistakes_are_sentences(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def test_a_plan_that_cannot_be_laid_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("name: bad\nparallelism: {tensor: 3}\n")
    assert main([*PREDICT, str(path)]) == 2
    assert "tensor 3 does not divide the 64 heads of llama3-70b; 1, 2, 4, 8, 16 do." in capsys.readouterr().err


def test_validate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (catalog.ROOT / "runs" / "published.yaml").read_text().splitlines()
    path = tmp_path / "some.yaml"
    path.write_text("\n".join([*lines[: lines.index("runs:") + 20], "- {id: odd, hardware: none, gpus: 8, model: {}}"]))
    assert main(["validate", str(path), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["n"] == 19
    assert told["failed"][0]["id"] == "odd"
    assert {"median_abs_error", "mean_abs_error", "p90_abs_error", "max_abs_error", "groups", "rows", "memory"} <= set(
        told
    )
    assert {"id", "metric", "measured", "predicted", "error"} <= set(told["rows"][0])
    assert {"by", "name", "n", "median_abs_error"} <= set(told["groups"][0])
    assert main(["validate", str(path)]) == 1
    assert "1 rows failed" in capsys.readouterr().out


def test_calibrate_writes_where_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (catalog.ROOT / "runs" / "published.yaml").read_text().splitlines()
    path = tmp_path / "some.yaml"
    path.write_text("\n".join(lines[: lines.index("runs:") + 7]))
    out = tmp_path / "new" / "mine.yaml"
    assert main(["calibrate", str(path), "--hardware", "h100-sxm-80g", "-o", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["n"] == 6
    assert {"before", "after", "left_out"} <= set(told)
    assert catalog.device(str(out)).name == "h100-sxm-80g"
    assert main(["calibrate", str(path), "--hardware", "h100-sxm-80g", "-o", str(path / "below")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_bench(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "predict", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["predict_ms"]["median"] > 0
    assert told["columns"]["plans_per_s"] > 0


def test_reportcard(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reportcard", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"id", "claim", "claimed", "value", "verdict", "why"} <= set(told[0])
    assert main(["reportcard"]) == 0
    assert "CONTRADICTED BY ARITHMETIC" in capsys.readouterr().out


PLAN = ["plan", "--model", "llama3-8b", "--cluster", "h200x32"]


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--cluster", "h100x64", "--top", "3", "--where", "zero<=1", "--pareto", "mfu,power_w"]) == 0
    text = capsys.readouterr().out
    assert text.count("  #1  ") == 2
    assert text.count("Pareto front:") == 2
    assert main([*PLAN, "--top", "2", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert [p["plan"]["global_batch"] for p in told["plans"]] == [128, 128]
    assert told["tried"] > 1000
    assert main([*PLAN, "--top", "2", "--csv"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].startswith("cluster,plan,tokens_per_s")
    assert len(rows) == 3


def test_plan_on_a_part_and_in_two_precisions(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "llama3-8b", "--cluster", "h100x64", "--gpus", "32", "--precision", "bf16,fp8"]
    assert main([*words, "--top", "3000", "--json"]) == 0
    (answer,) = json.loads(capsys.readouterr().out)
    assert answer["gpus"] == 32
    assert {p["plan"]["precision"] for p in answer["plans"]} == {"bf16", "fp8"}
    assert sorted(s["node"] for s in answer["placement"]["seats"]) == ["n01", "n02", "n05", "n06"]
    assert main([*words, "--top", "2", "--pareto", "tokens_per_s,temperature_c,throttled_share"]) == 0
    text = capsys.readouterr().out
    assert "Hosts in rank order: n0" in text
    assert "more on the front: --json has them all" in text


def test_compare_over_clusters_says_what_cannot_be_laid_out(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compare", "data-parallel", "compute-bound", "--model", "llama3-8b"]
    assert main([*words, "--cluster", "h100x64", "--cluster", "h200x32"]) == 0
    found = capsys.readouterr()
    assert "data-parallel on h200x32 against data-parallel on h100x64:" in found.out
    assert found.err.startswith("rackside: compute-bound on h200x32: TP8 PP2 DP4 mb32 needs 64 GPUs; h200x32 has 32")
    assert main(["compare", "compute-bound", "--model", "llama3-8b", "--cluster", "h200x32"]) == 2


def test_plan_with_nothing_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--where", "temperature_c<20"]) == 1
    assert "Nearest to holding:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*PLAN, "--where", "heat<3"], "There is no 'heat' to constrain"),
        ([*PLAN, "--objective", "speed"], "There is no objective 'speed'"),
        ([*PLAN, "--power-limit", "5"], "A power limit of 5 W is outside what h200-sxm-141g takes"),
        ([*PLAN, "--precision", "int4"], "int4"),
        ([*PLAN, "--stack", "mine"], "There is no stack named 'mine'"),
    ],
)
def test_plan_mistakes(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def test_compare(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(Path(plan).read_text().replace("interleave: 5", "interleave: 1").replace("mine", "other"))
    command = ["compare", plan, str(other), "--model", "llama3-70b", "--cluster", "h100x64-400g"]
    assert main(command) == 0
    assert "pipeline bubble +" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first["difference_s"] == 0
    assert second["difference_s"] == pytest.approx(second["iteration_s"] - first["iteration_s"])
    assert next(iter(second["because"])) == "bubble_s"


def test_bench_plans(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "plans", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"plans", "seconds", "plans_per_s", "peak_rss_mb"} <= set(told)
    assert told["plans"] > 100_000


def test_export_and_import(plan: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", plan, "--to", "megatron"]) == 0
    words = capsys.readouterr().out.replace("\\\n", " ").split()
    assert main(["import", "--", "python", "pretrain_gpt.py", *words, "--lr", "1"]) == 0
    told = capsys.readouterr()
    assert "interleave: 5" in told.out
    assert "not used for the plan: lr." in told.err
    command = ["import", "--cluster", "h100x64-400g", "--json"]
    assert main([*command, "--model", "llama3-70b", "--", *words]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"] == 64
    assert main([*command, "--", *words]) == 2
    assert "name no model's shape; say which with --model" in capsys.readouterr().err
    config = tmp_path / "ds.json"
    config.write_text('{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}')
    assert main(["import", "--cluster", "lab", "--model", "llama3-8b", str(config)]) == 0
    assert "8 GPUs" in capsys.readouterr().out


def test_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    """H200 beside MI250: the faster leads at every size that fits."""
    command = ["sweep", "--cluster", "h200x32", "--cluster", "mi250x32", "--where", "zero<=1"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "h200x32 leads per GPU at every size that fits." in text
    assert "nothing fits" in text
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told[0]["leader"] == "h200x32"
    assert told[-1]["best"] == {"h200x32": None, "mi250x32": None}
