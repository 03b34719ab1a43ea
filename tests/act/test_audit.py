"""The audit log: on the disk before anything is done, whole after a crash, private."""

from __future__ import annotations

import json
import multiprocessing
import resource
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from engine.act.action import Outlook, Proposal, Stage, Throttle, Ticket
from engine.act.audit import Audit, AuditError, Tail, default_path

NOTHING = Outlook(None, None, None, None)
TICKET = Ticket(
    id="t1",
    time=1_700_000_000.0,
    operator="ops@here",
    proposal=Proposal(
        "Power limit of n1 to 500 W",
        Throttle({"n1": {0: 500.0}}),
        replace(NOTHING, step_s=2.0),
        replace(NOTHING, step_s=2.2),
        "1 GPU on 1 node",
    ),
)


def test_every_change_is_a_line_with_what_was_asked_and_predicted(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "log" / "audit.jsonl")
    audit.write("lab", TICKET)
    audit.write("lab", replace(TICKET, stage=Stage.DONE))
    first, second = audit.read()
    assert first["time"] == second["time"] == TICKET.time < first["at"] <= second["at"], "when it came to that"
    assert (first["stage"], second["stage"]) == ("pending", "done")
    assert first["operator"] == "ops@here"
    assert first["cluster"] == "lab"
    assert first["asked"]["limits_w"] == {"n1": {"0": 500.0}}
    assert (first["predicted"]["before"]["step_s"], first["predicted"]["after"]["step_s"]) == (2.0, 2.2)


def test_only_its_owner_reads_it(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "log" / "audit.jsonl")
    audit.write("lab", TICKET)
    assert stat.S_IMODE(audit.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(audit.path.parent.stat().st_mode) == 0o700


def test_a_line_cut_short_hides_no_other(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl")
    audit.write("lab", TICKET)
    with audit.path.open("a") as file:
        file.write('{"id": "cut')
        file.write("\n[1]\n")
    audit.write("lab", TICKET)
    assert [e["id"] for e in audit.read()] == ["t1", "t1"]


def test_a_log_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(AuditError, match=r"the audit log .* cannot be written"):
        Audit(blocked / "audit.jsonl").write("lab", TICKET)


def test_a_disk_that_is_full_costs_the_line_that_did_not_fit_and_no_other(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "audit.jsonl")
    audit.write("lab", TICKET)
    size, (soft, hard) = audit.path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, hard))
    try:
        with pytest.raises(AuditError, match="cannot be written"):
            audit.write("lab", replace(TICKET, id="lost"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert audit.path.stat().st_size == size + 50, "half of it was written"
    audit.write("lab", replace(TICKET, id="after"))
    assert [entry["id"] for entry in audit.read()] == [TICKET.id, "after"]


def test_no_log_yet_is_an_empty_log(tmp_path: Path) -> None:
    assert list(Audit(tmp_path / "none").read()) == []


def _write(path: Path, name: str) -> None:
    for number in range(40):
        Audit(path).write("lab", replace(TICKET, id=f"{name}{number}", reason="x" * 500))


def test_two_consoles_write_one_log(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    writers = [multiprocessing.get_context("fork").Process(target=_write, args=(path, name)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 80


def test_the_log_follows_xdg_state_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "rackside" / "audit.jsonl"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", "/home/ops")
    assert default_path() == Path("/home/ops/.local/state/rackside/audit.jsonl")


def test_a_tail_reads_each_line_once_and_of_a_long_log_its_end(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    tail = Tail(path, most=3)
    assert tail.look() == ()
    path.write_text('{"id": 1}\n{"id": 2}\n{"cut')
    assert [e["id"] for e in tail.look()] == [1, 2]
    with path.open("a") as log:
        log.write('": 9, "id": 3}\nno JSON\n[4]\n{"id": 5}\n')
    assert [e["id"] for e in tail.look()] == [2, 3, 5]
    path.unlink()
    assert [e["id"] for e in tail.look()] == [2, 3, 5], "what is known stays"
    path.write_text("".join(f'{{"id": {n}, "pad": "{"x" * 100}"}}\n' for n in range(20_000)))
    assert [e["id"] for e in tail.look()] == [19_997, 19_998, 19_999]
    assert [e["id"] for e in Tail(path).look()][-1] == 19_999
