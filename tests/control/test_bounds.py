"""What a console remembers is bounded, however long it runs and whatever comes and goes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.act import alarmlog
from engine.act.alarm import Event, Priority, What
from engine.act.alarmlog import AlarmLog
from engine.control.jobs import GONE_KEPT, Jobs
from engine.job.status import JobStatus


def test_the_last_jobs_that_are_gone_are_told_of() -> None:
    jobs = Jobs({}, "ops@test", lambda _: None)
    runs = JobStatus("runs", "n1", "/run/runs.sock", attached=True)
    jobs._publish(runs)
    for number in range(GONE_KEPT + 10):
        jobs._publish(replace(runs, socket=f"/run/{number}.sock", attached=False, reason="it was killed"))
    assert list(jobs.statuses) == ["n1:/run/runs.sock", *(f"n1:/run/{10 + i}.sock" for i in range(GONE_KEPT))]
    assert jobs.current == runs
    assert len(jobs.troubles()) == GONE_KEPT


def test_the_last_word_on_an_alarm_is_told_once_also_when_many_are_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarmlog, "KEYS", 3)
    log = AlarmLog(tmp_path / "alarms.jsonl", "lab")
    for key in ("a", "b", "c", "a", "d"):
        log.write(Event(1.0, key, What.RAISED, Priority.WARNING, key))
    assert len(log._last) == 3
    log.write(Event(2.0, "d", What.RAISED, Priority.WARNING, "d"))
    lines = (tmp_path / "alarms.jsonl").read_text().splitlines()
    assert len(lines) == 4, "what was told already is not told twice"
