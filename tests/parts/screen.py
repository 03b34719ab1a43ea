"""Reading a running app: what stands in its panes."""

from __future__ import annotations

from textual.app import App

from tui.widgets.elevation import Elevation
from tui.widgets.pane import Pane


def text_of(app: App[None], selector: str) -> str:
    """The text of a pane on the top screen; empty while no such pane is there."""
    found = app.screen.query(selector).results(Pane)
    return "".join(pane.text for pane in found)


def racks(app: App[None]) -> str:
    """The elevation as it is drawn, one line a row."""
    drawn = app.query_one(Elevation)
    return "\n".join(strip.text for strip in drawn.render_lines(drawn.size.region))
