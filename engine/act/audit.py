"""The audit log: one JSON line a change of an action, appended and on the disk before anything else happens."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from engine.act.action import Outlook, Ticket, kind_of


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
        """Append the ticket as it stands; AuditError when it did not reach the disk."""
        line = json.dumps(record(cluster, ticket), ensure_ascii=True) + "\n"
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
