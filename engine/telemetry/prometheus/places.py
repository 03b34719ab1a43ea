"""From a series' labels to a node of the inventory and a GPU's slot, and from series to columns."""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from engine.profile.metrics import Alternatives
from engine.telemetry.prometheus.api import Sample, labels, number
from engine.telemetry.store import GPUS_A_NODE

Floats = npt.NDArray[np.float64]
Kinds = npt.NDArray[np.int8]

MISSING, VALUE, ERROR = 0, 1, 2
_PORT = re.compile(r"^(?:\[([0-9A-Fa-f:.%]+)\]|([^:]+))(?::\d+)?$")
_SLOT = re.compile(r"(\d{1,4})$")
MOST_PLACES = 1 << 20
"""Label sets that are remembered: above it all are looked up anew, so that pods that come and go fill no memory."""


def host_of(value: str) -> str:
    """A label's value without its port, in small letters."""
    match = _PORT.match(value)
    return (match.group(1) or match.group(2) if match else value).lower()


class Places:
    """Where series belong. Rows of columns: the GPUs that the inventory expects, in its order, then others as found."""

    def __init__(self, nodes: Sequence[tuple[str, int]], node_labels: Sequence[str], gpu_labels: Sequence[str]) -> None:
        self.node_labels, self.gpu_labels = tuple(node_labels), tuple(gpu_labels)
        self.names = [name for name, _ in nodes]
        self.rows: dict[tuple[int, int], int] = {}
        for node, (_, gpus) in enumerate(nodes):
            for slot in range(gpus):
                self.rows[node, slot] = len(self.rows)
        self.expected = len(self.rows)
        self._exact = {name.lower(): i for i, name in enumerate(self.names)}
        shorts = [name.lower().partition(".")[0] for name in self.names]
        often = Counter(shorts)
        self._short = {short: i for i, short in enumerate(shorts) if often[short] == 1}
        self._adding = threading.Lock()
        self._hosts: dict[int, str] = {}
        self._known: dict[bytes, int | None] = {}
        self.ambiguous: dict[int, tuple[str, str]] = {}
        """Nodes by number that two hosts of different full names could be."""

    def node(self, of: Mapping[str, str]) -> int | None:
        """The node's number; None for a series of no node of the inventory."""
        for label in self.node_labels:
            value = of.get(label)
            if not value:
                continue
            host = host_of(value)
            found = self._exact.get(host)
            if found is None:
                short, dot, _ = host.partition(".")
                found = self._short.get(short)
                if found is not None and dot and "." in self.names[found]:
                    found = None  # another domain's
            if found is not None:
                return self._sole(found, host)
        return None

    def _sole(self, node: int, host: str) -> int | None:
        """The node, unless a host of another full name has it already: two machines must not be shown as one."""
        if "." not in host or not host.rpartition(".")[2].isalpha():
            return node
        first = self._hosts.setdefault(node, host)
        if first != host:
            self.ambiguous[node] = (first, host)
            return None
        return node

    def slot(self, of: Mapping[str, str]) -> int | None:
        """The GPU's slot; None where no label ends in a number."""
        for label in self.gpu_labels:
            match = _SLOT.search(of.get(label, ""))
            if match and int(match.group(1)) < GPUS_A_NODE:
                return int(match.group(1))
        return None

    def row(self, metric: msgspec.Raw) -> int | None:
        """The row of a GPU's series; remembered, for the labels come alike each time."""
        key = bytes(metric)
        try:
            return self._known[key]
        except KeyError:
            pass
        of = labels(metric)
        with self._adding:
            node, slot = self.node(of), self.slot(of)
            row = None if node is None or slot is None else self.rows.setdefault((node, slot), len(self.rows))
            if len(self._known) >= MOST_PLACES:
                self._known.clear()
            self._known[key] = row
        return row

    def slots(self) -> list[list[tuple[int, int]]]:
        """(slot, row) of each node's GPUs, by slot."""
        out: list[list[tuple[int, int]]] = [[] for _ in self.names]
        for (node, slot), row in self.rows.items():
            out[node].append((slot, row))
        return [sorted(of) for of in out]

    def numbers(self, samples: Iterable[Sample]) -> dict[int, float]:
        """The largest number of each row; NaN where what came is infinite or no number at all."""
        out: dict[int, float] = {}
        for sample in samples:
            row = self.row(sample.metric)
            if row is None:
                continue
            value = number(sample.value[1])
            before = out.get(row, math.nan)
            if math.isnan(before) or value > before:
                out[row] = value if math.isfinite(value) else before
        return out


def column(found: Mapping[int, float], rows: int) -> tuple[Floats, Kinds]:
    """Numbers by row as a column, with what each is: MISSING, VALUE or ERROR."""
    values, kinds = np.full(rows, np.nan), np.zeros(rows, np.int8)
    at = np.fromiter(found, np.int64, len(found))
    values[at] = np.fromiter(found.values(), float, len(found))
    kinds[at] = np.where(np.isfinite(values[at]), VALUE, ERROR)
    values[kinds != VALUE] = np.nan
    return values, kinds


def combined(ways: Alternatives, found: Mapping[str, dict[int, float]], rows: int) -> tuple[Floats, Kinds]:
    """A metric's column: of each GPU the first way that has all its series. `found` by `key_of`."""
    values, kinds = np.full(rows, np.nan), np.zeros(rows, np.int8)
    for way in ways:
        parts = [found.get(key_of(name, way.labels)) for name in (way.series, *way.plus)]
        if any(part is None for part in parts):
            continue
        columns = [column(part, rows) for part in parts if part is not None]
        total = way.scale * np.sum([c[0] for c in columns], axis=0)
        here = np.min([c[1] for c in columns], axis=0) > MISSING
        bad = np.max([c[1] for c in columns], axis=0) == ERROR
        new = here & (kinds == MISSING)
        values[new], kinds[new] = total[new], np.where(bad[new], ERROR, VALUE)
    return values, kinds


def key_of(series: str, of: Mapping[str, str]) -> str:
    """What tells one selection of a series from another."""
    return series if not of else f"{series} {sorted(of.items())}"


def host_in(of: Mapping[str, str], node_labels: Iterable[str]) -> str:
    """The host as its labels spell it, port taken off; empty when none does."""
    return next((host_of(value) for label in node_labels if (value := of.get(label))), "")
