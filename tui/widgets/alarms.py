"""The alarms, one a line, with a cursor: the one under it is told in full. Below them this session's actions."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.containers import VerticalScroll
from textual.geometry import Region

from engine.act.action import Ticket
from engine.act.alarm import Alarm, Shelved, State
from tui.widgets.figures import age, clock
from tui.widgets.lines import ALARM_STYLE, STAGE_STYLE
from tui.widgets.listing import Listing

MARK = {State.NEW: "*", State.ACKNOWLEDGED: " ", State.RETURNED: "~"}
"""By shape, too: what nobody has seen, and what went before anybody did."""

TOLD = 4
"""Lines that the chosen one takes at most on a usual screen."""


class Alarms(Listing):
    """Up and down move the cursor; the keys that act on what is under it are the console's own."""

    def __init__(self, id: str, plain: bool = False) -> None:
        super().__init__(id, plain)
        self._alarms: tuple[Alarm, ...] = ()
        self._shelved: tuple[Shelved, ...] = ()
        self._tickets: tuple[Ticket, ...] = ()
        self._now, self._wanted = 0.0, ""
        self._key = ""

    def show(
        self,
        alarms: Sequence[Alarm],
        shelved: Sequence[Shelved],
        tickets: Sequence[Ticket],
        now: float,
        wanted: str = "",
    ) -> None:
        """The newest state of all three; `wanted` limits the alarms to those that hold these words."""
        self._alarms = tuple(a for a in alarms if wanted.lower() in a.text.lower())
        self._shelved = tuple(s for s in shelved if wanted.lower() in s.text.lower())
        self._tickets, self._now, self._wanted = tuple(tickets), now, wanted
        self.fill(lambda w, _: self._text(max(20, w or 60)))

    @property
    def shown(self) -> list[str]:
        """Keys of the alarms that are listed."""
        return [a.key for a in self._alarms]

    @property
    def chosen(self) -> Alarm | Shelved | None:
        """What the cursor stands on: it stays with its alarm while others come and go."""
        return next((a for a in self._all if a.key == self._key), next(iter(self._all), None))

    @property
    def _all(self) -> tuple[Alarm | Shelved, ...]:
        return (*self._alarms, *self._shelved)

    def action_move(self, by: int) -> None:
        every, chosen = self._all, self.chosen
        if chosen is not None:
            self._key = every[max(0, min(len(every) - 1, every.index(chosen) + by))].key
            self.refill()
            line = 1 + self._all.index(self.chosen or every[0]) + (2 if isinstance(self.chosen, Shelved) else 0)
            if isinstance(self.parent, VerticalScroll):
                self.parent.scroll_to_region(Region(0, line, 1, TOLD), animate=False)

    def _text(self, width: int) -> Text:
        text, chosen = Text(), self.chosen if self.has_focus else None
        text.append("Alarms", "bold")
        text.append(f"  /{self._wanted}" if self._wanted else "", "bold cyan")
        text.append("  space seen, * all, z shelve, enter go" if self._all and self.has_focus else "", "dim")
        text.append("\n")
        for alarm in self._alarms:
            style = "dim" if alarm.state is State.ACKNOWLEDGED else ALARM_STYLE[alarm.priority]
            head = f"{MARK[alarm.state]}{age(max(0.0, self._now - alarm.since)):>6} {alarm.priority.name:<8} "
            self._line(text, head, alarm.text, _story(alarm, self._now), style, alarm is chosen, width)
        if not self._alarms:
            text.append("None.\n", "dim")
        if self._shelved:
            text.append("\nShelved\n", "bold")
        for shelf in self._shelved:
            head = f" {age(max(0.0, shelf.until - self._now)):>6} left     "
            self._line(text, head, shelf.text, f"{shelf.by}: {shelf.reason}", "dim", shelf is chosen, width)
        text.append("\nActions\n", "bold")
        for ticket in reversed(self._tickets):
            text.append(f"{clock(ticket.time)}  ", "dim")
            text.append(f"{ticket.line}\n", STAGE_STYLE[ticket.stage])
        if not self._tickets:
            text.append("None in this session. Arm with a, then t, m or r; u undoes the last one.\n", "dim")
        return text

    @staticmethod
    def _line(text: Text, head: str, words: str, story: str, style: str, chosen: bool, width: int) -> None:
        if chosen:
            text.append(head, f"{style} reverse")
            text.append(f" {words}\n", style)
            text.append(f"{'':>{len(head)}} {story}\n", "dim")
        else:
            line = Text(f"{head} {words}", style)
            line.truncate(width, overflow="ellipsis")
            text.append_text(line)
            text.append("\n")


def _story(alarm: Alarm, now: float) -> str:
    """Since when it is what it is, and who has seen it."""
    since = f"since {clock(alarm.since)}"
    if alarm.state is State.ACKNOWLEDGED:
        return f"{since}; seen by {alarm.by}"
    return f"{since}, gone again; nobody has said that it was seen" if not alarm.stands else f"{since}; new"
