"""The line of keys at the bottom."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.widgets import Footer


class Keys(Footer, inherit_css=True):
    """Textual's footer, which is made anew whenever other keys are offered and watches each of its old ones for ever:
    telling of a change is what lets go of those that are gone."""

    def compose(self) -> ComposeResult:
        self.mutate_reactive(Footer.compact)
        yield from super().compose()
