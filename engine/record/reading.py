"""Reading a recording, while it is written or later: any stretch of it, at once."""

from __future__ import annotations

import json
import math
import sqlite3
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.record import packing
from engine.record.schema import BIN_S, NOTHING, PART, RATE_STEP, RATES_LEFT, READ, STEPS, Floats, RecordError, Shorts
from engine.telemetry.text import clean

MOST_TEXT = 10_000
KEPT = 256
"""Unpacked blocks that are kept, 120 kB each at most."""


@dataclass(frozen=True)
class Series:
    """A stretch of a recording: `times` (t,) in unix seconds, each metric (t, n), `gpus` (node, slot) of each row. Of
    thinned parts the mean, or what was asked for."""

    times: Floats
    metrics: Mapping[str, Floats]
    gpus: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Told:
    """An event: its number in the file, and what `engine.record.schema` says."""

    id: int
    time: float
    kind: str
    subject: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Story:
    """The cluster's name, and all its events in their order."""

    cluster: str
    events: tuple[Told, ...]

    def of(self, kind: str) -> list[Told]:
        return [event for event in self.events if event.kind == kind]


@dataclass(frozen=True, slots=True)
class _Minute:
    id: int
    times: Floats
    thin: bool


class Reader:
    """An open recording. RecordError with a sentence when it is none."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise RecordError(f"There is no file {path}.")
        self.path = path
        self._blocks: OrderedDict[tuple[int, bool, str, int], tuple[Shorts, ...]] = OrderedDict()
        try:
            self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, check_same_thread=False)
            told = dict(self._db.execute("select key, value from meta").fetchall())
            if told.get("format") not in READ:
                raise RecordError(
                    f"{path} is a recording of another format ({told.get('format')}); this reads {' and '.join(READ)}."
                )
            self._has_rates = told["format"] != READ[0]
            self.cluster, self.inventory = (
                clean(str(told.get("cluster", ""))),
                _harmless(str(told.get("inventory", ""))),
            )
            found = self._db.execute("select node, slot from gpu order by row")
            self.gpus = tuple((clean(str(node)), int(slot)) for node, slot in found)
            self._span()
        except (sqlite3.Error, ValueError) as error:
            raise RecordError(f"{path} is no recording that can be read: {error}.") from None

    def _span(self) -> None:
        first = self._db.execute("select min(start), max(end) from minute").fetchone()
        last = self._db.execute("select min(time), max(time) from second").fetchone()
        ends = [t for t in (*first, *last) if t is not None]
        if not ends:
            raise RecordError(f"{self.path} is empty: nothing was recorded.")
        self.start, self.end = float(min(ends)), float(max(ends))

    def refresh(self) -> bool:
        """Look again how far it goes, for it may still be written; whether it goes further now."""
        before = self.end
        try:
            self._span()
        except sqlite3.Error as error:
            raise RecordError(f"{self.path} cannot be read: {error}.") from None
        return self.end > before

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def window(
        self, begin: float, end: float, metrics: Iterable[str] = tuple(STEPS), row: int | None = None, of: str = "mean"
    ) -> Series:
        """What was read from `begin` to `end`, both included; of one GPU alone where `row` is given. `of` says what is
        taken of thinned parts: mean, min or max."""
        wanted, parts = list(metrics), range(math.ceil(len(self.gpus) / PART)) if row is None else [row // PART]
        at = {"mean": 0, "min": 1, "max": 2}[of]
        columns = slice(None) if row is None else slice(row, row + 1)
        times: list[Floats] = []
        found: dict[str, list[Floats]] = {name: [] for name in wanted}
        try:
            with self._db:
                self._db.execute("begin")  # one state of the file: a minute is folded in between, or not
                for minute in self._minutes(begin, end):
                    inside = (minute.times >= begin) & (minute.times <= end)
                    times.append(minute.times[inside])
                    for name in wanted:
                        blocks = [self._block(minute, name, part)[at if minute.thin else 0][inside] for part in parts]
                        if row is not None:
                            blocks = [blocks[0][:, row % PART : row % PART + 1]]
                        found[name].append(packing.values(np.concatenate(blocks, axis=1), STEPS[name]))
                seconds = "select time, data from second where time between ? and ? order by tick"
                for time, data in self._db.execute(seconds, (begin, end)):
                    whole = packing.unraw(data, (len(STEPS), len(self.gpus)))
                    times.append(np.array([time]))
                    for name in wanted:
                        place = list(STEPS).index(name)
                        found[name].append(packing.values(whole[place : place + 1, columns], STEPS[name]))
        except (sqlite3.Error, zlib.error, ValueError) as error:
            raise RecordError(f"{self.path} cannot be read: {error}.") from None
        n = len(self.gpus) if row is None else 1
        empty = np.zeros((0, n))
        return Series(
            np.concatenate([np.zeros(0), *times]),
            {name: np.concatenate([empty, *rows]) for name, rows in found.items()},
            self.gpus if row is None else (self.gpus[row],),
        )

    def moment(self, time: float, metrics: Iterable[str] = tuple(STEPS)) -> tuple[float, dict[str, Floats]]:
        """The last tick at or before a moment: its time, and each metric (n,); the first one for what lies before."""
        time = max(time, self.start)
        at = self._one("select max(time) from second where time <= ?", time)
        if at is None:
            start = self._one("select max(start) from minute where start <= ?", time)
            within = self.window(self.start if start is None else start, time, ())
            at = float(within.times[-1]) if len(within.times) else self.start
        found = self.window(at, at, metrics)
        return at, {name: rows[-1] for name, rows in found.metrics.items()}

    def rates(self, moment: float) -> Floats | None:
        """What single links carried around a moment: (2, link) GB/s, received and sent, in the order of the nodes' last
        `links` events; None where nothing is left of it."""
        if not self._has_rates:
            return None
        last = "select data from rate where start = (select max(start) from rate where start <= ?) and start > ?"
        found = self._rows(last, (moment, moment - RATES_LEFT * BIN_S))
        try:
            return packing.values(packing.unraw(found[0][0], (2, -1)), RATE_STEP) if found else None
        except (zlib.error, ValueError) as error:
            raise RecordError(f"{self.path} cannot be read: {error}.") from None

    def is_thin(self, begin: float, end: float) -> bool:
        """Whether anything of a stretch is kept as mean, least and largest only."""
        words = "select count(*) from minute where end >= ? and start <= ? and step_s > 0"
        return bool(self._rows(words, (begin, end))[0][0])

    def events(self, begin: float, end: float, *kinds: str) -> Iterator[Told]:
        """What happened after `begin` and until `end`, of these kinds or of all, in its order."""
        yield from self._events("time > ? and time <= ?", (begin, end), kinds)

    def story(self) -> Story:
        """All that happened."""
        return Story(self.cluster, tuple(self.events(-math.inf, math.inf)))

    def newest(self, until: float, kind: str) -> list[Told]:
        """The last event of each subject at or before a moment."""
        last = "id in (select max(id) from event where kind = ? and time <= ? group by subject)"
        return list(self._events(last, (kind, until), ()))

    def marks(self, *kinds: str) -> list[tuple[float, str]]:
        """When events of some kinds happened, without reading them."""
        asked = ",".join("?" * len(kinds))
        found = self._rows(f"select time, kind from event where kind in ({asked}) order by time, id", kinds)
        return [(float(t), str(k)) for t, k in found]

    def last(self, until: float, kind: str, subject: str) -> Told | None:
        """The last event of one kind and subject at or before a moment."""
        newest = "select max(time) from event where kind = ? and subject = ? and time <= ?"
        where = f"kind = ? and subject = ? and time = ({newest})"
        return next(iter([*self._events(where, (kind, subject, kind, subject, until), ())][::-1]), None)

    def _events(self, where: str, values: tuple[object, ...], kinds: tuple[str, ...]) -> Iterator[Told]:
        asked = f" and kind in ({','.join('?' * len(kinds))})" if kinds else ""
        words = f"select id, time, kind, subject, data from event where {where}{asked} order by id"
        for id, time, kind, subject, data in self._rows(words, (*values, *kinds)):
            try:
                found = json.loads(_harmless(data))
            except ValueError:
                continue  # a line of a file that somebody changed by hand
            if isinstance(found, dict):
                yield Told(id, time, clean(kind), clean(subject), found)

    def _rows(self, words: str, values: Iterable[object]) -> list[Any]:
        try:
            return self._db.execute(words, tuple(values)).fetchall()
        except sqlite3.Error as error:
            raise RecordError(f"{self.path} cannot be read: {error}.") from None

    def _one(self, words: str, *values: object) -> float | None:
        (found,) = self._rows(words, values)[0]
        return None if found is None else float(found)

    def _minutes(self, begin: float, end: float) -> list[_Minute]:
        words = "select id, times, step_s from minute where end >= ? and start <= ? order by start"
        rows = self._db.execute(words, (begin, end)).fetchall()
        return [_Minute(id, np.frombuffer(zlib.decompress(times)), step_s > 0) for id, times, step_s in rows]

    def _block(self, minute: _Minute, metric: str, part: int) -> tuple[Shorts, ...]:
        key = (minute.id, minute.thin, metric, part)
        if key not in self._blocks:
            words = "select data from block where minute = ? and metric = ? and part = ?"
            row = self._db.execute(words, (minute.id, metric, part)).fetchone()
            ticks = len(minute.times)
            if row is None:  # a metric that was not recorded
                blank = np.full((ticks, min(PART, len(self.gpus) - part * PART)), NOTHING, np.int16)
                self._blocks[key] = (blank,) * 3
            elif minute.thin:
                self._blocks[key] = packing.unpacked_thin(row[0], ticks)
            else:
                self._blocks[key] = (packing.unpacked(row[0], ticks),)
            while len(self._blocks) > KEPT:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(key)
        return self._blocks[key]


def _harmless(data: str) -> str:
    """JSON whose texts no terminal would act on: somebody else may have made the file."""
    if data.isprintable() and "\\u" not in data:
        return data
    return json.dumps(_cleaned(json.loads(data)))


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value, MOST_TEXT)
    if isinstance(value, dict):
        return {_cleaned(key): _cleaned(of) for key, of in value.items()}
    return [_cleaned(of) for of in value] if isinstance(value, list) else value


def read(path: Path, metrics: Iterable[str] = tuple(STEPS)) -> Series:
    """A whole recording, of the metrics asked for."""
    with Reader(path) as reader:
        return reader.window(reader.start, math.inf, metrics)
