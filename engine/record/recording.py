"""A recording: what every GPU read, second by second, in one SQLite file.

    meta   key, value          format, cluster, interval
    gpu    row, node, slot     the rows of every array
    second tick, time, data    the last minute, a row a second: nothing written is lost when the program is killed
    block  first, metric, ticks, times, data     older seconds, a column at a time
    event  id, time, kind, data                  what else happened, as JSON

`data` is zlib over 16-bit integers, metric by metric (in `second`) or as differences along time (in `block`); times
are 64-bit floats in unix seconds. A value is the integer times its metric's step below; -32768: nothing was read.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.telemetry.snapshot import Snapshot

Floats = npt.NDArray[np.float64]
Shorts = npt.NDArray[np.int16]

FORMAT = "1"
STEPS = {
    "temperature_c": 0.5,
    "memory_temperature_c": 0.5,
    "power_w": 0.1,
    "power_limit_w": 0.1,
    "sm_clock_mhz": 1.0,
    "memory_clock_mhz": 1.0,
    "utilization_pct": 1.0,
    "memory_used_mib": 8.0,
    "margin_c": 0.5,
    "throttle": 1.0,
}
"""What is recorded, and the smallest step of each."""
NOTHING = -32768
BLOCK_TICKS = 60


class RecordError(Exception):
    """A recording that cannot be written or read. The text is a sentence."""


@dataclass(frozen=True)
class Series:
    """A stretch of a recording: `times` (t,) in unix seconds, each metric (t, n), `gpus` (node, slot) of each row."""

    times: Floats
    metrics: Mapping[str, Floats]
    gpus: tuple[tuple[str, int], ...]


class Recorder:
    """Writes snapshots to a new file. Rows are laid out once: `gpus` as (node, slot)."""

    def __init__(self, path: Path, cluster: str, gpus: Sequence[tuple[str, int]]) -> None:
        if path.exists():
            raise RecordError(f"{path} exists; a recording is never written over. Choose another name.")
        self.path, self._gpus = path, tuple(gpus)
        self._rows = {gpu: row for row, gpu in enumerate(self._gpus)}
        self._tick = 0
        try:
            self._db = sqlite3.connect(path)
            self._db.executescript(_SCHEMA)
            self._db.executemany("insert into meta values (?, ?)", [("format", FORMAT), ("cluster", cluster)])
            self._db.executemany("insert into gpu values (?, ?, ?)", [(r, n, s) for (n, s), r in self._rows.items()])
            self._db.commit()
        except sqlite3.Error as error:
            raise RecordError(f"{path} cannot be written: {error}.") from None

    def write(self, snapshot: Snapshot) -> None:
        """Add one tick. RecordError when it did not reach the file; the next may again."""
        columns = np.full((len(STEPS), len(self._gpus)), np.nan)
        ours, theirs = self._matched(snapshot)
        for at, name in enumerate(STEPS):
            columns[at, ours] = snapshot.gpus[name][theirs]
        whole = _whole(columns, np.array(list(STEPS.values()))[:, None])
        try:
            with self._db:
                self._db.execute("insert into second values (?, ?, ?)", (self._tick, snapshot.time, _packed(whole)))
                self._tick += 1
                if self._tick % BLOCK_TICKS == 0:
                    self._fold()
        except sqlite3.Error as error:
            raise RecordError(f"{self.path}: a second could not be written: {error}.") from None

    def _matched(self, snapshot: Snapshot) -> tuple[list[int], list[int]]:
        ours, theirs = [], []
        for node in snapshot.nodes:
            for slot, row in enumerate(node.rows):
                known = self._rows.get((node.name, slot))
                if known is not None:
                    ours.append(known)
                    theirs.append(row)
        return ours, theirs

    def _fold(self) -> None:
        """Turn the last minute's rows into a block for each metric."""
        rows = self._db.execute("select tick, time, data from second order by tick").fetchall()
        whole = np.stack([_unpacked(data, (len(STEPS), len(self._gpus))) for _, _, data in rows])
        times = zlib.compress(np.array([time for _, time, _ in rows]).tobytes())
        for at, name in enumerate(STEPS):
            steps = np.diff(whole[:, at], axis=0, prepend=np.zeros((1, len(self._gpus)), np.int16))  # wraps, and back
            row = (rows[0][0], name, len(rows), times, _packed(steps))
            self._db.execute("insert into block values (?, ?, ?, ?, ?)", row)
        self._db.execute("delete from second")

    def close(self) -> None:
        """Fold what is left and close the file."""
        try:
            with self._db:
                if self._db.execute("select count(*) from second").fetchone()[0]:
                    self._fold()
            self._db.close()
        except sqlite3.Error as error:
            raise RecordError(f"{self.path} could not be closed: {error}.") from None


def read(path: Path, metrics: Iterable[str] = tuple(STEPS)) -> Series:
    """A whole recording, of the metrics asked for. RecordError with a sentence when it is none."""
    wanted = list(metrics)
    try:
        db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        kind = db.execute("select value from meta where key = 'format'").fetchone()
        if kind is None or kind[0] != FORMAT:
            raise RecordError(f"{path} is a recording of another format ({kind and kind[0]}); this reads {FORMAT}.")
        gpus = tuple((str(n), int(s)) for n, s in db.execute("select node, slot from gpu order by row"))
        times: list[Floats] = []
        parts: dict[str, list[Floats]] = {name: [] for name in wanted}
        of_block = "select first, ticks, times, metric, data from block order by first"
        seen = -1
        for first, ticks, when, metric, data in db.execute(of_block):
            if first != seen:
                times.append(np.frombuffer(zlib.decompress(when)))
                seen = first
            if metric in parts:
                steps = _unpacked(data, (ticks, len(gpus)))
                parts[metric].append(_values(np.cumsum(steps, axis=0, dtype=np.int16), STEPS[metric]))
        for time, data in db.execute("select time, data from second order by tick"):
            whole = _unpacked(data, (len(STEPS), len(gpus)))
            times.append(np.array([time]))
            for name in wanted:
                parts[name].append(_values(whole[[list(STEPS).index(name)]], STEPS[name]))
        db.close()
    except (sqlite3.Error, zlib.error, ValueError) as error:
        raise RecordError(f"{path} is no recording that can be read: {error}.") from None
    if not times:
        raise RecordError(f"{path} is empty: nothing was recorded.")
    return Series(np.concatenate(times), {name: np.concatenate(rows) for name, rows in parts.items()}, gpus)


def _whole(values: Floats, step: Floats) -> Shorts:
    scaled = np.clip(np.round(values / step), NOTHING + 1, 32767)
    return np.where(np.isnan(scaled), NOTHING, scaled).astype(np.int16)


def _values(whole: Shorts, step: float) -> Floats:
    return np.where(whole == NOTHING, np.nan, whole * step)


def _packed(whole: Shorts) -> bytes:
    return zlib.compress(np.ascontiguousarray(whole).tobytes(), 6)


def _unpacked(data: bytes, shape: tuple[int, int]) -> Shorts:
    return np.frombuffer(zlib.decompress(data), np.int16).reshape(shape)


_SCHEMA = """
pragma journal_mode = wal;
pragma synchronous = normal;
create table meta (key text primary key, value text not null);
create table gpu (row integer primary key, node text not null, slot integer not null);
create table second (tick integer primary key, time real not null, data blob not null);
create table block (
    first integer not null, metric text not null, ticks integer not null, times blob not null, data blob not null,
    primary key (first, metric)
);
create table event (id integer primary key, time real not null, kind text not null, data text not null);
"""
