"""Asked before leaving while this console holds limits down."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.binding import BindingType

from tui.screens.panel import Panel


class LeaveScreen(Panel[bool]):
    """True: leave."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("y,enter", "dismiss(True)", "leave"),
        ("escape,n,q", "dismiss(False)", "stay"),
    ]

    def __init__(self, held: int, plain: bool) -> None:
        super().__init__(plain)
        self._held = held

    def on_mount(self) -> None:
        gpus = f"{self._held} GPU{'s' * (self._held != 1)}"
        text = Text(f"This console holds down the power limit of {gpus}.\n", "bold")
        text.append("Leaving gives them back the limits they had before, at once.\n\ny leaves, escape stays")
        self.body.draw(text)
