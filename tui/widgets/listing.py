"""A pane with a cursor: up and down move it, escape leaves it."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType

from tui.widgets.pane import Pane

PAGE, ALL = 10, 9999


class Listing(Pane, can_focus=True):
    """What derives from it has the `action_move`, and fills itself with a text that shows the cursor while it has the
    focus."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", f"move(-{PAGE})", "page up", show=False),
        Binding("pagedown", f"move({PAGE})", "page down", show=False),
        Binding("home", f"move(-{ALL})", "first", show=False),
        Binding("end", f"move({ALL})", "last", show=False),
        Binding("escape", "app.pane_gpu", "back", show=False),
    ]

    def on_focus(self) -> None:
        self.refill()

    def on_blur(self) -> None:
        self.refill()
