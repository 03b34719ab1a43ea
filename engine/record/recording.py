"""Writing a recording: a row a second, folded into blocks by the minute, thinned when old, dropped when too large."""

from __future__ import annotations

import json
import math
import sqlite3
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.record import packing
from engine.record.links import Links
from engine.record.schema import (
    BIN_S,
    FORMAT,
    LINKS,
    MINUTE_TICKS,
    PART,
    RATE_STEP,
    RATES_LEFT,
    STEPS,
    TABLES,
    Floats,
    RecordError,
)
from engine.telemetry.snapshot import Snapshot

THIN_AFTER_S = 3600.0
MOST_BYTES = 10_000_000_000
LOG_PAGES = 500
"""So long the log grows before its pages go to the file."""
WAITING = 20_000
"""Events that are kept in memory while the disk takes none; older ones are lost."""
_Statement = tuple[str, tuple[object, ...]]
_STEP = np.array(list(STEPS.values()))[:, None]


class Recorder:
    """Writes snapshots and events to a new file. Rows are laid out once: `gpus` as (node, slot). One thread at a time
    may use it. What is older than `thin_after_s` is kept as mean, least and largest of every ten seconds; of a file
    that would grow beyond `most_bytes` the oldest minutes are dropped."""

    def __init__(
        self,
        path: Path,
        cluster: str,
        gpus: Sequence[tuple[str, int]],
        inventory: str = "",
        thin_after_s: float = THIN_AFTER_S,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        if path.exists():
            raise RecordError(f"{path} exists; a recording is never written over. Choose another name.")
        self.path, self._gpus = path, tuple(gpus)
        self._rows = {gpu: row for row, gpu in enumerate(self._gpus)}
        self._thin_after_s, self._most_bytes = thin_after_s, most_bytes
        self._tick = self._seconds = 0
        self._waiting: deque[tuple[float, str, str, str]] = deque(maxlen=WAITING)
        self._matched_of: tuple[object, list[int], list[int]] | None = None
        self._links_of: tuple[object, object, npt.NDArray[np.int64]] | None = None
        self._links, self._thinned_until = Links(), -math.inf
        try:
            self._db = sqlite3.connect(path, check_same_thread=False)
            self._db.executescript("pragma journal_mode = wal; pragma synchronous = normal;" + TABLES)
            self._db.execute(f"pragma journal_size_limit = {8 << 20}")
            self._db.execute(f"pragma wal_autocheckpoint = {LOG_PAGES}")
            told = [("format", FORMAT), ("cluster", cluster), ("inventory", inventory)]
            self._db.executemany("insert into meta values (?, ?)", told)
            self._db.executemany("insert into gpu values (?, ?, ?)", [(r, n, s) for (n, s), r in self._rows.items()])
            self._db.commit()
        except sqlite3.Error as error:
            raise RecordError(f"{path} cannot be written: {error}.") from None

    def event(self, time: float, kind: str, subject: str, data: Mapping[str, Any]) -> None:
        """Something that happened; it is written with the next second, or by `flush`."""
        self._waiting.append((time, kind, subject, json.dumps(data)))

    def write(self, snapshot: Snapshot) -> None:
        """Add one tick, and the events since the last. RecordError when it did not reach the file; the next may
        again, and events wait for it."""
        ours, theirs = self._matched(snapshot)
        columns = np.full((len(STEPS), len(self._gpus)), np.nan)
        for at, name in enumerate(STEPS):
            columns[at, ours] = (self._linked(snapshot, name) if name in LINKS else snapshot.gpus[name])[theirs]
        carried = self._links.take(snapshot.links, snapshot.time)
        for kind, subject, data in carried.news:
            self.event(snapshot.time, kind, subject, data)
        self.write_columns(snapshot.time, columns, carried.rates, carried.start)

    def write_columns(
        self, time: float, columns: Floats, links: Floats | None = None, since: float | None = None
    ) -> None:
        """The same from values (metric, GPU) in the order of STEPS, and what `links` (2, link) carried `since` then."""
        data = packing.raw(packing.whole(columns, _STEP))
        written: list[_Statement] = [("insert into second values (?, ?, ?)", (self._tick + 1, time, data))]
        if links is not None and links.size:
            rates = packing.raw(packing.whole(links, RATE_STEP))
            written.append(("insert or replace into rate values (?, ?, ?)", (since, time, rates)))
        self._commit("a second", written)
        self._tick += 1
        self._seconds += 1
        if self._seconds >= MINUTE_TICKS:
            try:
                self._try("a minute", self._fold)
                self._try("old data", self._tidy, time)
            except RecordError:
                pass  # this second is kept; a disk without room refuses the next one, and folding is tried again

    def flush(self) -> None:
        """Write the events that wait."""
        if self._waiting:
            self._commit("an event", [])

    def _commit(self, what: str, statements: list[_Statement]) -> None:
        waiting = list(self._waiting)

        def all_of_it() -> None:
            for words, values in statements:
                self._db.execute(words, values)
            self._db.executemany("insert into event (time, kind, subject, data) values (?, ?, ?, ?)", waiting)

        self._try(what, all_of_it)
        for _ in waiting:
            self._waiting.popleft()

    def _try(self, what: str, work: Any, *values: Any) -> None:
        """In one transaction; once more from the beginning of the log when it finds no room."""
        for last in (False, True):
            try:
                with self._db:
                    work(*values)
                return
            except sqlite3.Error as error:
                if last:
                    raise RecordError(f"{self.path}: {what} could not be written: {error}.") from None
                with suppress(sqlite3.Error):
                    self._db.execute("pragma wal_checkpoint(restart)")

    def _matched(self, snapshot: Snapshot) -> tuple[list[int], list[int]]:
        """Rows here and in the snapshot; looked up again only when a node shows other rows."""
        layout = tuple(node.rows for node in snapshot.nodes)
        if self._matched_of is None or self._matched_of[0] != layout:
            ours, theirs = [], []
            for node in snapshot.nodes:
                for slot, row in enumerate(node.rows):
                    known = self._rows.get((node.name, slot))
                    if known is not None:
                        ours.append(known)
                        theirs.append(row)
            self._matched_of = (layout, ours, theirs)
        return self._matched_of[1], self._matched_of[2]

    def _linked(self, snapshot: Snapshot, name: str) -> Floats:
        """What goes over the links of each GPU to other GPUs; NaN where there are none."""
        links, gpus = snapshot.links, len(snapshot.gpus)
        known = self._links_of
        if known is None or known[0] is not links.node or known[1] is not snapshot.gpus.node:
            rows = {node.name: node.rows for node in snapshot.nodes}
            at = [
                rows[node].start + gpu if kind in ("nvlink", "xgmi") and 0 <= gpu < len(rows[node]) else -1
                for node, gpu, kind in zip(links.node, links.gpu, links.kind, strict=True)
            ]
            known = self._links_of = (links.node, snapshot.gpus.node, np.array(at, np.int64))
        rates = links[LINKS[name]]
        told = (known[2] >= 0) & ~np.isnan(rates)
        out: Floats = np.bincount(known[2][told], rates[told], minlength=gpus).astype(float)
        out[np.bincount(known[2][told], minlength=gpus) == 0] = np.nan
        return out

    # What happens once a minute.

    def _fold(self) -> None:
        """Turn the last minute's rows into a block for each metric and part."""
        rows = self._db.execute("select tick, time, data from second order by tick limit ?", (MINUTE_TICKS,)).fetchall()
        n = len(self._gpus)
        whole = np.stack([packing.unraw(data, (len(STEPS), n)) for _, _, data in rows])
        times = np.array([time for _, time, _ in rows])
        minute = self._minute(times, len(rows), 0.0)
        for at, name in enumerate(STEPS):
            for part in range(math.ceil(n / PART)):
                block = whole[:, at, part * PART : (part + 1) * PART]
                self._db.execute("insert into block values (?, ?, ?, ?)", (minute, name, part, packing.packed(block)))
        self._db.execute("delete from second where tick <= ?", (rows[-1][0],))
        (self._seconds,) = self._db.execute("select count(*) from second").fetchone()

    def _minute(self, times: Floats, ticks: int, step_s: float, known: int | None = None) -> int:
        row = (known, float(times[0]), float(times[-1]), ticks, step_s, zlib.compress(times.tobytes()))
        added = self._db.execute("insert or replace into minute values (?, ?, ?, ?, ?, ?)", row)
        return int(added.lastrowid or 0)

    def _tidy(self, now: float) -> None:
        """Thin what is old; drop the oldest of a file that is too large."""
        old = "select id, ticks, times from minute where step_s = 0 and end < ? order by end limit 2"
        for minute, ticks, times in self._db.execute(old, (now - self._thin_after_s,)).fetchall():
            self._thin(minute, ticks, np.frombuffer(zlib.decompress(times)))
        self._thin_rates(now - self._thin_after_s)
        while self._bytes() > self._most_bytes:
            oldest = self._db.execute("select id, end from minute order by end limit 2").fetchall()
            if len(oldest) < 2:
                return
            minute, end = oldest[0]
            self._db.execute("delete from block where minute = ?", (minute,))
            self._db.execute("delete from minute where id = ?", (minute,))
            self._db.execute("delete from event where kind = 'step' and time <= ?", (end,))
            self._db.execute("delete from rate where start <= ?", (end,))

    def _thin(self, minute: int, ticks: int, times: Floats) -> None:
        bins = np.floor(times / BIN_S).astype(np.int64)
        bins = np.cumsum(np.diff(bins, prepend=bins[0]) != 0)
        starts = np.flatnonzero(np.diff(bins, prepend=-1))
        if 3 * len(starts) >= ticks:  # read so seldom that three numbers a bin would be more
            self._db.execute("update minute set step_s = -1 where id = ?", (minute,))
            return
        blocks = self._db.execute("select metric, part, data from block where minute = ?", (minute,)).fetchall()
        for metric, part, data in blocks:
            thin = packing.packed_thin(packing.thinned(packing.unpacked(data, ticks), bins))
            self._db.execute(
                "update block set data = ? where minute = ? and metric = ? and part = ?", (thin, minute, metric, part)
            )
        self._minute(times[starts], len(starts), BIN_S, minute)

    def _thin_rates(self, until: float) -> None:
        """Of the rows of whole minutes that began by then, and were not looked at before, leave the first of each."""
        apart = RATES_LEFT * BIN_S
        until -= until % apart
        kept: dict[float, float] = {}
        words = "select start from rate where start >= ? and start < ? order by start"
        for (start,) in self._db.execute(words, (self._thinned_until, until)).fetchall():
            if kept.setdefault(start // apart, start) != start:
                self._db.execute("delete from rate where start = ?", (start,))
        self._thinned_until = max(until, self._thinned_until)

    def _bytes(self) -> int:
        pages, free, size = (
            self._db.execute(f"pragma {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def close(self) -> None:
        """Fold what is left and close the file; it is then one file, without a log beside it."""
        try:
            self.flush()
            while self._seconds:
                self._try("a minute", self._fold)
        finally:
            with suppress(sqlite3.Error):  # somebody reads it: it stays as it is, and is whole
                self._db.execute("pragma journal_mode = delete")
            self._db.close()
