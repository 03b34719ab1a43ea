"""The columnar store: nodes write their records into it, `publish` hands out immutable snapshots."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt

from engine.telemetry.links import NodeLinks
from engine.telemetry.reading import (
    CODES,
    PLAUSIBLE,
    GpuFacts,
    Hello,
    ProcessFacts,
    Reading,
    ReadingState,
    Tick,
    worded,
)
from engine.telemetry.snapshot import (
    GPU_FACTS,
    GPU_METRICS,
    GpuTable,
    LinkTable,
    NodeState,
    NodeStatus,
    Process,
    Snapshot,
)
from engine.telemetry.text import clean

Floats = npt.NDArray[np.float64]

HISTORY_METRICS = ("temperature_c", "power_w", "sm_clock_mhz", "utilization_pct")
HISTORY_SAMPLES = 900
"""Kept in half precision: a tenth of a degree, half a watt and a megahertz, at half the memory."""
STALE_TICKS = 3
PROCESSES_A_GPU = 64
GPUS_A_NODE = 1024
"""More than any node has: a greeting that names more is cut, so that garbage cannot fill the memory."""

_Names = tuple[str, ...]

COLUMNS = (*GPU_METRICS, *GPU_FACTS)
_PLACE = {name: place for place, name in enumerate(COLUMNS)}
_LOW, _HIGH = (np.array([PLAUSIBLE[name][end] for name in COLUMNS], float)[:, None] for end in (0, 1))
_METRICS = slice(0, len(GPU_METRICS))


@dataclass
class _Node:
    name: str
    rows: range
    state: NodeState = NodeState.CONNECTING
    reason: str = "connecting"
    since: float = 0.0
    last_sample: float | None = None
    hostname: str = ""
    driver: str = ""
    facts: tuple[GpuFacts, ...] = ()
    hooks: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()
    samples: int = 0
    dropped: int = 0
    links: NodeLinks = field(default_factory=NodeLinks)
    processes: tuple[tuple[Process, ...], ...] = ()
    interval_s: float = 1.0
    reader: str = ""
    because: str = ""
    took_ms: float = math.nan
    skew_s: float = math.nan
    load: float = math.nan
    last_tick: int = 0
    missed: int = 0


class Store:
    """One row a GPU. Rows are laid out as expected until a node shows that it has more or fewer."""

    def __init__(
        self, nodes: Sequence[tuple[str, int]], interval_s: float = 1.0, history: int = HISTORY_SAMPLES
    ) -> None:
        self._nodes: dict[str, _Node] = {}
        first = 0
        for name, gpus in nodes:
            self._nodes[name] = _Node(name, range(first, first + gpus), interval_s=interval_s)
            first += gpus
        self._capacity = history
        self._version = 0
        self._processes: tuple[tuple[Process, ...], ...] | None = None
        self._link_labels: (
            tuple[_Names, tuple[int, ...], _Names, _Names, _Names, _Names, Mapping[str, range]] | None
        ) = None
        self.states: Counter[ReadingState] = Counter()
        """How many readings were no values, by state, since the start."""
        self._lay_out(first)

    def _lay_out(self, rows: int) -> None:
        self._values = np.full((len(COLUMNS), rows), np.nan)
        self._codes = np.full((len(COLUMNS), rows), CODES[ReadingState.ABSENT], np.int8)
        self._history = {name: np.full((self._capacity, rows), np.nan, np.float16) for name in HISTORY_METRICS}
        self._times = np.full(self._capacity, np.nan)
        self._written = 0
        self._labels: tuple[_Names, tuple[int, ...], _Names, _Names, _Names, tuple[GpuFacts, ...]] | None = None

    def _named(self) -> tuple[_Names, tuple[int, ...], _Names, _Names, _Names, tuple[GpuFacts, ...]]:
        """The columns that change only when a node greets."""
        if self._labels is not None:
            return self._labels
        facts: list[GpuFacts] = []
        for of in self._nodes.values():
            known = of.facts[: len(of.rows)]
            facts += [*known, *(GpuFacts(index=slot) for slot in range(len(known), len(of.rows)))]
        self._labels = (
            tuple(of.name for of in self._nodes.values() for _ in of.rows),
            tuple(f.index for f in facts),
            tuple(f.name or "" for f in facts),
            tuple(f.uuid or "" for f in facts),
            tuple(f.bus_id or "" for f in facts),
            tuple(facts),
        )
        return self._labels

    # Written by the sources.

    def set_state(self, node: str, state: NodeState, reason: str, now: float) -> None:
        """A node's connection changed; without a connection its readings are gone."""
        of = self._nodes[node]
        if of.state is not state:
            of.since = now
        of.state, of.reason = state, reason
        if state in (NodeState.DOWN, NodeState.ERROR, NodeState.CONNECTING):
            self._values[_METRICS, of.rows.start : of.rows.stop] = np.nan
            self._codes[_METRICS, of.rows.start : of.rows.stop] = CODES[ReadingState.LOST]
            of.links.clear()
            of.hooks, of.processes, of.troubles = (), (), ()
            self._processes = None

    def expect(self, node: str, interval_s: float) -> None:
        """How far apart a node's samples come, where that is not the store's own interval."""
        self._nodes[node].interval_s = interval_s

    def apply(self, node: str, record: Hello | Tick, now: float) -> None:
        """Take a greeting or a sample."""
        if isinstance(record, Hello):
            self._greet(self._nodes[node], record)
        else:
            self._sample(self._nodes[node], record, now)

    def backfill(self, times: Floats, columns: Mapping[str, Floats]) -> None:
        """History from before the first snapshot: `times` (t,) in unix seconds, oldest first, and for each metric of
        HISTORY_METRICS an array (t, rows). Nothing happens once a node has told something."""
        if not len(times) or any(of.samples for of in self._nodes.values()):
            return
        kept = min(len(times), self._capacity)
        self._times[:kept] = times[-kept:]
        for name, values in columns.items():
            if name in self._history and values.shape == (len(times), self._values.shape[1]):
                self._history[name][:kept] = values[-kept:]
        self._written = kept

    def _greet(self, of: _Node, hello: Hello) -> None:
        of.last_tick = 0
        of.hostname, of.driver = clean(hello.hostname, 80), clean(hello.driver or "", 40)
        of.reader, of.because = clean(hello.reader, 40), clean(hello.because or "", 300)
        gpus = hello.gpus[:GPUS_A_NODE]
        if gpus and len(gpus) != len(of.rows):
            self._resize(of, len(gpus))
        of.facts = tuple(_cleaned(facts) for facts in gpus)
        self._take(of, {name: [getattr(facts, name) for facts in gpus] for name in GPU_FACTS})
        self._labels = None

    def _resize(self, of: _Node, gpus: int) -> None:
        """Give a node another number of rows; everybody keeps its history and values."""
        old = {n.name: n.rows for n in self._nodes.values()}
        values, codes, history = self._values, self._codes, self._history
        times, written = self._times, self._written
        first = 0
        for node in self._nodes.values():
            count = gpus if node is of else len(node.rows)
            node.rows = range(first, first + count)
            first += count
        self._lay_out(first)
        self._times, self._written, self._processes = times, written, None
        for node in self._nodes.values():
            if node is not of:
                new, was = slice(node.rows.start, node.rows.stop), slice(old[node.name].start, old[node.name].stop)
                self._values[:, new], self._codes[:, new] = values[:, was], codes[:, was]
                for name, ring in history.items():
                    self._history[name][:, new] = ring[:, was]

    def _sample(self, of: _Node, tick: Tick, now: float) -> None:
        state = NodeState.ERROR if tick.trouble else NodeState.LIVE
        if of.state is not state:
            of.since = now
        of.state, of.reason = state, clean(tick.trouble or "", 300)
        of.last_sample, of.samples = now, of.samples + 1
        of.missed += max(0, tick.tick - of.last_tick - 1) if of.last_tick else 0
        of.last_tick = tick.tick
        of.took_ms, of.skew_s = tick.took_ms, tick.time - now
        of.load = math.nan if tick.load is None else tick.load
        of.hooks = tuple(clean(path, 200) for path in tick.hooks[:64])
        of.troubles = tuple(f"GPU at {clean(bus, 30)} does not answer" for bus in tick.lost[:GPUS_A_NODE])
        self._take(of, tick.gpus)
        if of.links.update(tick):
            self._link_labels = None
        if tick.processes is not None:
            of.processes = _by_gpu(tick.processes, len(of.rows))
            self._processes = None

    def _take(self, of: _Node, readings: Mapping[str, list[Reading]]) -> None:
        """Write the plausible numbers of one node's columns; whatever else was read becomes NaN and is counted."""
        places, low, high = _bounds(tuple(readings))
        gpus = len(of.rows)
        try:
            block = np.array(tuple(readings.values()), float)
        except (ValueError, TypeError, OverflowError):
            block = np.empty(0)
        if block.shape != (
            len(places),
            gpus,
        ):  # words among the numbers, another count of GPUs, or a metric unknown here
            known = {name: column for name, column in readings.items() if name in _PLACE and len(column) == gpus}
            if not known or not gpus:
                return
            places, low, high = _bounds(tuple(known))
            block, codes = self._judged(tuple(known.values()))
        else:
            codes = np.where(np.isnan(block), np.int8(CODES[ReadingState.ABSENT]), np.int8(0))
        with np.errstate(invalid="ignore"):
            bad = (block < low) | (block > high)
        if bad.any():
            of.dropped += int(bad.sum())
            self.states[ReadingState.IMPLAUSIBLE] += int(bad.sum())
            block[bad], codes[bad] = np.nan, CODES[ReadingState.IMPLAUSIBLE]
        self._values[places, of.rows.start : of.rows.stop] = block
        self._codes[places, of.rows.start : of.rows.stop] = codes

    def _judged(self, columns: Sequence[Sequence[Reading]]) -> tuple[Floats, npt.NDArray[np.int8]]:
        """Columns that hold words: each word is counted as the state it names."""
        out = np.full((len(columns), len(columns[0])), np.nan)
        codes = np.zeros(out.shape, np.int8)
        for row, column in enumerate(columns):
            for slot, reading in enumerate(column):
                if isinstance(reading, str) or reading is None:
                    state = worded(reading)
                    self.states[state] += 1
                    codes[row, slot] = CODES[state]
                else:
                    out[row, slot] = reading
        return out, codes

    # Read by everybody else.

    def publish(self, now: float) -> Snapshot:
        """The next snapshot. Nodes that have been silent for STALE_TICKS intervals become stale."""
        for of in self._nodes.values():
            if of.state is NodeState.LIVE and of.last_sample is not None:
                silent = now - of.last_sample
                if silent > STALE_TICKS * of.interval_s:
                    of.state, of.since = NodeState.STALE, of.last_sample
            if of.state is NodeState.STALE and of.last_sample is not None:
                of.reason = f"no sample for {now - of.last_sample:.0f} s; the figures shown are the last ones"
        place = self._written % self._capacity
        self._times[place] = now
        for name, ring in self._history.items():
            ring[place] = self._values[_PLACE[name]]
        self._written += 1
        self._version += 1
        return Snapshot(
            self._version, now, tuple(self._status(of) for of in self._nodes.values()), self._gpus(), self._links()
        )

    def history(self, metric: str, row: int) -> tuple[Floats, Floats]:
        """(unix times, values) of one GPU, oldest first, at most HISTORY_SAMPLES."""
        count = min(self._written, self._capacity)
        order = (np.arange(count) + self._written - count) % self._capacity
        return self._times[order], self._history[metric][order, row].astype(float)

    def _status(self, of: _Node) -> NodeStatus:
        return NodeStatus(
            of.name,
            of.state,
            of.reason,
            of.since,
            of.last_sample,
            of.rows,
            of.hostname,
            of.driver,
            of.hooks,
            of.troubles,
            of.samples,
            of.dropped + of.links.dropped,
            of.reader,
            of.because,
            of.took_ms,
            of.skew_s,
            of.load,
            of.missed,
        )

    def _gpus(self) -> GpuTable:
        values, codes = self._values.copy(), self._codes.copy()
        for of in self._nodes.values():
            if of.state is NodeState.STALE:
                rows = codes[_METRICS, of.rows.start : of.rows.stop]
                rows[rows == 0] = CODES[ReadingState.STALE]
        values.flags.writeable = codes.flags.writeable = False
        if self._processes is None:
            of_gpus: list[tuple[Process, ...]] = []
            for of in self._nodes.values():
                of_gpus += [*of.processes[: len(of.rows)], *[()] * (len(of.rows) - len(of.processes))]
            self._processes = tuple(of_gpus)
        return GpuTable(*self._named(), dict(zip(COLUMNS, values, strict=True)), codes, self._processes)

    def _links(self) -> LinkTable:
        nodes = [of for of in self._nodes.values() if len(of.links)]
        if self._link_labels is None:
            labels = [of.links.labels for of in nodes]
            self._link_labels = (
                tuple(chain.from_iterable([of.name] * len(of.links) for of in nodes)),
                tuple(chain.from_iterable(of.gpu for of in labels)),
                tuple(chain.from_iterable(of.kind for of in labels)),
                tuple(chain.from_iterable(of.name for of in labels)),
                tuple(chain.from_iterable(of.state for of in labels)),
                tuple(chain.from_iterable(of.to for of in labels)),
                _ranges([(of.name, len(of.links)) for of in nodes]),
            )

        def column(name: str) -> Floats:
            parts = [getattr(of.links, name) for of in nodes]
            found = np.concatenate(parts) if parts else np.zeros(0)
            found.flags.writeable = False
            return found

        return LinkTable(
            *self._link_labels,
            {
                "rx_gb_s": column("rx"),
                "tx_gb_s": column("tx"),
                "peak_gb_s": column("peak"),
                "errors": column("errors"),
                "well": column("well"),
            },
        )


@lru_cache(maxsize=256)
def _bounds(names: _Names) -> tuple[npt.NDArray[np.int64], Floats, Floats]:
    """The columns of some metrics, and what is plausible in each; metrics that are not known have none."""
    places = np.array([_PLACE[name] for name in names if name in _PLACE], np.int64)
    return places, _LOW[places], _HIGH[places]


def _ranges(counts: Sequence[tuple[str, int]]) -> dict[str, range]:
    """The rows of each name, one after the other."""
    out, first = {}, 0
    for name, count in counts:
        out[name] = range(first, first + count)
        first += count
    return out


def _cleaned(facts: GpuFacts) -> GpuFacts:
    """A GPU's texts made harmless."""

    def text(value: str | None, limit: int) -> str | None:
        return None if value is None else clean(value, limit)

    return msgspec.structs.replace(
        facts,
        name=text(facts.name, 60),
        uuid=text(facts.uuid, 60),
        bus_id=text(facts.bus_id, 30),
        cpus=text(facts.cpus, 80),
        note=text(facts.note, 120),
        near=tuple(clean(name, 40) for name in facts.near[:16]),
        mig=tuple(msgspec.structs.replace(m, name=clean(m.name, 40)) for m in facts.mig[:16]),
    )


def _by_gpu(processes: Sequence[ProcessFacts], gpus: int) -> tuple[tuple[Process, ...], ...]:
    """The processes of each slot, their texts made harmless."""
    out: list[list[Process]] = [[] for _ in range(gpus)]
    for p in processes:
        if 0 <= p.gpu < gpus and len(out[p.gpu]) < PROCESSES_A_GPU:
            told = (p.slurm_job, p.rank, p.local_rank, p.world_size, p.cpus)
            job, rank, local, world, cpus = (None if v is None else clean(v, 80) for v in told)
            out[p.gpu].append(Process(p.pid, clean(p.name, 40), p.memory_mib, job, rank, local, world, cpus))
    return tuple(tuple(of) for of in out)
