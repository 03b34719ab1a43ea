"""The audit log: one JSON line a change of an action, appended and on the disk before anything else happens."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from engine.act.action import Outlook, Ticket, kind_of

LONG = 1 << 20
"""Bytes of an old log's end that are read."""


class AuditError(Exception):
    """The log cannot be written; nothing may be done that would not be logged."""


def default_path() -> Path:
    """$XDG_STATE_HOME/rackside/audit.jsonl, or the same under ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "rackside" / "audit.jsonl"


class Audit:
    """Append-only, fsynced, readable by its owner alone."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, cluster: str, ticket: Ticket) -> None:
        """Append the ticket as it stands, and `at` when; AuditError when it did not reach the disk."""
        line = json.dumps({**record(cluster, ticket), "at": time.time()}, ensure_ascii=True) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                with suppress(OSError):  # some file systems have no locks
                    fcntl.flock(handle, fcntl.LOCK_EX)  # another console may be in the middle of its line
                data = _whole_lines_before(handle) + line.encode()
                while data:
                    data = data[os.write(handle, data) :]
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            raise AuditError(f"the audit log {self.path} cannot be written: {error.strerror}") from None

    def read(self) -> Iterator[dict[str, Any]]:
        """Every whole line, oldest first; a line cut short by a crash is skipped."""
        try:
            with self.path.open(encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    try:
                        entry = json.loads(line)
                    except ValueError:
                        continue
                    if isinstance(entry, dict):
                        yield entry
        except FileNotFoundError:
            return


class Tail:
    """The newest `most` entries of a log that others append to as well. Each line is read once; of a log that is long
    already, only its end."""

    def __init__(self, path: Path, most: int = 500) -> None:
        self.path = path
        self._entries: deque[dict[str, Any]] = deque(maxlen=most)
        self._file, self._read = 0, 0

    def look(self) -> tuple[dict[str, Any], ...]:
        """What is known by now, oldest first; nothing where the log cannot be read."""
        try:
            with self.path.open("rb") as log:
                of = os.fstat(log.fileno())
                if of.st_ino != self._file or of.st_size < self._read:  # another file by this name
                    self._entries.clear()
                    self._file, self._read = of.st_ino, max(0, of.st_size - LONG)
                log.seek(self._read)
                whole, _, rest = log.read().rpartition(b"\n")
                self._read = log.tell() - len(rest)
        except OSError:
            return tuple(self._entries)
        for line in whole.splitlines():
            with suppress(ValueError):  # cut short by a crash, or by where the reading began
                entry = json.loads(line)
                if isinstance(entry, dict):
                    self._entries.append(entry)
        return tuple(self._entries)


def _whole_lines_before(handle: int) -> bytes:
    """A line that a full disk cut short is closed first, so that it takes no later one with it."""
    size = os.fstat(handle).st_size
    return b"\n" if size and os.pread(handle, 1, size - 1) != b"\n" else b""


def record(cluster: str, ticket: Ticket) -> dict[str, Any]:
    """What is logged of a ticket: who, when, where, what, predicted, how far, why."""
    proposal = ticket.proposal
    return {
        "id": ticket.id,
        "time": ticket.time,
        "operator": ticket.operator,
        "cluster": cluster,
        "action": kind_of(proposal.action),
        "title": proposal.title,
        "asked": asdict(proposal.action),
        "predicted": {"before": _outlook(proposal.before), "after": _outlook(proposal.after)},
        "measured": None if ticket.measured is None else _outlook(ticket.measured),
        "stage": ticket.stage.value,
        "step": ticket.step,
        "reason": ticket.reason,
        "undoes": proposal.undoes,
        "steal": ticket.steal,
        "puts_back": None if ticket.before is None else {"action": kind_of(ticket.before), **asdict(ticket.before)},
    }


def _outlook(found: Outlook) -> dict[str, Any]:
    """Without the power of each GPU: a log line stays a line."""
    return {name: value for name, value in asdict(replace(found, gpu_w=None)).items() if name != "gpu_w"}
