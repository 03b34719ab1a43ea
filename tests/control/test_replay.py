"""A recording holds telemetry, jobs, alarms and actions; a replay shows every moment as the console saw it."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine.act.action import Stage, Throttle
from engine.act.alarm import State
from engine.control.control import Refused
from engine.control.events import Published
from engine.control.recording import Recording, inventory
from engine.control.replay import Replay
from engine.control.whatif import what_if
from engine.profile import Cluster, ProfileError, catalog
from engine.record.reading import Reader
from engine.record.schema import RecordError
from tests.parts.recorded import ACTION_AT, ALARM_AT, GONE_AT, recorded, warmer
from tests.parts.still import NOON, still
from tests.parts.waiting import until
from tui.cli import main
from tui.recordings import moment

BEGAN = NOON + 30


def test_a_moment_is_shown_as_it_was(tmp_path: Path) -> None:
    replay = Replay(recorded(tmp_path))
    assert (replay.start, replay.end) == (BEGAN, BEGAN + 199)
    for second in (0, 150, 90, 91, 199):
        replay.seek(BEGAN + second + 0.2)
        want = warmer(still(tmp_path / "made").control.snapshot, second)
        assert replay.snapshot.time == BEGAN + second
        assert [n.state for n in replay.snapshot.nodes] == [n.state for n in want.nodes]
        assert replay.snapshot.gpus.facts == want.gpus.facts
        assert replay.snapshot.nodes[1].hostname == "n02"
        for name in ("temperature_c", "power_w", "sm_clock_mhz", "throttle"):
            assert np.allclose(replay.snapshot.gpus[name], want.gpus[name], atol=0.26), name
        job = replay.jobs.current
        assert job is not None
        assert (job.name, job.attached, len(job.ranks)) == ("pretrain-8b", True, 32)
        assert job.step == 18_204 + second
        assert job.loss == pytest.approx(2.0 - second / 1000)
    times, values = replay.store.history("temperature_c", 11)
    assert times[-1] == replay.snapshot.time
    assert list(values[-30:]) == [55 + second // 10 for second in range(170, 200)]


def test_links_and_processes_are_shown_as_they_were(tmp_path: Path) -> None:
    replay = Replay(recorded(tmp_path))
    want = still(tmp_path / "made").control.snapshot
    for second in (0, 150, 151, 199):
        replay.seek(BEGAN + second)
        links = replay.snapshot.links
        for label in ("node", "gpu", "kind", "name", "state", "to", "of"):
            assert getattr(links, label) == getattr(want.links, label), label
        for column in ("rx_gb_s", "tx_gb_s", "peak_gb_s", "errors", "well"):
            assert np.allclose(links[column], want.links[column], atol=0.051, equal_nan=True), column
        assert replay.snapshot.gpus.processes == want.gpus.processes
    assert replay.snapshot.gpus.processes[3][0].pid == 4003


def test_a_link_that_fails_and_a_process_that_ends_are_so_from_then_on(tmp_path: Path) -> None:
    path, control = tmp_path / "run.rks", still(tmp_path).control
    recording, first = Recording(control, path), control.snapshot
    for second in range(60):
        links, gpus = first.links, first.gpus
        columns = {name: values.copy() for name, values in links.columns.items()}
        columns["rx_gb_s"][5] = second
        if second >= 30:
            columns["errors"][5], columns["well"][5] = 7, 0
            links = replace(links, state=("active",) * 5 + ("inactive",) + links.state[6:])
            gpus = replace(gpus, processes=((), *gpus.processes[1:]))
        links = replace(links, columns=columns)
        control.snapshot = replace(first, time=NOON + second, links=links, gpus=gpus)
        control._tell(Published(control.snapshot))
        recording._thread.submit(lambda: None).result()
    recording.close()
    replay = Replay(path)
    for second in (55, 12, 35, 29, 30):  # on and back
        replay.seek(NOON + second)
        shown, failed = replay.snapshot, second >= 30
        assert shown.links.state[5] == ("inactive" if failed else "active"), second
        assert (shown.links["well"][5], np.nan_to_num(shown.links["errors"][5])) == ((0, 7) if failed else (1, 0))
        assert len(shown.gpus.processes[0]) == (not failed)
        mean_of_its_ten = second // 10 * 10 + 4.5
        assert shown.links["rx_gb_s"][5] == pytest.approx(mean_of_its_ten, abs=0.06)


def test_alarms_and_actions_stand_as_they_stood(tmp_path: Path) -> None:
    replay = Replay(recorded(tmp_path))

    def hot() -> list[State]:
        return [a.state for a in replay.alarms if a.key == "heat:n02:3"]

    for second, states in ((ALARM_AT - 5, []), (ALARM_AT + 10, [State.NEW]), (GONE_AT + 30, [State.RETURNED])):
        replay.seek(BEGAN + second)
        assert hot() == states
        replay.seek(BEGAN)
        replay.step(second)  # onward, and not by a leap
        assert hot() == states
    replay.seek(BEGAN + ALARM_AT + 10)
    assert next(a.row for a in replay.alarms if a.key == "heat:n02:3") == 11
    replay.seek(BEGAN + ACTION_AT - 1)
    assert replay.tickets == ()
    replay.seek(BEGAN + ACTION_AT + 1)
    (ticket,) = replay.tickets
    assert ticket.stage is Stage.DONE
    assert isinstance(ticket.proposal.action, Throttle)
    assert ticket.proposal.action.limits_w["n04"][0] == 600


def test_jumps_go_from_event_to_event(tmp_path: Path) -> None:
    replay = Replay(recorded(tmp_path))
    replay.seek(BEGAN + 1)
    found = []
    while not replay.jump(1):
        found.append(round(replay.position - BEGAN))
    assert found == [ALARM_AT + 2, ACTION_AT]  # heat must last for two seconds
    assert "no alarm or action after" in replay.jump(1)
    assert replay.jump(-1) == ""
    assert round(replay.position - BEGAN) == ALARM_AT + 2


def test_nothing_can_be_done_in_a_recording(tmp_path: Path) -> None:
    path = recorded(tmp_path, 5)
    before = path.read_bytes()
    replay = Replay(path)
    assert replay.arming.arm() == "This is a recording: nothing can be done in it."
    with pytest.raises(Refused, match="This is a recording"):
        replay.confirm(replay.propose_throttle("n04", [(3, 0)], 50.0))
    replay.alarming.acknowledge([a.key for a in replay.alarms])
    assert all(a.state is not State.ACKNOWLEDGED for a in replay.alarms)
    assert path.read_bytes() == before


async def test_it_plays_at_the_speed_that_is_asked_for_and_stops_at_the_end(tmp_path: Path) -> None:
    replay = Replay(recorded(tmp_path))
    async with replay.running():
        replay.faster(1)
        replay.faster(1)
        replay.faster(1)
        assert replay.speed == 60
        replay.play()
        await until(lambda: not replay.playing, 20)
        assert replay.position == replay.end
        replay.play()
        assert replay.position == replay.start


def test_what_if_sets_the_twin_beside_what_came(tmp_path: Path) -> None:
    replay = Replay(recorded(tmp_path))
    replay.seek(BEGAN + 100)
    found = what_if(replay, replay.propose_throttle("all", [(n, s) for n in range(4) for s in range(8)], 200.0))
    first, last = found.rows[0], found.rows[-1]
    assert first.recorded_c == pytest.approx(80, abs=1)
    assert np.isnan(last.recorded_c)  # the recording ends before
    assert last.with_c < last.without_c - 3
    assert last.low_c < last.with_c < last.high_c
    assert last.with_w < 0.9 * last.without_w
    assert first.recorded_w == pytest.approx(first.without_w, rel=0.05)


def test_a_recording_names_no_addresses(tmp_path: Path) -> None:
    planned = catalog.cluster("h200x32-400g")
    nodes = tuple(msgspec.structs.replace(n, ssh=f"ops@secret-{n.name}:22") for n in planned.nodes)
    ssh = msgspec.structs.replace(planned.ssh, identity="~/.ssh/secret", jump="secret")
    told = inventory(msgspec.structs.replace(planned, nodes=nodes, ssh=ssh))
    assert "secret" not in told
    assert msgspec.json.decode(told, type=Cluster).gpus == 32


def test_a_disk_without_room_is_an_alarm_until_there_is_room(tmp_path: Path) -> None:
    app = still(tmp_path)
    recording = Recording(app.control, tmp_path / "run.rks")

    def write() -> None:
        recording._take(app.control.snapshot)
        recording._thread.submit(lambda: None).result()

    db = recording._recorder._db
    write()
    (pages,) = db.execute("pragma page_count").fetchone()
    db.execute(f"pragma max_page_count = {pages}")
    for _ in range(30):
        write()
    (raised,) = [r for r in app.control.amiss() if r.key == "recording"]
    assert "The recording misses seconds" in raised.text
    assert "full" in raised.text
    db.execute("pragma max_page_count = 100000")
    write()
    assert not [r for r in app.control.amiss() if r.key == "recording"]
    assert recording.lost
    recording.close()
    assert recording not in app.control.taps


def test_other_consoles_actions_come_from_the_common_log(tmp_path: Path) -> None:
    app = still(tmp_path)
    recording = Recording(app.control, tmp_path / "run.rks")
    line = {"id": "other", "cluster": app.control.cluster.name, "stage": "done", "title": "Throttle n01"}
    app.control.audit_path.write_text(json.dumps(line) + "\n" + json.dumps(line | {"cluster": "another"}) + "\n")
    recording._take(app.control.snapshot)
    recording.close()
    with Reader(tmp_path / "run.rks") as reader:
        assert [e.data["title"] for e in reader.events(0, 1e12, "ticket")] == ["Throttle n01"]


async def test_a_kill_of_the_recording_command_loses_a_second_at_most(
    inventory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "run.rks"
    words = ["record", "--cluster", str(inventory), "-o", str(path)]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "tui.cli", *words, stdout=-1, stderr=-1)

    def seconds() -> int:
        try:
            with Reader(path) as reader:
                return len(reader.window(reader.start, reader.end, ()).times)
        except RecordError:
            return 0

    try:
        await until(lambda: seconds() > 4, 60)
        seen = seconds()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        await process.communicate()
    assert seconds() >= seen
    replay = Replay(path)
    replay.seek(replay.end)
    assert replay.snapshot.gpus["temperature_c"][0] == 61


def test_export_writes_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = recorded(tmp_path), tmp_path / "out.csv"
    words = ["export", "--recording", str(path), "-o", str(out)]
    assert main([*words, "--from", "+10", "--to", "+19", "--metrics", "temperature_c,power_w"]) == 0
    assert "320 rows" in capsys.readouterr().out
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["time", "gpu", "temperature_c", "power_w"]
    assert rows[11] == {"time": "2025-12-02T12:00:40.000+00:00", "gpu": "n02:3", "temperature_c": "56.0"} | {
        "power_w": rows[11]["power_w"]
    }
    assert float(rows[11]["power_w"]) == pytest.approx(643 + 10 * np.sin(10 / 3), abs=0.1)
    assert main(words) == 0
    assert len(out.read_text().splitlines()) == 1 + 200 * 32


def test_a_thinned_part_is_exported_with_its_bounds(tmp_path: Path) -> None:
    path, out = recorded(tmp_path, thin_after_s=60), tmp_path / "out.csv"
    assert main(["export", "--recording", str(path), "-o", str(out), "--metrics", "power_w"]) == 0
    with out.open() as file:
        first = next(csv.DictReader(file))
    assert list(first) == ["time", "gpu", "power_w", "power_w_min", "power_w_max"]
    assert float(first["power_w_min"]) < float(first["power_w"]) < float(first["power_w_max"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["-o", "out.txt"], "what kind of table? Write a name that ends in .csv or .parquet"),
        (["-o", "out.csv", "--metrics", "heat"], "There is no metric heat; a recording has temperature_c"),
        (["-o", "out.csv", "--from", "noon"], "'noon' is no time; write 12:30"),
        (["-o", "out.csv", "--from", "+900", "--to", "+950"], "Nothing of"),
        (["-o", "out.csv", "--from", "+4", "--to", "+1"], "The end lies before the beginning"),
        (["-o", "none/out.csv"], "cannot be written: No such file"),
        ([], "Where to is missing: -o FILE"),
        (["-o", "out.csv", "--cluster", "lab"], "--recording takes -o, --from, --to and --metrics alone"),
    ],
)
def test_a_bad_export_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    path = recorded(tmp_path, 5)
    monkeypatch.chdir(tmp_path)
    assert main(["export", "--recording", str(path), *words]) == 2
    assert says in capsys.readouterr().err


def test_parquet_is_written_where_pyarrow_is_and_else_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = recorded(tmp_path, 5), tmp_path / "out.parquet"
    try:
        import pyarrow.parquet
    except ImportError:
        assert main(["export", "--recording", str(path), "-o", str(out)]) == 2
        assert "Parquet needs pyarrow, which is not installed here" in capsys.readouterr().err
        assert list(tmp_path.glob("*out*")) == []
    else:
        assert main(["export", "--recording", str(path), "-o", str(out)]) == 0
        assert pyarrow.parquet.read_table(out).num_rows == 5 * 32


def test_what_cannot_be_replayed_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd.rks").write_bytes(b"SQLite format 3\0" + b"x" * 200)
    for name, says in (("none.rks", "There is no file"), ("odd.rks", "is no recording that can be read")):
        assert main(["replay", str(tmp_path / name)]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize("words", [["record", "-o"], ["console", "--record"]])
def test_a_file_is_never_written_over(
    inventory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    path = tmp_path / "run.rks"
    path.write_text("mine")
    assert main([words[0], "--cluster", str(inventory), words[1], str(path)]) == 2
    assert "exists; a recording is never written over. Choose another name." in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_times_as_people_write_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    assert moment("+90", NOON) == NOON + 90
    assert moment("12:01:30", NOON) == NOON + 90
    assert moment("2025-12-02T12:01:30", NOON) == NOON + 90
    with pytest.raises(ProfileError, match="'later' is no time"):
        moment("later", NOON)
