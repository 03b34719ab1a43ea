"""Words that the lists are limited to."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input

from tui.screens.panel import Panel


class FilterScreen(Panel[str | None]):
    """The words; empty shows all again, None leaves them as they were."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "leave")]

    def __init__(self, wanted: str, plain: bool) -> None:
        super().__init__(plain)
        self.words = Input(value=wanted, placeholder="mlx5, n03, slowed; nothing shows all", id="filter")

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield self.words

    def on_mount(self) -> None:
        self.words.focus()
        text = Text("Filter\n", "bold")
        text.append("Links and alarms that hold these words; enter sets it, escape leaves.", "dim")
        self.body.draw(text)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip())
