"""The table of plans: only the lines that are seen are written."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.events import Click
from textual.message import Message

from tui.board import COLUMNS, Board, Column
from tui.widgets.pane import Pane
from tui.widgets.scatter import ASCII, UNICODE

LEAST, MOST = 20, 48
"""Characters of a plan's name: the fewest, at which figures are left out, and the most."""
MARKS, EDGE, HEADS = 3, 1, 1


class Ranking(Pane, can_focus=True):
    """Arrows and the like move the cursor of `board`; a click on a heading sorts by it, on a plan goes there."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("home", "move(-99999)", "first", show=False),
        Binding("end", "move(99999)", "last", show=False),
    ]

    class Changed(Message):
        """The cursor or the order is another."""

    def __init__(self, board: Board, id: str, plain: bool = False) -> None:
        super().__init__(id, plain)
        self._board, self._top = board, 0
        self.said = ""

    def show(self, said: str = "") -> None:
        """Draw the board; `said` stands where there is no plan to show."""
        self.said = said
        self.fill(self._text)

    def action_move(self, by: int) -> None:
        self._board.move(by)
        self.post_message(self.Changed())

    def action_page(self, by: int) -> None:
        self.action_move(by * max(1, self.size.height - HEADS - 1))

    def on_click(self, event: Click) -> None:
        if event.y < HEADS:
            edge = _name_width(self.size.width) + MARKS
            for number, column in enumerate(_fitting(self.size.width)):
                edge += column.width
                if event.x < edge:
                    self._board.sort_by(number)
                    break
        else:
            self._board.move(self._top + event.y - HEADS - self._board.at)
        self.post_message(self.Changed())

    def on_mouse_scroll_down(self) -> None:
        self.action_move(3)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-3)

    def _text(self, width: int, height: int) -> Text:
        text, board = Text(no_wrap=True), self._board
        if not board.shown:
            return Text(self.said, "yellow")
        width, room = width or 80, max(1, (height or 10) - HEADS)
        columns, name, at = _fitting(width), _name_width(width), board.at
        arrows = ("v", "^") if self.plain else ("↓", "↑")
        front = (ASCII if self.plain else UNICODE)["front"]
        self._top = max(0, min(max(self._top, at - room + 1), at, len(board.shown) - room))
        text.append(f"   {'plan':<{name}.{name}}", "dim")
        for number, column in enumerate(columns):
            sign = arrows[board.reverse] if number == board.sort else ""
            text.append(f"{sign + column.head:>{column.width}}", "bold" if sign else "dim")
        text.append("\n")
        for row in board.shown[self._top : self._top + room]:
            chosen = row is board.cursor
            style = "reverse" if chosen else "bold" if row.front else ""
            text.append(f"{board.letter(row):1}", "bold cyan")
            text.append(f"{front} " if row.front else "  ", "yellow")
            label = Text(f"{row.label:<{name}}", style)
            label.truncate(name, overflow="ellipsis")
            text.append_text(label)
            values = "".join(f"{c.text(row):>{c.width}}" for c in columns)
            text.append(f"{values}\n", f"red {style}" if row.metrics["headroom_gib"] < 0 else style)
        return text


def _name_width(width: int) -> int:
    """Labels take what the figures leave, within reason."""
    return max(1, min(MOST, width - sum(c.width for c in _fitting(width)) - MARKS - EDGE))


def _fitting(width: int) -> tuple[Column, ...]:
    """The columns that there is room for beside a label that can be read."""
    out, left = [], width - MARKS - EDGE - LEAST
    for column in COLUMNS:
        left -= column.width
        if left < 0:
            break
        out.append(column)
    return tuple(out)
