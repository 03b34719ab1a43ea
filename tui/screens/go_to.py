"""A node or a GPU by its name, or as much of it as is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input

from tui.screens.panel import Panel

SHOWN = 8


class GoToScreen(Panel[tuple[int, int] | None]):
    """The number of the node and the slot; None when nothing was chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(None)", "leave")]

    def __init__(self, names: Sequence[str], gpus: Sequence[int], plain: bool) -> None:
        super().__init__(plain)
        self._names, self._gpus = names, gpus
        self.wanted = Input(placeholder="n03 or n03:5", id="go-to")

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield self.wanted

    def on_mount(self) -> None:
        self.wanted.focus()
        self._draw("")

    def on_input_changed(self, event: Input.Changed) -> None:
        self._draw(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        found = matching(event.value, self._names)
        slot = event.value.partition(":")[2].strip()
        if found:
            number = found[0]
            self.dismiss((number, min(int(slot), self._gpus[number] - 1) if slot.isdecimal() else 0))

    def _draw(self, wanted: str) -> None:
        found = matching(wanted, self._names)
        text = Text("Go to\n", "bold")
        names = ", ".join(self._names[n] for n in found[:SHOWN])
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        text.append(f"{names}{more}" if found else "No node is called so.", "dim" if found else "yellow")
        self.body.draw(text)


def matching(wanted: str, names: Sequence[str]) -> list[int]:
    """Numbers of the nodes that are meant: the one of that name, else those that begin so, else those that hold it."""
    name = wanted.partition(":")[0].strip().lower()
    exact = [i for i, n in enumerate(names) if n.lower() == name]
    begins = [i for i, n in enumerate(names) if n.lower().startswith(name)]
    return exact or begins or [i for i, n in enumerate(names) if name in n.lower()]
