"""What the keys do, made from the registry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from rich.text import Text
from textual.binding import BindingType

from tui.actions import MOVES, actions
from tui.metrics import METRICS
from tui.screens.panel import Panel

NAMES = {
    "question_mark": "?",
    "asterisk": "*",
    "plus": "+",
    "minus": "-",
    "slash": "/",
    "full_stop": ".",
    "comma": ",",
    "semicolon": ";",
    "less_than_sign": "<",
    "greater_than_sign": ">",
    "left_square_bracket": "[",
    "right_square_bracket": "]",
    "left_curly_bracket": "{",
    "right_curly_bracket": "}",
}
SIGNS = (
    ("*", "node is live"),
    ("~ ? x !", "connecting, stale, down, in error"),
    ("!74!", "this GPU has an alarm, or its board holds it back"),
    ("^74^", "this GPU will reach its limit within ten minutes"),
    ("[74]", "the cursor"),
    ("—", "not available: never drawn as a number"),
)


class HelpScreen(Panel[None]):
    """Any of escape, q and ? closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q,question_mark", "dismiss", "close")]

    def __init__(self, keys: Mapping[str, str], plain: bool, replay: bool = False) -> None:
        super().__init__(plain)
        self._keys, self._replay = keys, replay

    def on_mount(self) -> None:
        self.body.draw(help_text(self._keys, self._replay))


def help_text(keys: Mapping[str, str], replay: bool = False) -> Text:
    """Keys by group, then the signs on the racks."""
    text, offered = Text(), actions(replay)
    for group in dict.fromkeys(a.group for a in offered):
        text.append(f"{group}\n", "bold")
        for action in offered:
            if action.group == group:
                key = keys.get(action.id, action.keys)
                key = NAMES.get(key, key)
                text.append(f"  {key:<6}", "bold cyan")
                text.append(f"{action.help}\n")
        text.append("\n")
    text.append("Moving\n", "bold")
    text.append(f"  {MOVES}; ctrl+p finds every action by name\n\n")
    text.append("Racks\n", "bold")
    for sign, meaning in SIGNS:
        text.append(f"  {sign:<9}", "bold cyan")
        text.append(f"{meaning}\n")
    text.append(f"  c colours by {', '.join(m.title.lower() for m in METRICS)}\n", "dim")
    return text
