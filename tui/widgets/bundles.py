"""Links in bundles, all of one kind and GPU or one port, and what they carry: arrays, however many there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.telemetry.snapshot import LinkTable

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Key = tuple[str, int | str]


@dataclass(frozen=True, eq=False)
class Bundles:
    """Which links belong together: `of` is each link's bundle, in the order of the table's `rows`; a bundle's node,
    kind, GPU's slot (-1: none), and port's name or nothing. `key` is how a job's traffic names it; none for PCIe, which
    carries the host's traffic, too."""

    rows: slice
    of: Ints
    node: tuple[str, ...]
    kind: tuple[str, ...]
    gpu: tuple[int, ...]
    port: tuple[str, ...]
    key: tuple[Key | None, ...]

    def __len__(self) -> int:
        return len(self.node)

    def label(self, bundle: int, with_node: bool) -> str:
        """What a bundle is called on the screen."""
        name = self.port[bundle] or f"GPU {self.gpu[bundle]} {self.kind[bundle]}"
        return f"{self.node[bundle]} {name}" if with_node else name


def bundled(table: LinkTable, node: str | None) -> Bundles:
    """The bundles of one node, or of all."""
    rows = table.of.get(node, range(0)) if node is not None else range(len(table))
    of, found = np.empty(len(rows), np.int64), dict[tuple[str, str, int, str], int]()
    cut = slice(rows.start, rows.stop)
    labels = zip(table.node[cut], table.kind[cut], table.gpu[cut], table.name[cut], strict=True)
    for place, (name, kind, gpu, link) in enumerate(labels):
        of[place] = found.setdefault((name, kind, gpu, link if kind == "nic" else ""), len(found))
    nodes, kinds, gpus, ports = zip(*found, strict=True) if found else ((), (), (), ())
    keys = tuple(None if kind == "pcie" else (name, port or gpu) for name, kind, gpu, port in found)
    return Bundles(cut, of, nodes, kinds, gpus, ports, keys)


@dataclass(frozen=True)
class Load:
    """What each bundle carries and could carry, GB/s in one direction; `share` the busier direction's of the peak. NaN
    where it is not known. `bad` counts its links that are inactive or degraded, `first_bad` is one's row or -1."""

    rx: Floats
    tx: Floats
    peak: Floats
    share: Floats
    bad: Ints
    first_bad: Ints


def measured(bundles: Bundles, table: LinkTable) -> Load:
    """Links added up; what is not read of some is left out."""
    rx, tx, peak = (_sums(bundles, table[name][bundles.rows]) for name in ("rx_gb_s", "tx_gb_s", "peak_gb_s"))
    bad = np.flatnonzero(table["well"][bundles.rows] == 0)[::-1]
    first = np.full(len(bundles), -1)
    first[bundles.of[bad]] = bad + (bundles.rows.start or 0)
    return Load(rx, tx, peak, np.fmax(rx, tx) / peak, np.bincount(bundles.of[bad], minlength=len(bundles)), first)


@dataclass(frozen=True, eq=False)
class Groups:
    """The parallel groups whose traffic bundles carry: `of` is each bundle's group, or -1."""

    name: tuple[str, ...]
    of: Ints

    def busiest(self, share: Floats) -> Floats:
        """The share of each group's most loaded bundle, NaN where none is known: its collectives wait for that one."""
        known = (self.of >= 0) & ~np.isnan(share)
        out = np.full(len(self.name), np.nan)
        np.fmax.at(out, self.of[known], share[known])
        return out


def grouped(bundles: Bundles, carried: Mapping[Key, str]) -> Groups:
    """Whose traffic each bundle carries, as `carried` tells."""
    found: dict[str, int] = {}
    names = (carried.get(key) if key is not None else None for key in bundles.key)
    of = [-1 if name is None else found.setdefault(name, len(found)) for name in names]
    return Groups(tuple(found), np.array(of, np.int64))


def expected_rates(bundles: Bundles, expected: Mapping[Key, float]) -> Floats:
    """What each bundle should carry by the model, GB/s in one direction; NaN where nothing is said."""
    nothing = float("nan")
    return np.array([nothing if key is None else expected.get(key, nothing) for key in bundles.key], float)


def _sums(bundles: Bundles, values: Floats) -> Floats:
    known = ~np.isnan(values)
    count = np.bincount(bundles.of, known, len(bundles))
    total = np.bincount(bundles.of, np.where(known, values, 0.0), len(bundles))
    return np.where(count > 0, total, np.nan)


@dataclass(frozen=True)
class Seen:
    """The links of a node or of all at one moment. What only changes with them or with the job is kept from moment to
    moment: their bundles, whose traffic they carry, and what the model expects of each, GB/s in each direction."""

    table: LinkTable
    node: str | None
    carried: Mapping[Key, str]
    expected: Mapping[Key, float]
    bundles: Bundles
    groups: Groups
    model: Floats
    load: Load

    @property
    def modelled(self) -> bool:
        """Whether the model says anything of these links."""
        return bool((~np.isnan(self.model)).any())

    def whose(self, bundle: int) -> str:
        """The parallel group whose traffic a bundle carries, or nothing."""
        group = int(self.groups.of[bundle])
        return self.groups.name[group] if group >= 0 else ""

    def wrong(self, bundle: int) -> str:
        """What is the matter with some of its links, or nothing."""
        bad = int(self.load.bad[bundle])
        return f"{bad} {self.table.state[self.load.first_bad[bundle]]}" if bad else ""

    def holding(self, words: str) -> Bools:
        """Which bundles hold these words in what is written of them."""
        every, words = range(len(self.bundles)), words.lower()
        if not words:
            return np.ones(len(every), bool)
        written = (f"{self.bundles.label(b, self.node is None)} {self.whose(b)} {self.wrong(b)}" for b in every)
        return np.fromiter((words in text.lower() for text in written), bool, len(every))


def look(
    table: LinkTable,
    node: str | None,
    carried: Mapping[Key, str],
    expected: Mapping[Key, float],
    before: Seen | None = None,
) -> Seen:
    """What is there now; what `before` had found and still holds is not found again."""
    if before is None or before.node != node or before.table.name is not table.name:
        bundles, before = bundled(table, node), None
    else:
        bundles = before.bundles
    groups = before.groups if before and before.carried is carried else grouped(bundles, carried)
    model = before.model if before and before.expected is expected else expected_rates(bundles, expected)
    return Seen(table, node, carried, expected, bundles, groups, model, measured(bundles, table))
