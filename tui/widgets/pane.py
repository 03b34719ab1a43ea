"""A piece of text on the screen; in plain mode nothing beyond ASCII leaves it."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text
from textual.events import Resize
from textual.widgets import Static

PLAIN = str.maketrans(
    {"—": "-", "…": ".", "█": "#", "░": ".", "▒": ":", "▁": "_", "▂": ".", "▃": "-", "▄": "=", "▅": "+"}
)


class Pane(Static):
    """`draw` puts a text; widgets derive from it with a `show` of their own. Where one `wraps`, lines that change may
    take more or less room."""

    wraps = False

    def __init__(self, id: str, plain: bool = False) -> None:
        super().__init__(id=id)
        self.plain = plain
        self._drawn: Text | None = None
        self._of_size: Callable[[int, int], Text] | None = None

    @property
    def text(self) -> str:
        """What stands there."""
        return self._drawn.plain if self._drawn is not None else ""

    def draw(self, text: Text) -> None:
        """Show `text`; markup in it is never read."""
        text.rstrip()
        if self.plain:
            text = asciify(text)
        before, self._drawn = self._drawn, text
        if before is None or text != before:
            lines = None if before is None or self.wraps else before.plain.count("\n")
            self.update(text, layout=lines != text.plain.count("\n"))  # laying the screen out is what costs most

    def fill(self, of_size: Callable[[int, int], Text]) -> None:
        """Show what `of_size` gives for the pane's width and height (0 before its first layout), and again whenever
        they change."""
        self._of_size = of_size
        self.draw(of_size(*self.size))

    def refill(self) -> None:
        """Show the same once more: what it is made from has changed."""
        if self._of_size is not None:
            self.draw(self._of_size(*self.size))

    def on_resize(self, event: Resize) -> None:
        if self._of_size is not None:
            self.draw(self._of_size(*event.size))


def asciify(text: Text) -> Text:
    """The same text with every character beyond ASCII replaced, one for one, so that styles stay in place."""
    kept = text.plain.translate(PLAIN)
    out = text.copy()
    out.plain = "".join(c if c.isascii() else "?" for c in kept)
    return out
