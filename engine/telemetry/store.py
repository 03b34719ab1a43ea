"""The columnar store: nodes write their records into it, `publish` hands out immutable snapshots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.telemetry.links import NodeLinks
from engine.telemetry.reading import GpuFacts, Hello, ReadingState, Tick, judge
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
STALE_TICKS = 3


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
        self.states: Counter[ReadingState] = Counter()
        """How many readings were taken in each state, since the start."""
        self._lay_out(first)

    def _lay_out(self, rows: int) -> None:
        self._columns = {name: np.full(rows, np.nan) for name in (*GPU_METRICS, *GPU_FACTS)}
        self._history = {name: np.full((self._capacity, rows), np.nan, np.float32) for name in HISTORY_METRICS}
        self._times = np.full(self._capacity, np.nan)
        self._written = 0
        self._names()

    def _names(self) -> None:
        """The columns that change only when a node greets."""
        node, index, name, uuid, bus = [], [], [], [], []
        for of in self._nodes.values():
            for slot in range(len(of.rows)):
                facts = of.facts[slot] if slot < len(of.facts) else GpuFacts(index=slot)
                node.append(of.name)
                index.append(facts.index)
                name.append(clean(facts.name or "", 60))
                uuid.append(clean(facts.uuid or "", 60))
                bus.append(clean(facts.bus_id or "", 30))
        self._labels = (tuple(node), tuple(index), tuple(name), tuple(uuid), tuple(bus))

    # Written by the sources.

    def set_state(self, node: str, state: NodeState, reason: str, now: float) -> None:
        """A node's connection changed; without a connection its readings are gone."""
        of = self._nodes[node]
        if of.state is not state:
            of.since = now
        of.state, of.reason = state, reason
        if state in (NodeState.DOWN, NodeState.ERROR, NodeState.CONNECTING):
            for name in GPU_METRICS:
                self._columns[name][of.rows.start : of.rows.stop] = np.nan
            of.links.clear()
            of.hooks, of.processes, of.troubles = (), (), ()

    def apply(self, node: str, record: Hello | Tick, now: float) -> None:
        """Take a greeting or a sample."""
        if isinstance(record, Hello):
            self._greet(self._nodes[node], record)
        else:
            self._sample(self._nodes[node], record, now)

    def _greet(self, of: _Node, hello: Hello) -> None:
        of.hostname, of.driver = clean(hello.hostname, 80), clean(hello.driver or "", 40)
        if hello.gpus and len(hello.gpus) != len(of.rows):
            self._resize(of, len(hello.gpus))
        of.facts = hello.gpus
        for slot, facts in enumerate(hello.gpus):
            for name in GPU_FACTS:
                self._columns[name][of.rows.start + slot] = self._take(of, name, getattr(facts, name))
        self._names()

    def _resize(self, of: _Node, gpus: int) -> None:
        """Give a node another number of rows; everybody keeps its history and values."""
        old = {n.name: n.rows for n in self._nodes.values()}
        columns, history, times, written = self._columns, self._history, self._times, self._written
        first = 0
        for node in self._nodes.values():
            count = gpus if node is of else len(node.rows)
            node.rows = range(first, first + count)
            first += count
        self._lay_out(first)
        self._times, self._written = times, written
        for node in self._nodes.values():
            if node is not of:
                new, was = slice(node.rows.start, node.rows.stop), slice(old[node.name].start, old[node.name].stop)
                for name, column in columns.items():
                    self._columns[name][new] = column[was]
                for name, ring in history.items():
                    self._history[name][:, new] = ring[:, was]

    def _sample(self, of: _Node, tick: Tick, now: float) -> None:
        state = NodeState.ERROR if tick.trouble else NodeState.LIVE
        if of.state is not state:
            of.since = now
        of.state, of.reason = state, clean(tick.trouble or "", 300)
        of.last_sample, of.samples = now, of.samples + 1
        of.hooks = tuple(clean(path, 200) for path in tick.hooks[:64])
        of.troubles = tuple(f"GPU at {clean(bus, 30)} does not answer" for bus in tick.lost)
        for slot, gpu in enumerate(tick.gpus[: len(of.rows)]):
            row = of.rows.start + slot
            for name in GPU_METRICS:
                self._columns[name][row] = self._take(of, name, getattr(gpu, name))
        of.links.update(tick, of.facts)
        of.processes = tuple(
            tuple(Process(p.pid, clean(p.name, 40), p.memory_mib, p.slurm_job, p.rank) for p in gpu.processes[:64])
            for gpu in tick.gpus
        )

    def _take(self, of: _Node, name: str, reading: float | str | None) -> float:
        value, state = judge(name, reading)
        self.states[state] += 1
        if state is ReadingState.IMPLAUSIBLE:
            of.dropped += 1
        return value

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
            ring[place] = self._columns[name]
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
        )

    def _gpus(self) -> GpuTable:
        columns = {}
        for name, column in self._columns.items():
            columns[name] = column.copy()
            columns[name].flags.writeable = False
        processes: list[tuple[Process, ...]] = []
        for of in self._nodes.values():
            processes += [*of.processes[: len(of.rows)], *[()] * (len(of.rows) - len(of.processes))]
        return GpuTable(*self._labels, columns, tuple(processes))

    def _links(self) -> LinkTable:
        nodes = [of for of in self._nodes.values() if of.links.keys]
        keys = [key for of in nodes for key in of.links.keys]

        def column(name: str) -> Floats:
            parts = [getattr(of.links, name) for of in nodes]
            found = np.concatenate(parts) if parts else np.zeros(0)
            found.flags.writeable = False
            return found

        return LinkTable(
            tuple(of.name for of in nodes for _ in of.links.keys),
            tuple(k[0] for k in keys),
            tuple(k[1] for k in keys),
            tuple(clean(k[2], 40) for k in keys),
            tuple(s for of in nodes for s in of.links.state),
            {"rx_gb_s": column("rx"), "tx_gb_s": column("tx"), "peak_gb_s": column("peak")},
        )
