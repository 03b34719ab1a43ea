"""What came of an action: counted from the steps and readings after it, and kept as a score."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.act.action import Outlook, Stage
from engine.act.audit import Audit
from engine.act.measure import LEAST_S, PEAK_S, STEPS, Measuring
from engine.act.score import scores
from engine.job import JobStatus
from tests.act.test_audit import TICKET
from tui.cli import main

JOB = JobStatus("run", "n1", "/s.sock", attached=True, global_batch=8, tokens_per_sample=100, step=40, step_s=1.0)


def rack(watts: float = 500.0, celsius: float = 70.0) -> Any:
    return SimpleNamespace(power_w=np.array([watts, np.nan]), temperature_c=np.array([celsius, np.nan]))


def at(step: int, *recent: float) -> JobStatus:
    return replace(JOB, step=step, step_s=recent[-1], recent_step_s=recent)


def test_only_whole_steps_after_the_action_count() -> None:
    """Step 41 began before the limit took hold; the five after it are measured, also when several end in one look."""
    measuring = Measuring(0.0, JOB, None)
    assert measuring.look(LEAST_S, at(41, 1.0, 1.0, 9.0), rack()) is None
    assert measuring.look(LEAST_S + 1, at(44, 1.0, 9.0, 2.0, 2.1, 2.2), rack()) is None
    found = measuring.look(LEAST_S + 2, at(46, 9.0, 2.0, 2.1, 2.2, 2.3, 2.4), rack())
    assert found is not None
    assert (found.step_s, found.peak_c, found.power_w) == (2.2, None, 500.0)
    assert found.tokens_per_s == pytest.approx(800 / 2.2)
    assert measuring.look(LEAST_S + 3, at(47, 2.4, 2.5), rack()) is None, "told once"


def test_a_job_command_counts_from_its_own_step() -> None:
    measuring = Measuring(0.0, JOB, 42)
    found = measuring.look(LEAST_S, at(42 + STEPS, 9.0, 9.0, *[3.0] * STEPS), rack())
    assert found is not None
    assert found.step_s == 3.0


def test_the_hottest_gpu_is_told_when_the_rack_has_settled() -> None:
    measuring = Measuring(0.0, None, None)
    first = measuring.look(LEAST_S, None, rack(celsius=75))
    assert first is not None
    assert (first.peak_c, first.step_s, first.power_w) == (None, None, 500.0)
    last = measuring.look(PEAK_S, None, rack(watts=400, celsius=81))
    assert last is not None
    assert last.peak_c == 81
    assert measuring.over


@pytest.mark.parametrize("later", [None, replace(JOB, attached=False), replace(JOB, socket="/other.sock")])
def test_another_job_ends_it(later: JobStatus | None) -> None:
    measuring = Measuring(0.0, JOB, None)
    assert measuring.look(PEAK_S, later, rack()) is None
    assert measuring.over


def test_the_score_is_kept_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert main(["score"]) == 0
    assert "No action in the log has been measured yet" in capsys.readouterr().out
    audit = Audit(tmp_path / "rackside" / "audit.jsonl")
    done = replace(TICKET, stage=Stage.DONE)
    audit.write("lab", done)
    audit.write("lab", replace(done, measured=Outlook(2.0, None, None, None)))
    audit.write("lab", replace(done, measured=Outlook(2.5, None, None, None)))  # the last word counts: 2.2 predicted
    audit.write("lab", replace(done, id="t2", measured=Outlook(2.0, None, None, None)))
    step, power, peak = scores(audit.read())
    assert step.errors == pytest.approx((2.2 / 2.5 - 1, 0.1))
    assert (power.errors, peak.errors) == ((), ())
    assert main(["score"]) == 0
    assert "step time       2 actions  off by 11.0% in the median, at worst -12.0%" in capsys.readouterr().out


@pytest.mark.parametrize(
    "entry",
    [{}, {"measured": 3}, {"measured": {"step_s": "2"}}, {"measured": {"step_s": 2}, "predicted": [1]}, {"id": None}],
)
def test_a_line_of_the_log_that_says_nothing_scores_nothing(entry: dict[str, Any]) -> None:
    assert all(score.errors == () for score in scores([entry]))


def test_the_line_says_both() -> None:
    done = replace(TICKET, stage=Stage.DONE, measured=Outlook(2.25, None, None, 9000.0))
    assert done.line == "Power limit of n1 to 500 W - done; measured 2.25 s (2.20 predicted), 9.0 kW"
