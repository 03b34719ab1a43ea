"""Asked before leaving while this console holds limits down."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen

from tui.widgets.pane import Pane


class LeaveScreen(ModalScreen[bool]):
    """True: leave."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("y,enter", "dismiss(True)", "leave"),
        ("escape,n,q", "dismiss(False)", "stay"),
    ]

    def __init__(self, held: int) -> None:
        super().__init__()
        self._held = held

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="panel"):
            yield Pane(id="panel-body")

    def on_mount(self) -> None:
        gpus = f"{self._held} GPU{'s' * (self._held != 1)}"
        text = Text(f"This console holds down the power limit of {gpus}.\n", "bold")
        text.append("Leaving gives them back the limits they had before, at once.\n\ny leaves, escape stays")
        self.query_one("#panel-body", Pane).draw(text)
