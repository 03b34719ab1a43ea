"""What the modal screens share: one pane of text in a frame, scrolled where the terminal is small."""

from __future__ import annotations

from typing import TypeVar

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.screen import ModalScreen

from tui.widgets.pane import Pane

Result = TypeVar("Result")


class Panel(ModalScreen[Result]):
    """`body` is there from the start: keys and snapshots reach a screen before it is mounted."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.body = Pane(id="panel-body", plain=plain)
        self.body.wraps = True

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="panel"):
            yield self.body
