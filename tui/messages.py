"""What the bridge tells the app."""

from __future__ import annotations

from textual.message import Message

from engine.act.action import Ticket
from engine.job.status import JobStatus
from engine.telemetry.snapshot import Snapshot


class SnapshotArrived(Message):
    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.snapshot = snapshot


class JobArrived(Message):
    def __init__(self, job: JobStatus) -> None:
        super().__init__()
        self.job = job


class TicketArrived(Message):
    def __init__(self, ticket: Ticket) -> None:
        super().__init__()
        self.ticket = ticket
