"""What the Plans screen shows, without the screen: plans in an order, a filter over them, a cursor, and pins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.control.planning import label
from engine.control.spaces import Given
from engine.model.predict import Prediction
from engine.plan.search import HIGHER, Found
from engine.profile import Plan
from tui.widgets.figures import large

PINS = "ABCDEF"
"""Pinned plans are named by letters, on the plot, too; as many as stand side by side in 80 columns."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table: its heading, the metric behind it, how it is written and how wide."""

    head: str
    metric: str
    form: str
    width: int

    def text(self, row: Row) -> str:
        """The value as it is written, shortened where it would push its neighbours."""
        value = row.metrics[self.metric]
        written = self.form.format(value)
        return written if len(written) < self.width else large(value)


COLUMNS = (
    Column("tok/s", "tokens_per_s", "{:,.0f}", 8),
    Column("tok/J", "tokens_per_joule", "{:.2f}", 7),
    Column("free", "headroom_gib", "{:.1f}", 6),
    Column("step s", "iteration_s", "{:.2f}", 8),
    Column("MFU", "mfu", "{:.1%}", 6),
    Column("C", "temperature_c", "{:.0f}", 4),
    Column("bub", "bubble_share", "{:.0%}", 5),
    Column("comm", "communication_share", "{:.0%}", 6),
)


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A plan with its metrics; `front`: no other is better in one thing without being worse in another. `measured_s`:
    what a step takes where it runs."""

    label: str
    plan: Plan
    metrics: dict[str, float]
    front: bool = False
    measured_s: float | None = None


def rows_of(found: Found) -> list[Row]:
    """The best plans of a search and its whole front, each once."""
    front = {label(r.plan): r for r in found.front}
    every = front | {label(r.plan): r for r in found.plans}
    return [Row(name, r.plan, r.metrics, name in front) for name, r in every.items()]


def row_of(given: Given, found: Prediction) -> Row:
    """A plan that was given rather than found."""
    step = found.iteration_s
    metrics = {
        "tokens_per_s": found.tokens_per_s,
        "tokens_per_joule": found.tokens_per_joule,
        "headroom_gib": found.headroom_gib,
        "iteration_s": step,
        "mfu": found.mfu,
        "temperature_c": found.temperature_c,
        "bubble_share": found.breakdown.bubble_s / step,
        "communication_share": found.breakdown.exposed_comm_s / step,
    }
    return Row(f"{given.name}: {label(found.plan)}", found.plan, metrics, measured_s=given.measured_s)


@dataclass
class Board:
    """What a search found, None before it has, on how many GPUs, and the state that keys change."""

    found: Found | None = None
    gpus: int = 0
    rows: list[Row] = field(default_factory=list)
    filter: str = ""
    sort: int = 0
    reverse: bool = False
    pins: list[Row] = field(default_factory=list)
    shown: list[Row] = field(default_factory=list)
    cursor: Row | None = None

    def fill(self, gpus: int, found: Found, rows: Sequence[Row]) -> None:
        self.gpus, self.found, self.rows = gpus, found, list(rows)
        self.order()

    def order(self) -> None:
        """Filter and sort anew; the cursor stays with its plan, or goes to the first."""
        words, column = self.filter.lower().split(), COLUMNS[self.sort]
        kept = [r for r in self.rows if all(word in r.label.lower() for word in words)]
        descending = (column.metric in HIGHER) is not self.reverse
        self.shown = sorted(kept, key=lambda r: r.metrics[column.metric], reverse=descending)
        if self.cursor not in self.shown:
            self.cursor = self.shown[0] if self.shown else None

    @property
    def at(self) -> int:
        return self.shown.index(self.cursor) if self.cursor in self.shown else 0

    def move(self, by: int) -> None:
        if self.shown:
            self.cursor = self.shown[max(0, min(len(self.shown) - 1, self.at + by))]

    def sort_by(self, column: int) -> None:
        """Best first by a column; the other way round when it is chosen again."""
        self.reverse = not self.reverse if column == self.sort else False
        self.sort = column
        self.order()

    def pin(self) -> str:
        """Pin what is under the cursor, or take it off; a sentence when no letter is left."""
        row = self.cursor
        if row is None:
            return "There is no plan to pin."
        if row in self.pins:
            self.pins.remove(row)
        elif len(self.pins) == len(PINS):
            return f"{len(PINS)} plans are pinned, and no more stand side by side: take one off with space."
        else:
            self.pins.append(row)
        return ""

    def letter(self, row: Row) -> str:
        return PINS[self.pins.index(row)] if row in self.pins else ""
