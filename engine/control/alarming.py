"""The alarms of a running cluster: what stands, what an operator did about it, and the log that both are kept in."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from engine.act.alarm import Alarm, Event, Priority, Raised, Shelved, What
from engine.act.alarmlog import AlarmLog, AlarmLogError
from engine.act.annunciator import Annunciator
from engine.profile import Cluster

MOST_SHELVED_S = 12 * 3600.0
"""Nothing is kept off the list for longer than a shift."""


class Alarming:
    """`begin` once, then `look` at every snapshot."""

    def __init__(self, cluster: Cluster, log: AlarmLog, operator: str) -> None:
        self._log, self._operator = log, operator
        self.trouble = ""
        """Why the log cannot be written, while it cannot."""
        self.heard: Callable[[Event], object] = lambda _: None
        """Told of every event, whoever decided it."""
        self._state = Annunciator({n.name: n.rack for n in cluster.nodes})

    @property
    def standing(self) -> tuple[Alarm, ...]:
        """What an operator is shown, the most urgent first."""
        return self._state.alarms

    @property
    def shelved(self) -> tuple[Shelved, ...]:
        return self._state.shelved

    @property
    def seen(self) -> frozenset[str]:
        """Keys of what was amiss at the last look."""
        return self._state.seen

    def begin(self) -> None:
        """Go on from where the last console ended."""
        self._log.tidy()
        self._state.restore(self._log.read())

    def look(self, raised: Sequence[Raised], now: float) -> None:
        """Take what is amiss now, and what other consoles decided."""
        for event in self._log.read():
            if event.what.decided:
                self._state.decide(event)
                self.heard(event)
        if self.trouble:
            raised = [*raised, Raised("alarmlog", Priority.WARNING, self.trouble)]
        for event in self._state.take(raised, now):
            self._write(event)

    def acknowledge(self, keys: Collection[str], now: float | None = None) -> None:
        """Somebody has seen them."""
        for key in keys:
            self._decide(Event(now or time.time(), key, What.ACKNOWLEDGED, by=self._operator))

    def shelve(self, key: str, seconds: float, reason: str, now: float | None = None) -> str:
        """Keep one off the list for a time; returns why not, or an empty string."""
        now = now or time.time()
        if not reason.strip():
            return "Say why: the next shift will ask."
        if not 0 < seconds <= MOST_SHELVED_S:
            return f"An alarm is shelved for at most {MOST_SHELVED_S / 3600:.0f} h."
        known = next((a for a in self.standing if a.key == key), None)
        text, node = (known.text, known.node) if known else (key, "")
        self._decide(
            Event(now, key, What.SHELVED, Priority.NOTICE, text, node, self._operator, now + seconds, reason.strip())
        )
        return ""

    def unshelve(self, key: str) -> None:
        """Let it come back now, if it still stands."""
        self._decide(Event(time.time(), key, What.UNSHELVED, by=self._operator))

    def _decide(self, event: Event) -> None:
        self._state.decide(event)
        self._write(event)

    def _write(self, event: Event) -> None:
        self.heard(event)
        try:
            self._log.write(event)
            self.trouble = ""
        except AlarmLogError as error:
            self.trouble = f"{error}; what is acknowledged or shelved here is forgotten when this console ends"
