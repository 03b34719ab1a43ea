"""Where a recording stands: the moment, all of its length with alarms and actions on it, and how fast it goes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.text import Text

from tui.widgets.pane import Pane

LEAST = 10
LINE, HERE, MARKS = "─", "█", {"alarm": "!", "action": "*"}
STYLES = {"alarm": "bold red", "action": "bold cyan"}


class TimeLine(Pane):
    """One line; wide enough for a line of time or without it."""

    def show(
        self,
        start: float,
        end: float,
        position: float,
        marks: Sequence[tuple[float, str]],
        playing: bool,
        speed: float,
    ) -> None:
        """The newest state."""
        self.fill(lambda width, _: text(start, end, position, marks, playing, speed, width or 80, self.plain))


def text(
    start: float,
    end: float,
    position: float,
    marks: Sequence[tuple[float, str]],
    playing: bool,
    speed: float,
    width: int,
    plain: bool = False,
) -> Text:
    """The line for a width; where several marks fall together an alarm goes before an action."""
    out = Text(no_wrap=True, overflow="ellipsis")
    out.append("PLAYS " if playing else "PAUSED", "bold green" if playing else "bold yellow")
    out.append(f" {speed:.0f}x ", "dim")
    out.append(time.strftime("%a %H:%M:%S", time.localtime(position)), "bold")
    length = f" {_span(position - start)}/{_span(end - start)}"
    room = width - len(out.plain) - len(length) - 1
    if room >= LEAST:
        out.append(" ")
        out.append_text(_line(start, end, position, marks, room, plain))
    out.append(length, "dim")
    return out


def _line(
    start: float, end: float, position: float, marks: Sequence[tuple[float, str]], room: int, plain: bool
) -> Text:
    def place(moment: float) -> int:
        return min(room - 1, max(0, int((moment - start) / max(end - start, 1e-9) * (room - 1) + 0.5)))

    found: dict[int, str] = {}
    for moment, kind in marks:
        if found.get(place(moment)) != "alarm":
            found[place(moment)] = kind
    here = place(position)
    signs = {at: MARKS[kind] for at, kind in found.items()}
    signs.setdefault(here, "#" if plain else HERE)
    out = Text("".join(signs.get(at, "-" if plain else LINE) for at in range(room)))
    out.stylize("dim", 0, here)  # in few pieces: each costs bytes on a slow line
    out.stylize("dim", here + 1)
    for at, kind in found.items():
        out.stylize(STYLES[kind], at, at + 1)
    out.stylize("reverse bold" if here in found else "bold", here, here + 1)
    return out


def _span(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
