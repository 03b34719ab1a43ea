"""The alarms' states: what is new, acknowledged, gone unseen, or shelved (ISA-18.2, section 5 and 11)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from engine.act.alarm import Alarm, Event, Priority, Raised, Shelved, State, What
from engine.act.group import grouped

DELAY_S = {"heat": (2.0, 5.0), "slow": (2.0, 10.0), "link": (2.0, 5.0), "links": (10.0, 10.0)}
"""Seconds that a kind must last before it is raised, and must be gone before it has returned; the others neither."""
RESTORED_S = 30.0
"""What stood when the last console ended is held so long: the nodes must be heard first."""


class Annunciator:
    """State of all alarms of one cluster, pure of clocks and I/O: fed what is amiss at each look and told what
    operators decided. `rack_of` names the rack of each node."""

    def __init__(self, rack_of: Mapping[str, str]) -> None:
        self._rack_of = rack_of
        self._alarms: dict[str, Alarm] = {}
        self._shelf: dict[str, Shelved] = {}
        self._begun: dict[str, float] = {}
        self._lasting: dict[str, tuple[float, Raised]] = {}
        self._held_until: float | None = None
        self.seen: frozenset[str] = frozenset()
        """Keys of what was amiss at the last look."""

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """What an operator is shown, the most urgent first."""
        return tuple(sorted(self._alarms.values(), key=lambda a: a.urgency))

    @property
    def shelved(self) -> tuple[Shelved, ...]:
        """What is kept off the list, the next to come back first."""
        return tuple(sorted(self._shelf.values(), key=lambda s: (s.until, s.key)))

    def take(self, raised: Sequence[Raised], now: float) -> list[Event]:
        """One look; what became of the alarms by itself."""
        if self._held_until is None:
            self._held_until = now + RESTORED_S if self._alarms else now
        self.seen = frozenset(r.key for r in raised)
        self._shelf = {key: s for key, s in self._shelf.items() if s.until > now}
        lasting = [r for r in self._last(raised, now) if r.key not in self._shelf]
        groups = grouped(lasting, self._rack_of, self._alarms.keys() | self._shelf.keys())
        shown = {r.key: r for r in groups if r.key not in self._shelf}
        events = [e for r in shown.values() for e in self._raise(r, now)]
        within = {r.key for r in lasting} - shown.keys()
        for alarm in [a for a in self._alarms.values() if a.key not in shown and a.stands]:
            if now >= self._held_until or alarm.key in within:
                self._return(alarm, quietly=alarm.key in within)
                events.append(Event(now, alarm.key, What.RETURNED, alarm.priority, alarm.text, alarm.node))
        return events

    def _last(self, raised: Sequence[Raised], now: float) -> list[Raised]:
        """What has been amiss for long enough, and what has not been well for long enough."""
        for r in raised:
            self._begun.setdefault(r.key, now)
            if now - self._begun[r.key] >= DELAY_S.get(r.kind, (0.0, 0.0))[0]:
                self._lasting[r.key] = (now, r)
        gone = [
            k for k, (at, r) in self._lasting.items() if at < now and now - at >= DELAY_S.get(r.kind, (0.0, 0.0))[1]
        ]
        for key in gone:
            del self._lasting[key]
        self._begun = {k: at for k, at in self._begun.items() if k in self.seen or k in self._lasting}
        return [r for _, r in self._lasting.values()]

    def _raise(self, r: Raised, now: float) -> list[Event]:
        known = self._alarms.get(r.key)
        again = known is None or not known.stands or (known.state is State.ACKNOWLEDGED and r.priority < known.priority)
        if known is None or not known.stands:
            known = Alarm(r.key, r.priority, r.text, now)
        self._alarms[r.key] = replace(
            known,
            priority=r.priority,
            text=r.text,
            node=r.node,
            row=r.row,
            state=State.NEW if again else known.state,
            by="" if again else known.by,
        )
        return [Event(now, r.key, What.RAISED, r.priority, r.text, r.node)] if again else []

    def _return(self, alarm: Alarm, quietly: bool = False) -> None:
        """A critical one that nobody has seen stays to be seen; `quietly`: it lives on in a group."""
        if alarm.state is State.NEW and alarm.priority is Priority.CRITICAL and not quietly:
            self._alarms[alarm.key] = replace(alarm, state=State.RETURNED)
        else:
            del self._alarms[alarm.key]

    def decide(self, event: Event) -> None:
        """An operator's decision, taken here or in another console. An older alarm's does not reach a newer one."""
        alarm = self._alarms.get(event.key)
        if event.what is What.ACKNOWLEDGED and alarm is not None and event.time >= alarm.since:
            if alarm.stands:
                self._alarms[event.key] = replace(alarm, state=State.ACKNOWLEDGED, by=event.by)
            else:
                del self._alarms[event.key]
        elif event.what is What.SHELVED:
            self._alarms.pop(event.key, None)
            self._shelf[event.key] = Shelved(event.key, event.text, event.until, event.by, event.reason)
        elif event.what is What.UNSHELVED:
            self._shelf.pop(event.key, None)

    def restore(self, events: Iterable[Event]) -> None:
        """The story so far, before the first look: ages, acknowledgements, what returned unseen, the shelf."""
        for event in events:
            alarm = self._alarms.get(event.key)
            if event.what is What.RAISED:
                self._alarms[event.key] = Alarm(event.key, event.priority, event.text, event.time, event.node)
            elif event.what is What.RETURNED:
                if alarm is not None and alarm.stands:
                    self._return(alarm)
            else:
                self.decide(event)
