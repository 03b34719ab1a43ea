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

    DEFAULT_CSS = """
    Panel {
        align: center middle;
        #panel { width: 92; max-width: 100%; height: auto; max-height: 100%; border: round $accent; padding: 0 1; }
        #panel { background: $surface; }
        Input { width: 92; max-width: 100%; }
    }
    Panel.-short #panel { border: none; }
    """

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.body = Pane(id="panel-body", plain=plain)

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="panel"):
            yield self.body
