"""Recordings keep every second, whatever ends them; traces are read from them and from other people's CSV."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from engine.record import recording, trace
from engine.record.recording import STEPS, Recorder, RecordError
from engine.telemetry.snapshot import Snapshot
from tests.parts.still import still

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
    open_file = recording.read(path)  # while it is being written
    recorder.close()
    for found in (open_file, recording.read(path)):
        assert found.gpus == GPUS
        assert list(found.times) == [s.time for s in told]
        for name, step in STEPS.items():
            want = np.array([s.gpus[name] for s in told])
            assert np.allclose(found.metrics[name], want, atol=step / 2 + 1e-9, equal_nan=True), name


def test_a_value_takes_less_than_two_bytes(tmp_path: Path) -> None:
    told, path = seconds(tmp_path, 240), tmp_path / "run.rks"
    recorder = Recorder(path, "c", GPUS)
    for snapshot in told:
        recorder.write(snapshot)
    recorder.close()
    blocks = sum(len(row) for row in _blobs(path))
    assert blocks / (len(told) * len(GPUS) * len(STEPS)) < 2


def _blobs(path: Path) -> list[bytes]:
    import sqlite3

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
    assert len(recording.read(path).times) >= last


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
    assert list(recording.read(path).times) == [*written, told[-1].time]


def test_a_recording_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "run.rks"
    Recorder(path, "c", GPUS).close()
    with pytest.raises(RecordError, match="exists; a recording is never written over"):
        Recorder(path, "c", GPUS)
    with pytest.raises(RecordError, match="is empty: nothing was recorded"):
        recording.read(path)
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
