"""What a recording has of single links: what they are, told when it changes, and what they carried in ten seconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.record.schema import BIN_S, Floats
from engine.telemetry.snapshot import LinkTable

Event = tuple[str, str, dict[str, Any]]
"""Kind, subject and data, as `engine.record.schema` has them."""
LABELS = ("gpu", "kind", "name", "state", "to")


@dataclass(frozen=True, slots=True)
class Carried:
    """`rates` (2, link): received and sent in GB/s, the mean from `start` until now; NaN where nothing was read. `news`
    says what the links are, where that has changed."""

    start: float
    rates: Floats
    news: tuple[Event, ...]


class Links:
    """Give it every second's links. A mean begins anew every ten seconds, and when there are other links."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], object] = {}
        self._layout: tuple[object, ...] = ()
        self._labels: tuple[object, object] = (None, None)
        self._columns = np.zeros((2, 0))
        self._begin(0, -np.inf)

    def _begin(self, links: int, now: float) -> None:
        self._sum, self._count, self._start = np.zeros((2, links)), np.zeros((2, links)), now

    def take(self, links: LinkTable, now: float) -> Carried:
        """The mean so far, of the ten seconds that are running."""
        layout = (links.node, links.gpu, links.kind, links.name)
        if layout != self._layout or not 0 <= now - self._start < BIN_S:
            self._layout = layout
            self._begin(len(links), now)
        rates = np.stack([links["rx_gb_s"], links["tx_gb_s"]])
        self._sum += np.nan_to_num(rates)
        self._count += ~np.isnan(rates)
        with np.errstate(invalid="ignore", divide="ignore"):
            return Carried(self._start, self._sum / self._count, tuple(self._news(links)))

    def _news(self, links: LinkTable) -> Iterator[Event]:
        labels, columns = (links.state, links.to), np.stack([links["peak_gb_s"], links["errors"]])
        same = all(a is b for a, b in zip(labels, self._labels, strict=True))
        if same and np.array_equal(columns, self._columns, equal_nan=True):
            return  # as nearly always; of a large rack the rest takes a while
        self._labels, self._columns = labels, columns
        for node, rows in links.of.items():
            told = {name: getattr(links, name)[rows.start : rows.stop] for name in LABELS}
            told["peak"] = _numbers(links["peak_gb_s"], rows)
            if self._is_new("links", node, told):
                yield "links", node, told
            errors = _numbers(links["errors"], rows)
            if self._is_new("errors", node, errors):
                yield "errors", node, {"errors": errors}

    def _is_new(self, kind: str, node: str, told: object) -> bool:
        known, self._told[kind, node] = self._told.get((kind, node)), told
        return told != known


def _numbers(values: Floats, rows: range) -> list[float | None]:
    return [None if np.isnan(v) else float(v) for v in values[rows.start : rows.stop]]
