"""A piece of text on the screen, of which only the lines that changed are drawn again; in plain mode nothing beyond
ASCII leaves it."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from rich.segment import Segment
from rich.text import Text
from textual.events import Resize
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from tui.widgets.changes import changed

PLAIN = str.maketrans(
    {"—": "-", "…": ".", "█": "#", "░": ".", "▒": ":", "▁": "_", "▂": ".", "▃": "-", "▄": "=", "▅": "+"}
)
Line = list[Segment]


class Pane(Widget):
    """`draw` puts a text; widgets derive from it with a `show` of their own. Written with the Line API: Textual's own
    text widget goes through the whole text each time a figure of it changes."""

    DEFAULT_CSS = "Pane { height: auto; }"
    ALLOW_SELECT: ClassVar[bool] = False  # a key copies the pane; the terminal's own selection needs nothing of us

    def __init__(self, id: str, plain: bool = False) -> None:
        super().__init__(id=id)
        self.plain = plain
        self._drawn: Text | None = None
        self._of_size: Callable[[int, int], Text] | None = None
        self._lines: list[Line] = []
        self._strips: dict[int, Strip] = {}
        self._width = 0
        """For which the lines are broken."""

    @property
    def text(self) -> str:
        """What stands there."""
        return self._drawn.plain if self._drawn is not None else ""

    def draw(self, text: Text) -> None:
        """Show `text`; markup in it is never read."""
        text.rstrip()
        if self.plain:
            text = asciify(text)
        if self._drawn is not None and text == self._drawn:
            return
        self._drawn = text
        before = self._lines
        if not self._width:
            self.refresh(layout=True)
            return
        self._break(self._width)
        if len(before) != len(self._lines):
            self._strips.clear()
            self.refresh(layout=True)  # laying the screen out is what costs most
            return
        regions: list[Region] = []
        for y, (was, now) in enumerate(zip(before, self._lines, strict=True)):
            if was != now:
                self._strips.pop(y, None)
                regions += filter(None, [changed(y, was, now, self._width)])
        if regions:
            self.refresh(*regions)

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

    def render(self) -> Text:
        return self._drawn or Text()

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        if width and width != self._width:
            self._break(width)
        return len(self._lines)

    def notify_style_update(self) -> None:
        """Another theme, or the focus."""
        self._strips.clear()
        super().notify_style_update()

    def render_line(self, y: int) -> Strip:
        if self.size.width != self._width:
            self._break(self.size.width)
        strip = self._strips.get(y)
        if strip is None:
            style = self.visual_style.rich_style
            segments = self._lines[y] if y < len(self._lines) else []
            strip = Strip(segments).apply_style(style).adjust_cell_length(self._width, style)
            self._strips[y] = strip
        return strip

    def _break(self, width: int) -> None:
        """Have each line of the text fit, by breaking it or, where it shall stay one, by cutting it."""
        if width != self._width:
            self._width, self._strips = width, {}
        self._lines = []
        cut = self.styles.text_wrap == "nowrap"
        for line in Segment.split_lines(self.render().render(self.app.console)):
            if width <= 0 or Segment.get_line_length(line) <= width:
                self._lines.append(line)
                continue
            text = Text.assemble(*((s.text, s.style or "") for s in line))
            if cut:
                text.truncate(width, overflow="ellipsis")
            for part in [text] if cut else text.wrap(self.app.console, width):
                self._lines.append(list((asciify(part) if self.plain else part).render(self.app.console)))


def asciify(text: Text) -> Text:
    """The same text with every character beyond ASCII replaced, one for one, so that styles stay in place."""
    kept = text.plain.translate(PLAIN)
    out = text.copy()
    out.plain = "".join(c if c.isascii() else "?" for c in kept)
    return out
