"""Plans as points: two metrics against each other in characters, with their axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from tui.widgets.figures import large

LABELS = 7
"""Characters that the figures of the vertical axis take."""
LEAST = (24, 6)
"""Smaller than this a plot says nothing."""
STYLES = {"other": "dim", "front": "bold yellow", "pin": "bold cyan", "cursor": "bold reverse"}
UNICODE = {"other": "·", "front": "●", "cursor": "◆", "corner": "└", "across": "─", "down": "│", "tick": "┤", "up": "┴"}
ASCII = {"other": ".", "front": "o", "cursor": "X", "corner": "+", "across": "-", "down": "|", "tick": "+", "up": "+"}
ORDER = ("other", "front", "pin", "cursor")
"""What stands over what where points share a character."""


@dataclass(frozen=True, slots=True)
class Point:
    """`kind` is one of ORDER; `mark` what is drawn instead of the kind's own sign."""

    x: float
    y: float
    kind: str = "other"
    mark: str = ""


def scatter(points: Sequence[Point], x_name: str, y_name: str, width: int, height: int, plain: bool = False) -> Text:
    """A plot of `width` by `height` characters: the vertical axis' name and the legend above it, the horizontal one's
    below."""
    if width < LEAST[0] or height < LEAST[1] or not points:
        return Text("No plan to plot." if not points else "", "dim")
    sign = ASCII if plain else UNICODE
    columns, rows = width - LABELS - 2, height - 3
    x_span, y_span = _span([p.x for p in points]), _span([p.y for p in points])
    cells: dict[tuple[int, int], Point] = {}
    for point in sorted(points, key=lambda p: ORDER.index(p.kind)):
        column = round((point.x - x_span[0]) / (x_span[1] - x_span[0]) * (columns - 1))
        row = rows - 1 - round((point.y - y_span[0]) / (y_span[1] - y_span[0]) * (rows - 1))
        cells[row, column] = point
    text = _head(y_name, width, sign)
    marked = {0: y_span[1], rows - 1: y_span[0]}
    if rows >= 7:
        marked[(rows - 1) // 2] = y_span[1] - (y_span[1] - y_span[0]) * ((rows - 1) // 2) / (rows - 1)
    for row in range(rows):
        figure = large(marked[row]) if row in marked else ""
        text.append(f"{figure:>{LABELS}} ", "dim")
        text.append(sign["tick" if row in marked else "down"], "dim")
        for column in range(columns):
            found = cells.get((row, column))
            if found is None:
                text.append(" ")
            else:
                text.append(found.mark or sign[found.kind], STYLES[found.kind])
        text.append("\n")
    middle = columns // 2
    axis = [sign["across"]] * columns
    axis[middle] = axis[-1] = sign["up"]
    text.append(f"{'':>{LABELS}} {sign['corner']}{''.join(axis)}\n", "dim")
    text.append_text(_foot(x_name, x_span, columns, middle))
    return text


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The values' range; never empty, so that one point stands in the middle."""
    low, high = min(values), max(values)
    room = abs(low) * 0.01 or 1.0
    return (low, high) if high > low else (low - room, high + room)


def _head(y_name: str, width: int, sign: dict[str, str]) -> Text:
    text = Text()
    text.append(y_name, "bold")
    legend = Text("  ")
    legend.append(sign["front"], STYLES["front"])
    legend.append(" front  ", "dim")
    legend.append(sign["other"], STYLES["other"])
    legend.append(" other  ", "dim")
    legend.append(sign["cursor"], STYLES["cursor"])
    legend.append(" cursor  ", "dim")
    legend.append("A", STYLES["pin"])
    legend.append(" pinned", "dim")
    if len(text) + len(legend) <= width:
        text.append_text(legend)
    text.append("\n")
    return text


def _foot(x_name: str, span: tuple[float, float], columns: int, middle: int) -> Text:
    """Figures under the axis' ends and middle, the name where there is room between them."""
    line = [" "] * (LABELS + 2 + columns)
    low, high, half = large(span[0]), large(span[1]), large(sum(span) / 2)

    def put(words: str, at: int) -> None:
        line[at : at + len(words)] = words

    base = LABELS + 2
    put(low, base)
    put(high, base + columns - len(high))
    name_at = base + len(low) + 2
    if columns >= 60:
        put(half, base + middle - len(half) // 2)
        name_at = base + middle + len(half) + 2
    if name_at + len(x_name) + 2 <= base + columns - len(high):
        put(x_name, name_at)
    text = Text("".join(line), "dim")
    text.highlight_words([x_name], "bold not dim")
    return text
