"""What control tells its one listener. Values; the newest state is always on the Control itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.act.action import Ticket
from engine.act.alarm import Raised
from engine.job.status import JobStatus
from engine.telemetry.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Published:
    """A new snapshot, with the alarms that it raises."""

    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class JobChanged:
    """A job appeared, stepped, changed its settings or went."""

    job: JobStatus


@dataclass(frozen=True, slots=True)
class TicketChanged:
    """A confirmed action went on."""

    ticket: Ticket


Event = Published | JobChanged | TicketChanged


class Tap(Protocol):
    """Somebody else who hears all that control tells, such as a recording."""

    def heard(self, event: Event) -> None: ...

    def amiss(self) -> list[Raised]:
        """What there is to alarm about in the tap itself."""

    def close(self) -> None:
        """The control ends."""
