"""Alarms as values: what is amiss, how urgent it is, and how far an operator has dealt with it (ISA-18.2, 5.2.3)."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Priority(enum.IntEnum):
    """Lower is more urgent."""

    CRITICAL = 1
    WARNING = 2
    NOTICE = 3


class State(enum.Enum):
    """Where an alarm stands. RETURNED: gone by itself, and nobody has seen it yet."""

    NEW = "new"
    ACKNOWLEDGED = "acknowledged"
    RETURNED = "returned"


@dataclass(frozen=True, slots=True)
class Raised:
    """What is amiss now, before it is known since when. `key` stays the same while it lasts, its first word says of
    what kind it is; `row` is the GPU's row in the snapshot or -1."""

    key: str
    priority: Priority
    text: str
    node: str = ""
    row: int = -1

    @property
    def kind(self) -> str:
        return self.key.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Alarm:
    """What an operator is shown; `by` acknowledged it."""

    key: str
    priority: Priority
    text: str
    since: float
    node: str = ""
    row: int = -1
    state: State = State.NEW
    by: str = ""

    @property
    def stands(self) -> bool:
        """Whether what it tells is still so."""
        return self.state is not State.RETURNED

    @property
    def urgency(self) -> tuple[bool, int, bool, float, str]:
        """What sorts alarms: those that nobody has seen first, then the most urgent, then the oldest."""
        return (self.state is State.ACKNOWLEDGED, self.priority, not self.stands, self.since, self.key)


@dataclass(frozen=True, slots=True)
class Shelved:
    """An alarm that an operator keeps off the list until `until`, and why."""

    key: str
    text: str
    until: float
    by: str
    reason: str


class What(enum.Enum):
    """What became of an alarm."""

    RAISED = "raised"
    RETURNED = "returned"
    ACKNOWLEDGED = "acknowledged"
    SHELVED = "shelved"
    UNSHELVED = "unshelved"

    @property
    def decided(self) -> bool:
        """Whether an operator did it."""
        return self not in (What.RAISED, What.RETURNED)


@dataclass(frozen=True, slots=True)
class Event:
    """A line of an alarm's story. `by`, `until` and `reason` are an operator's."""

    time: float
    key: str
    what: What
    priority: Priority = Priority.NOTICE
    text: str = ""
    node: str = ""
    by: str = ""
    until: float = 0.0
    reason: str = ""
