"""The story of the alarms on disk: it outlives a console, and the consoles of one user share it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from engine.act.alarm import Event, What

LARGE = 4 << 20
"""Bytes from which a log is set aside (as NAME.old) and begun anew with what still matters of it."""


KEYS = 4096
"""Alarms whose last word is remembered."""


class AlarmLogError(Exception):
    """The log cannot be written."""


class AlarmLog:
    """One file for all clusters of this user; this one reads and writes the events of `cluster`."""

    def __init__(self, path: Path, cluster: str) -> None:
        self.path, self.cluster = path, cluster
        self._file, self._offset = 0, 0
        self._last: dict[str, What] = {}

    def read(self) -> list[Event]:
        """What was written since the last read, by whomever; whole lines only, and what cannot be read is left out."""
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._file or status.st_size < self._offset:
                    self._file, self._offset = status.st_ino, 0
                if status.st_size == self._offset:
                    return []
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data.rfind(b"\n") + 1
        self._offset += whole
        events = [e for line in data[:whole].splitlines() if (e := self._event(line)) is not None]
        for event in events:
            self._remember(event)
        return events

    def _remember(self, event: Event) -> None:
        self._last.pop(event.key, None)  # the order is that of the last ones
        self._last[event.key] = event.what
        if len(self._last) > KEYS:
            del self._last[next(iter(self._last))]

    def _event(self, line: bytes) -> Event | None:
        try:
            found = msgspec.json.decode(line)
            return msgspec.convert(found, Event) if found["cluster"] == self.cluster else None
        except (msgspec.MsgspecError, TypeError, KeyError):
            return None

    def write(self, event: Event) -> None:
        """Append; what an operator decided is on the disk before this returns. What another console told already is
        not told twice. AlarmLogError when it cannot be written."""
        if not event.what.decided and self._last.get(event.key) is event.what:
            return
        line = msgspec.json.encode({"cluster": self.cluster, **msgspec.to_builtins(event)}) + b"\n"
        try:
            with self._appending() as (handle, size):
                cut = size and os.pread(handle, 1, size - 1) != b"\n"
                written = os.write(handle, b"\n" + line if cut else line)
                if size == self._offset and not cut:
                    self._file, self._offset = os.fstat(handle).st_ino, size + written
                if event.what.decided:
                    os.fsync(handle)
        except OSError as error:
            raise AlarmLogError(f"the alarm log {self.path} cannot be written: {error.strerror}") from None
        self._remember(event)

    @contextmanager
    def _appending(self) -> Iterator[tuple[int, int]]:
        """The log open and locked, and its size; not one that was set aside while we waited for the lock."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        while True:
            handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                with suppress(OSError):  # some file systems have no locks
                    fcntl.flock(handle, fcntl.LOCK_EX)
                found = os.fstat(handle)
                if os.stat(self.path).st_ino == found.st_ino:
                    yield handle, found.st_size
                    return
            finally:
                os.close(handle)

    def tidy(self) -> None:
        """Set a large log aside: of each alarm the last event of each kind goes on."""
        with suppress(OSError, AlarmLogError):
            if self.path.stat().st_size < LARGE:
                return
            with self._appending() as (handle, size):
                last: dict[tuple[Any, ...], bytes] = {}
                for line in os.pread(handle, size, 0).splitlines():
                    with suppress(msgspec.MsgspecError, TypeError, KeyError):
                        found = msgspec.json.decode(line)
                        key = (found["cluster"], found["key"], found["what"])
                        last.pop(key, None)  # the order is that of the last ones
                        last[key] = line
                fresh = self.path.with_suffix(".new")
                fresh.touch(0o600)
                fresh.write_bytes(b"".join(line + b"\n" for line in last.values()))
                aside = self.path.with_suffix(".old")
                aside.unlink(missing_ok=True)
                os.link(self.path, aside)
                fresh.replace(self.path)
