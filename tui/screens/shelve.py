"""Asked before an alarm is kept off the list: for how long, and why."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input

from engine.act.alarm import Alarm
from tui.screens.panel import Panel
from tui.widgets.figures import age

TIMES_S = (900.0, 3600.0, 4 * 3600.0, 12 * 3600.0)


class ShelvePanel(Panel[tuple[float, str] | None]):
    """Up and down choose the time, the reason is typed, enter shelves, escape leaves."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "time(-1)", "less", priority=True),
        Binding("down", "time(1)", "more", priority=True),
        Binding("escape", "dismiss(None)", "leave"),
    ]

    def __init__(self, alarm: Alarm, plain: bool) -> None:
        super().__init__(plain)
        self._alarm, self._at, self._missing = alarm, 1, False
        self.reason = Input(placeholder="why; enter shelves it", id="reason")

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield self.reason

    def on_mount(self) -> None:
        self.reason.focus()
        self._draw()

    def _draw(self) -> None:
        text = Text("Shelve: keep it off the list for a time\n\n", "bold")
        text.append(f"{self._alarm.text}\n\n")
        text.append("time  ", "dim")
        for at, seconds in enumerate(TIMES_S):
            text.append(f" {age(seconds)} ", "reverse bold" if at == self._at else "")
        text.append("  up and down choose\n\n", "dim")
        text.append(
            "Say why: the next shift will ask." if self._missing else "It comes back by itself.",
            "yellow" if self._missing else "dim",
        )
        self.body.draw(text)

    def action_time(self, by: int) -> None:
        self._at = max(0, min(len(TIMES_S) - 1, self._at + by))
        self._draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        reason = event.value.strip()
        if reason:
            self.dismiss((TIMES_S[self._at], reason))
        else:
            self._missing = True
            self._draw()
