"""Recordings keep every second, whatever ends them; traces are read from them and from other people's CSV."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from engine.record import reading, trace
from engine.record.reading import Reader
from engine.record.recording import Recorder
from engine.record.schema import LINKS, STEPS, RecordError
from engine.telemetry.snapshot import Snapshot
from tests.parts.still import still
from tui.cli import main

LINKED = {"link_rx_gb_s": 2.0, "link_tx_gb_s": 3.0}
"""Each GPU of the still console has two NVLinks."""
GPUS = tuple((f"n{i:02d}", slot) for i in range(1, 5) for slot in range(8))


def seconds(tmp_path: Path, count: int) -> list[Snapshot]:
    """Snapshots a second apart; temperatures and powers change a little, one GPU is never read."""
    first, chance = still(tmp_path).control.snapshot, np.random.default_rng(1)
    out = []
    for second in range(count):
        columns = {name: values.copy() for name, values in first.gpus.columns.items()}
        columns["temperature_c"] += chance.integers(-1, 2, 32)
        columns["power_w"] += chance.uniform(-20, 20, 32)
        columns["temperature_c"][7] = np.nan
        out.append(
            replace(first, time=first.time + second, gpus=replace(first.gpus, columns=MappingProxyType(columns)))
        )
    return out


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    told, path = seconds(tmp_path, 150), tmp_path / "run.rks"
    recorder = Recorder(path, "c", GPUS)
    for snapshot in told:
        recorder.write(snapshot)
    open_file = reading.read(path)  # while it is being written
    recorder.close()
    for found in (open_file, reading.read(path)):
        assert found.gpus == GPUS
        assert list(found.times) == [s.time for s in told]
        for name, step in STEPS.items():
            want = np.array([np.full(32, LINKED[name]) if name in LINKS else s.gpus[name] for s in told])
            assert np.allclose(found.metrics[name], want, atol=step / 2 + 1e-9, equal_nan=True), name


def test_a_value_takes_less_than_two_bytes(tmp_path: Path) -> None:
    told, path = seconds(tmp_path, 240), tmp_path / "run.rks"
    recorder = Recorder(path, "c", GPUS)
    for snapshot in told:
        recorder.write(snapshot)
    recorder.close()
    blocks = sum(len(row) for row in _blobs(path))
    assert blocks / (len(told) * len(GPUS) * len(STEPS)) < 2


def test_what_is_old_is_kept_as_mean_least_and_largest_of_ten_seconds(tmp_path: Path) -> None:
    told, path = seconds(tmp_path, 300), tmp_path / "run.rks"
    recorder = Recorder(path, "c", GPUS, thin_after_s=100)
    for snapshot in told:
        recorder.write(snapshot)
    recorder.close()
    want = np.array([s.gpus["power_w"] for s in told])
    with Reader(path) as reader:
        mean, least, most = (
            reader.window(reader.start, reader.end, ["power_w", "temperature_c"], of=of)
            for of in ("mean", "min", "max")
        )
        apart = np.diff(mean.times)
        thin = int((apart > 1).sum())
        assert thin >= 12  # two minutes at least
        assert set(np.round(apart)) == {1.0, 10.0}
        for at in range(thin - 1):
            of = want[(np.array([s.time for s in told]) // 10) == mean.times[at] // 10]
            assert np.allclose(mean.metrics["power_w"][at], of.mean(axis=0), atol=0.21)
            assert np.allclose(least.metrics["power_w"][at], of.min(axis=0), atol=0.31)
            assert np.allclose(most.metrics["power_w"][at], of.max(axis=0), atol=0.31)
        assert np.isnan(mean.metrics["temperature_c"][:, 7]).all()
        assert np.isnan(least.metrics["temperature_c"][:, 7]).all()
        one = reader.window(told[200].time, told[250].time, ["power_w"], row=5)
        assert np.allclose(one.metrics["power_w"][:, 0], want[200:251, 5], atol=0.11)
        when, values = reader.moment(told[215].time + 0.4)
        assert when == told[215].time
        assert np.allclose(values["power_w"], want[215], atol=0.11)
        assert reader.moment(told[0].time - 100)[0] == told[0].time
        assert reader.moment(told[0].time + 1e6)[0] == told[-1].time


def test_what_is_read_seldom_is_not_thinned(tmp_path: Path) -> None:
    told, path = seconds(tmp_path, 60), tmp_path / "run.rks"
    recorder = Recorder(path, "c", GPUS, thin_after_s=0)
    for at in range(120):
        recorder.write(replace(told[at % 60], time=told[0].time + 15 * at))
    recorder.close()
    assert len(reading.read(path).times) == 120


def test_a_file_that_would_grow_too_large_loses_its_oldest_minutes(tmp_path: Path) -> None:
    told, path = seconds(tmp_path, 60), tmp_path / "run.rks"
    recorder = Recorder(path, "c", GPUS, most_bytes=120_000)
    for minute in range(20):
        for snapshot in told:
            recorder.write(replace(snapshot, time=snapshot.time + 60 * minute))
        assert recorder._bytes() < 200_000
    recorder.close()
    with Reader(path) as reader:
        assert reader.end == told[-1].time + 60 * 19
        assert reader.start > told[0].time + 60


def test_events_are_told_in_their_order_and_the_newest_of_each_subject(tmp_path: Path) -> None:
    told, path = seconds(tmp_path, 3), tmp_path / "run.rks"
    recorder = Recorder(path, "c", GPUS, inventory="{}")
    for number, snapshot in enumerate(told):
        recorder.event(snapshot.time, "step", "j", {"step": number})
        recorder.event(snapshot.time, "alarm", f"heat:n01:{number}", {"what": "raised"})
        recorder.write(snapshot)
    recorder.event(told[2].time + 0.5, "ticket", "t1", {"stage": "done"})
    recorder.flush()
    with Reader(path) as reader:
        assert [e.data["step"] for e in reader.events(told[0].time, told[2].time, "step")] == [1, 2]
        assert [e.data["step"] for e in reader.newest(told[1].time + 0.5, "step")] == [1]
        assert len(reader.newest(told[2].time, "alarm")) == 3
        assert [kind for _, kind in reader.marks("alarm", "ticket")] == ["alarm"] * 3 + ["ticket"]
        assert reader.inventory == "{}"
    recorder.close()
    assert not path.with_name("run.rks-wal").exists()


FULL = """
import resource, sys
from pathlib import Path
from tests.record.test_recording import GPUS, seconds
from engine.record.recording import Recorder
from engine.record.schema import RecordError
told = seconds(Path(sys.argv[2]), 150)
recorder = Recorder(Path(sys.argv[1]), "c", GPUS)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
lost = 0
for number, snapshot in enumerate(told):
    if number == 149:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    recorder.event(snapshot.time, "step", "j", {"step": number})
    try:
        recorder.write(snapshot)
    except RecordError as error:
        lost += 1
        said = str(error)
recorder.close()
print(lost, said)
"""


def test_no_room_left_in_the_file_system_costs_seconds_and_no_event(tmp_path: Path) -> None:
    path, folder = tmp_path / "run.rks", tmp_path / "made"
    folder.mkdir()
    words = [sys.executable, "-c", FULL, str(path), str(folder)]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=os.getcwd(), timeout=60, check=True)
    lost, _, said = ended.stdout.partition(" ")
    assert int(lost) > 10
    assert "could not be written" in said
    with Reader(path) as reader:
        times = reader.window(reader.start, reader.end, ()).times
        assert len(times) >= 150 - int(lost)
        assert len(set(times)) == len(times)
        assert [e.data["step"] for e in reader.events(0, 1e12, "step")] == list(range(150))


def _blobs(path: Path) -> list[bytes]:
    return [row[0] for row in sqlite3.connect(path).execute("select data from block")]


KILLED = """
import sys
from pathlib import Path
from tests.record.test_recording import GPUS, seconds
from engine.record.recording import Recorder
recorder = Recorder(Path(sys.argv[1]), "c", GPUS)
for number, snapshot in enumerate(seconds(Path(sys.argv[2]), 500)):
    recorder.write(snapshot)
    print(number, flush=True)
"""


def test_a_kill_loses_nothing_that_was_written(tmp_path: Path) -> None:
    path, folder = tmp_path / "run.rks", tmp_path / "made"
    folder.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path), str(folder)], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
    )
    assert process.stdout is not None
    last = -1
    for line in process.stdout:
        last = int(line)
        if last == 100:
            process.send_signal(signal.SIGKILL)
            break
    process.wait()
    assert len(reading.read(path).times) >= last


def test_a_full_disk_is_a_sentence_and_what_was_written_stays(tmp_path: Path) -> None:
    """SQLite's own limit of pages gives the error that a full disk gives."""
    told, path, written = seconds(tmp_path, 150), tmp_path / "run.rks", []
    recorder = Recorder(path, "c", GPUS)
    (pages,) = recorder._db.execute("pragma page_count").fetchone()
    recorder._db.execute(f"pragma max_page_count = {pages + 6}")
    for snapshot in told[:-1]:
        try:
            recorder.write(snapshot)
            written.append(snapshot.time)
        except RecordError as error:
            assert "database or disk is full" in str(error)
    assert 0 < len(written) < len(told) - 1
    recorder._db.execute("pragma max_page_count = 100000")
    recorder.write(told[-1])
    recorder.close()
    assert list(reading.read(path).times) == [*written, told[-1].time]


def test_of_old_minutes_one_row_of_links_is_left(tmp_path: Path) -> None:
    told, path = seconds(tmp_path, 400), tmp_path / "run.rks"
    recorder = Recorder(path, "c", GPUS, thin_after_s=120)
    for snapshot in told:
        recorder.write(snapshot)
    recorder.close()
    ends = [end for (end,) in sqlite3.connect(path).execute("select start from rate order by start")]
    minutes = [end // 60 for end in ends]
    thinned = told[-1].time - 60 - 120  # the last whole minute was folded up to a minute ago
    old = [m for m, end in zip(minutes, ends, strict=True) if end < thinned - 60]
    assert len(old) >= 3
    assert len(set(old)) == len(old)
    assert sum(end > told[-1].time - 120 for end in ends) >= 11
    with Reader(path) as reader:
        for moment in (told[0].time, told[75].time, told[333].time):
            rates = reader.rates(moment)
            assert rates is not None
            assert rates.shape == (2, len(told[0].links))
        assert reader.rates(told[0].time - 3600) is None


def test_nothing_of_a_recording_speaks_to_the_terminal(tmp_path: Path) -> None:
    """The file may come from anybody."""
    path, bad = tmp_path / "run.rks", "a\x1b]52;c;eA==\x07b\u202e"
    recorder = Recorder(path, bad, [(bad, 0)], json.dumps({"name": bad, "nodes": [{"name": bad}]}))
    for kind in ("node", "alarm", "ticket", bad):
        recorder.event(1.0, kind, bad, {"reason": bad, "gpus": [[{"name": bad}]], bad: 1})
    recorder.write_columns(2.0, np.zeros((len(STEPS), 1)))
    recorder.close()
    with Reader(path) as reader:
        told = [reader.cluster, reader.gpus[0][0], *(f"{e.kind}{e.subject}" for e in reader.story().events)]
        told += [json.dumps(e.data, ensure_ascii=False) for e in reader.story().events]
        told.append(json.dumps(json.loads(reader.inventory), ensure_ascii=False))
    assert len(told) == 2 + 4 + 4 + 1
    for text in told:
        assert text.isprintable(), text
        assert "a]52;c;eA==b" in text


def test_a_recording_without_links_can_still_be_read(tmp_path: Path) -> None:
    """As they were written before there were any."""
    path = tmp_path / "run.rks"
    recorder = Recorder(path, "c", GPUS)
    for snapshot in seconds(tmp_path, 3):
        recorder.write(snapshot)
    recorder.close()
    with sqlite3.connect(path) as db:
        db.execute("drop table rate")
        db.execute("update meta set value = '2' where key = 'format'")
    with Reader(path) as reader:
        assert len(reader.window(reader.start, reader.end).times) == 3
        assert reader.rates(reader.end) is None


def test_a_recording_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "run.rks"
    Recorder(path, "c", GPUS).close()
    with pytest.raises(RecordError, match="exists; a recording is never written over"):
        Recorder(path, "c", GPUS)
    with pytest.raises(RecordError, match="is empty: nothing was recorded"):
        reading.read(path)
    with pytest.raises(RecordError, match="cannot be written"):
        Recorder(tmp_path / "none" / "run.rks", "c", GPUS)


def test_what_is_no_recording_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "odd.rks"
    path.write_bytes(b"SQLite format 3\0" + b"x" * 200)
    with pytest.raises(RecordError, match="no recording that can be read"):
        trace.read(path, GPUS)
    with pytest.raises(RecordError, match="There is no file"):
        trace.read(tmp_path / "none.csv", GPUS)


@pytest.mark.parametrize(
    "text",
    [
        "time,gpu,power,temperature\n0,n01:0,500,60\n0,n01:1,510,61\n1,n01:0,505,60\n",
        "gpu,temperature_c,power_w,time\nn01/0,60,500,0\nn01/1,61,510,0\nn01/0,60,505,1\n",
        "time, gpu, power [W], temperature.gpu\n0, 0, 500.00 W, 60\n0, 1, 510.00 W, 61\n1, 0, 505.00 W, 60\n",
        "time,gpu,power,temperature\n2026-01-31 12:00:00,n01 GPU 0,500,60\n2026-01-31 12:00:00,n01 GPU 1,510,61\n"
        "2026-01-31 12:00:01,n01 GPU 0,505,60\n",
    ],
    ids=["plain", "named", "nvidia-smi", "dated"],
)
def test_a_trace_from_somebodys_csv(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    found = trace.read(path, GPUS)
    assert np.diff(found.times) == pytest.approx([1.0])
    assert list(found.power_w[0][:2]) == [500, 510]
    assert found.power_w[1][0] == 505
    assert np.isnan(found.temperature_c[1][1])
    assert list(found.temperature_c[0][:2]) == [60, 61]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("time,gpu,power\n0,0,500\n", "there is no column 'temperature'"),
        ("time,gpu,power,temperature\n0,n09:0,500,60\n", "2: 'n09:0' is no GPU of the cluster; write node:slot, such"),
        ("time,gpu,power,temperature\n0,0,lots,60\n", "2: 'lots' is no number"),
        ("time,gpu,power,temperature\nnoon,0,500,60\n", "2: 'noon' is no time"),
        ("", "there is no column 'time'"),
    ],
)
def test_a_bad_trace_is_a_sentence(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(RecordError, match=says):
        trace.read(path, GPUS)


def test_the_bench_says_what_a_recording_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "record", "--gpus", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["metrics"] == 10
    assert 0 < found["bytes_per_value"] < 2
    assert found["gb_per_24h"] * 8192 / 64 < 10
    assert found["gb_per_24h"] < found["gb_per_24h_whole"]
    assert 0 < found["open_minute_s"] < 1
