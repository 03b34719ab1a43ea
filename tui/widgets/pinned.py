"""Pinned plans side by side: where the step of each goes, as a bar and in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from tui.board import COLUMNS, PINS, Row
from tui.offline import PARTS
from tui.widgets.figures import number

PLAIN = {"█": "#", "▓": "%", "▒": ":", "░": ".", "·": "-"}
STYLES = ("green", "cyan", "blue", "yellow", "red", "magenta", "", "dim")
"""A colour a part, in the order of PARTS; the mark alone tells them apart, too."""
NAME, HEAD, FIGURE, LABEL, GAP = 20, 14, 10, 30, 2


@dataclass(frozen=True, slots=True)
class Pinned:
    """A pinned plan with the seconds of each of PARTS, or None while they are not known yet."""

    row: Row
    seconds: tuple[float, ...] | None


def pinned(pins: Sequence[Pinned], width: int, plain: bool = False) -> Text:
    """A bar a plan, as long as its step beside the longest; below it each part in seconds and as a share."""
    text = Text(no_wrap=True)
    if not pins:
        text.append("Pinned plans stand here side by side: space pins the one under the cursor.", "dim")
        return text
    text.append("Where the step goes\n", "bold")
    longest = max(p.row.metrics["iteration_s"] for p in pins)
    room = max(10, width - LABEL - 14)
    for letter, one in zip(PINS, pins, strict=False):
        text.append(f"{letter} ", "bold cyan")
        name = Text(f"{one.row.label:<{LABEL}}")
        name.truncate(LABEL, overflow="ellipsis")
        text.append_text(name)
        text.append(f"{one.row.metrics['iteration_s']:>8.2f} s ")
        text.append_text(_bar(one.seconds, longest, room, plain))
        text.append("\n")
    parts, figures = _parts(pins, plain), _figures(pins, HEAD)
    edge = len(parts[0]) + GAP
    beside = width >= edge + len(figures[0])
    text.append("\n")
    for at in range(max(len(parts), len(figures)) if beside else len(parts)):
        line = parts[at] if at < len(parts) else Text()
        if beside and at < len(figures):
            line.append(" " * (edge - len(line)))
            line.append_text(figures[at])
        text.append_text(line)
        text.append("\n")
    for line in [] if beside else _figures(pins, NAME + 2)[1:]:
        text.append_text(line)
        text.append("\n")
    return text


def _letters(pins: Sequence[Pinned], indent: int) -> Text:
    text = Text(" " * indent)
    for letter, _ in zip(PINS, pins, strict=False):
        text.append(f"{letter:>{FIGURE}}", "bold cyan")
    return text


def _parts(pins: Sequence[Pinned], plain: bool) -> list[Text]:
    """A line of letters, then one for each part that any of them has."""
    out = [_letters(pins, NAME + 2)]
    for at, (_, name, mark) in enumerate(PARTS):
        values = [p.seconds[at] if p.seconds else 0.0 for p in pins]
        if any(values):
            line = Text()
            line.append(f"{_mark(mark, plain)} ", STYLES[at])
            line.append(f"{name:<{NAME}}", "dim")
            line.append("".join(f"{v:>{FIGURE - 2}.3f} s" for v in values))
            out.append(line)
    return out


def _figures(pins: Sequence[Pinned], head: int) -> list[Text]:
    """A line of letters, then one for each figure of the table."""
    out = [_letters(pins, head)]
    for column in COLUMNS:
        line = Text()
        line.append(f"{_HEADS.get(column.head, column.head):<{head}}", "dim")
        line.append("".join(f"{column.form.format(p.row.metrics[column.metric]):>{FIGURE}}" for p in pins))
        out.append(line)
    if any(p.row.measured_s for p in pins):
        line = Text()
        line.append(f"{'measured, s':<{head}}", "dim")
        line.append("".join(f"{number(p.row.measured_s, 2):>{FIGURE}}" for p in pins))
        out.append(line)
    return out


_HEADS = {"tok/s": "tokens/s", "tok/J": "tokens/J", "free": "GiB free", "step s": "step, s", "C": "hottest, C"}
_HEADS |= {"bub": "bubble", "comm": "communication"}


def _bar(seconds: tuple[float, ...] | None, longest: float, room: int, plain: bool) -> Text:
    text, done = Text(), 0.0
    for value, (_, _, mark), style in zip(seconds or (), PARTS, STYLES, strict=False):
        done += value
        text.append(_mark(mark, plain) * (round(done / longest * room) - len(text)), style)
    return text


def _mark(mark: str, plain: bool) -> str:
    return PLAIN.get(mark, mark) if plain else mark
