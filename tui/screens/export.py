"""The panel that writes a plan to a file in a framework's words."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input

from engine.plan.export import FORMATS
from engine.profile import Plan, ProfileError
from tui.output import write
from tui.screens.panel import Panel

ENDINGS = {"yaml": "yaml", "megatron": "args", "nemo": "yaml", "torchtitan": "toml", "deepspeed": "json"}


class ExportPanel(Panel[str | None]):
    """Up and down choose the form, the file's name is typed, enter writes, escape leaves. Gives back what was done."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "form(-1)", "form", priority=True),
        Binding("down", "form(1)", "form", priority=True),
        Binding("escape", "dismiss(None)", "leave"),
    ]

    def __init__(self, label: str, plan: Plan, plain: bool) -> None:
        super().__init__(plain)
        self._label, self._plan, self._at, self._wrong = label, plan, 0, ""
        self._forms = tuple(FORMATS)
        self.file = Input(value=self._suggested, placeholder="a file's name", id="file")

    @property
    def _suggested(self) -> str:
        form = self._forms[self._at]
        words = "".join(c if c.isalnum() else "-" for c in self._label.lower()).strip("-")
        return f"{words}{'' if form == 'yaml' else '-' + form}.{ENDINGS.get(form, 'txt')}"

    def compose(self) -> ComposeResult:
        yield from super().compose()
        yield self.file

    def on_mount(self) -> None:
        self.file.focus()
        self._draw()

    def _draw(self) -> None:
        text = Text()
        text.append("Export a plan to a file\n", "bold")
        text.append(f"{self._label}\n\n")
        text.append("form  ", "dim")
        for at, form in enumerate(self._forms):
            text.append(f" {form} ", "reverse bold" if at == self._at else "")
        text.append("  up and down choose\n", "dim")
        lost = FORMATS[self._forms[self._at]](self._plan)[1]
        text.append("".join(f"\nNot carried: {sentence}" for sentence in lost), "dim")
        text.append("\n\nenter writes the file named below, escape leaves" if not self._wrong else "")
        text.append(f"\n\n{self._wrong}" if self._wrong else "", "bold red")
        self.body.draw(text)

    def action_form(self, by: int) -> None:
        own = self.file.value == self._suggested
        self._at, self._wrong = max(0, min(len(self._forms) - 1, self._at + by)), ""
        if own:  # a name that was typed is kept
            self.file.value = self._suggested
            self.file.cursor_position = len(self.file.value)
        self._draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        name = event.value.strip()
        path = Path(name).expanduser()
        if not name:
            self._wrong = "Name a file."
        elif path.exists():
            self._wrong = f"{path} exists; choose another name."
        else:
            try:
                write({path: FORMATS[self._forms[self._at]](self._plan)[0]})
                self.dismiss(f"{self._label} written to {path} for {self._forms[self._at]}")
                return
            except (ProfileError, OSError, ValueError) as error:
                self._wrong = str(error)
        self._draw()
