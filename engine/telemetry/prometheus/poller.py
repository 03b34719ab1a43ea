"""Nodes that a Prometheus-compatible API reads: one poller asks for all of them and feeds the store.

Every reading keeps the time at which Prometheus took it. A node is asked for its newest sample's time first; only
where that moved on are readings taken, so that the last ones of an exporter that died grow old in the store and are
never shown as live. Ages are differences of the server's own times: a clock that is off does not make them young.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from engine.profile import Cluster, Prometheus, catalog
from engine.profile.metrics import Alternative, MetricMap, read
from engine.telemetry.prometheus.api import Api, Sample, labels, number, selector
from engine.telemetry.prometheus.past import past
from engine.telemetry.prometheus.places import ERROR, MISSING, Floats, Kinds, Places, combined, host_in, key_of
from engine.telemetry.prometheus.traffic import NodeTraffic, Traffic
from engine.telemetry.reading import GpuFacts, Hello, LinkFacts, Reading, Result, Tick
from engine.telemetry.snapshot import GPU_FACTS, GPU_HEALTH, GPU_METRICS, NodeState
from engine.telemetry.source import Backoff, SourceError
from engine.telemetry.store import HISTORY_METRICS, HISTORY_SAMPLES, STALE_TICKS, Store
from engine.telemetry.streams import Reader, Writer
from engine.telemetry.text import clean

SHIPPED = catalog.ROOT / "metrics" / "prometheus.yaml"
AT_ONCE = 4
"""Queries in flight: with 8,192 GPUs four at a time took half as long as one after the other, or as one for all."""
SELDOM = frozenset({*GPU_HEALTH, "memory_clock_mhz", "energy_j"})
"""Metrics that nobody acts on within a minute."""
LOOK_S = 60.0
"""How often it is looked up which series exist and what the GPUs are."""
GONE_S = 300.0
"""A node without any series for so long, Prometheus's own lookback, is down, not stale."""
POLLS_A_STEP = 5
"""Looks for new samples in the time between two, so that a reading is seen at most a fifth of it late."""
YIELD_NODES = 32
NO_WAY = "telemetry comes from Prometheus: there is no way to this node to act; give it an ssh address"


def sources(cluster: Cluster, told: Prometheus) -> dict[str, PrometheusSource]:
    """A source for each node that has no address of its own; they share one poller."""
    found = read(Path(told.metrics) if told.metrics else SHIPPED)
    poller = Poller(cluster, told, found)
    return {name: PrometheusSource(name, poller) for name in poller.places.names}


class PrometheusSource:
    """One node of those that the poller reads. There is no way back to it."""

    def __init__(self, name: str, poller: Poller) -> None:
        self.name, self._poller = name, poller

    async def run(self, store: Store) -> None:
        """Feed the store for ever, with all the others."""
        await self._poller.attend(store)

    async def command(self, command: dict[str, Any], timeout_s: float) -> Result:
        """Nothing can be done through Prometheus."""
        return Result(str(command["id"]), "failed", NO_WAY)

    async def open_job_socket(self, path: str) -> tuple[Reader, Writer]:
        """There is no way to the node."""
        raise SourceError(NO_WAY, slow=True)


@dataclass
class _Seen:
    """A node: the server's and this machine's time of its newest sample, and what was told of it."""

    at: float = -1.0
    sampled: float | None = None
    silent: NodeState | None = None
    greeting: Hello | None = None
    looked: tuple[float, int] = (0.0, -1)
    ticks: int = 0
    links: tuple[LinkFacts, ...] | None = None
    host: str = ""


class Poller:
    """Reads all nodes of a cluster that have no address of their own."""

    def __init__(self, cluster: Cluster, told: Prometheus, found: MetricMap, api: Api | None = None) -> None:
        nodes = [(n.name, cluster.type_of(n).gpus) for n in cluster.nodes if not n.ssh and not n.local]
        self._map, self._told, self._api = found, told, api or Api(told)
        self.places = Places(
            nodes,
            (told.node_label,) if told.node_label else found.node_labels,
            (told.gpu_label,) if told.gpu_label else found.gpu_labels,
        )
        self._rows_of_all = _rows_in_store(cluster)
        self._all_rows = cluster.gpus
        self.interval_s = max(cluster.poll_interval_s, told.step_s / POLLS_A_STEP)
        self.step_s = max(told.step_s, self.interval_s)
        self._traffic = Traffic(self._api, found, self.places, told.matchers, told.step_s)
        self._where = clean(urlsplit(told.url).netloc, 80)
        self._ways = dict(found.gpu.items())
        self._seen = [_Seen() for _ in nodes]
        self._there: set[str] = set()
        self._looked = -LOOK_S
        self._whole = 0.0
        self._behind_s = 0.0
        self._identity: dict[int, dict[str, str]] = {}
        self._facts: dict[str, tuple[Floats, Kinds]] = {}
        self._sent: set[str] = set()
        self._answered: set[int] = set()
        self._task: asyncio.Task[None] | None = None
        self._attending = 0

    # One task for all nodes.

    async def attend(self, store: Store) -> None:
        """Run for as long as any node's source does."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(store), name="poll Prometheus")
        self._attending += 1
        try:
            await asyncio.shield(self._task)
        finally:
            self._attending -= 1
            if not self._attending:
                task, self._task = self._task, None
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def _run(self, store: Store) -> None:
        backoff, filled = Backoff(), False
        for name in self.places.names:
            store.set_state(name, NodeState.CONNECTING, f"asking Prometheus at {self._where}", time.time())
            # What is still fresh is judged by how far apart samples are, not by how often this console looks.
            store.expect(name, self.step_s)
        while True:
            wait_s = self.interval_s
            try:
                if not filled:
                    await self.backfill(store, HISTORY_SAMPLES * self.interval_s)
                    filled = True
                await self.refresh(store)
                backoff.reset()
            except SourceError as error:
                self._failed(store, str(error))
                wait_s = backoff.next_s(error.slow)
            except Exception as error:  # our own fault: it must be told, and must not end the polling
                self._failed(store, f"rackside itself failed here: {clean(repr(error))}")
                wait_s = backoff.next_s(slow=True)
            await asyncio.sleep(wait_s)

    def _failed(self, store: Store, reason: str) -> None:
        """No answer: nodes whose last sample is still young are left to grow stale, the others are down."""
        now = time.time()
        for name, seen in zip(self.places.names, self._seen, strict=True):
            if seen.sampled is None or now - seen.sampled > STALE_TICKS * self.step_s:
                seen.silent = NodeState.DOWN
                store.set_state(name, NodeState.DOWN, clean(f"Prometheus at {self._where}: {reason}", 300), now)

    # What is asked.

    async def refresh(self, store: Store) -> int:
        """Take what is new; how many nodes had something. SourceError with a sentence."""
        await self._look()
        newest = await self._api.instant(self._age_query(), self._newest)
        now = time.time()
        fresh = [node for node, (at, _) in newest.items() if at > self._seen[node].at]
        for node, seen in enumerate(self._seen):
            if node not in newest:
                self._silent(store, node, seen, now)
        if fresh:
            metrics = self._due()
            found = await self._values(self._ways_of(metrics))
            traffic = await self._traffic.read(self._there)
            for node in fresh:
                at, age_s = newest[node]
                self._seen[node].at, self._seen[node].sampled = at, now - age_s
                self._seen[node].silent = None
            await self._hand_over(store, fresh, self._columns(metrics, found), traffic)
        return len(fresh)

    def _due(self) -> tuple[str, ...]:
        """The metrics to ask for now: those that seldom change are asked for as often as what exists is looked up."""
        if self._whole == self._looked:
            return tuple(m for m in GPU_METRICS if m not in SELDOM)
        self._whole = self._looked
        return GPU_METRICS

    async def _look(self) -> None:
        """Which series exist, and what the GPUs are: at most once in LOOK_S."""
        if time.monotonic() - self._looked < LOOK_S:
            return
        names = {name for ways in self._ways.values() for way in ways for name in (way.series, *way.plus)}
        every = {"__name__": "~" + "|".join(sorted(names | self._traffic.series())), **self._told.matchers}
        counts = await self._api.instant(f"count by (__name__) ({selector('', every)})", list)
        self._there = {labels(sample.metric).get("__name__", "") for sample in counts}
        if not self._age_ways():
            wanted = ", ".join(way.series for way in self._ways_of(("temperature_c", "power_w"))[:4])
            raise SourceError(f"it has none of the series that show a GPU ({wanted}, …): see its metric map")
        self._behind_s = time.time() - counts[0].value[0]
        of = self._map.facts
        by = dict.fromkeys([*self._by_gpu(), *of.name, *of.uuid, *of.bus_id, *of.driver])
        self._identity = await self._api.instant(f"max by ({','.join(by)}) ({self._shown('{}')})", self._identified)
        self._facts = self._columns(GPU_FACTS, await self._values(self._ways_of(GPU_FACTS)))
        self._looked = time.monotonic()

    def _age_query(self) -> str:
        return f"max by ({','.join(self.places.node_labels)}) ({self._shown('timestamp({})')})"

    def _shown(self, form: str) -> str:
        """Series that every GPU which is read has."""
        chosen = dict.fromkeys(self._selector(way) for way in self._age_ways())
        return " or ".join(form.format(one) for one in chosen)

    def _age_ways(self) -> list[Alternative]:
        return [way for way in self._ways_of(("temperature_c", "power_w")) if way.series in self._there]

    def _ways_of(self, metrics: Iterable[str]) -> list[Alternative]:
        return [way for metric in metrics for way in self._ways.get(metric, ())]

    def _selector(self, way: Alternative, series: str = "") -> str:
        return selector(series or way.series, {**self._told.matchers, **way.labels})

    def _by_gpu(self) -> list[str]:
        return list(dict.fromkeys([*self.places.node_labels, *self.places.gpu_labels]))

    async def _values(self, ways: Sequence[Alternative]) -> dict[str, dict[int, float]]:
        """The numbers of every series of `ways` that exists, by row."""
        asked: dict[str, str] = {}
        for way in ways:
            for name in (way.series, *way.plus):
                if name in self._there:
                    query = f"max by ({','.join(self._by_gpu())}) ({self._selector(way, name)})"
                    asked[key_of(name, way.labels)] = query
        gate = asyncio.Semaphore(AT_ONCE)

        async def ask(query: str) -> dict[int, float]:
            async with gate:
                return await self._api.instant(query, self.places.numbers)

        tasks = [asyncio.ensure_future(ask(query)) for query in asked.values()]
        try:
            return dict(zip(asked, await asyncio.gather(*tasks), strict=True))
        finally:
            for task in tasks:
                task.cancel()

    def _newest(self, samples: Iterable[Sample]) -> dict[int, tuple[float, float]]:
        """By node: the time of its newest sample, and its age when it was asked, s; both by the server's clock."""
        out: dict[int, tuple[float, float]] = {}
        for sample in samples:
            of = labels(sample.metric)
            node, at = self.places.node(of), number(sample.value[1])
            if node is not None and at > out.get(node, (0.0, 0.0))[0]:
                out[node] = (at, max(0.0, sample.value[0] - at))
                self._seen[node].host = host_in(of, self.places.node_labels)
        return out

    def _identified(self, samples: Iterable[Sample]) -> dict[int, dict[str, str]]:
        out = {}
        for sample in samples:
            row = self.places.row(sample.metric)
            if row is not None:
                out[row] = labels(sample.metric)
        return out

    def _columns(self, metrics: Iterable[str], found: dict[str, dict[int, float]]) -> dict[str, tuple[Floats, Kinds]]:
        rows = len(self.places.rows)
        return {m: combined(self._ways[m], found, rows) for m in metrics if m in self._ways}

    # What is told.

    def _silent(self, store: Store, node: int, seen: _Seen, now: float) -> None:
        """No series of a node: what was read of it is stale at once, and gone after a while."""
        name = self.places.names[node]
        if seen.sampled is not None and now - seen.sampled < GONE_S:
            if seen.silent is None:
                seen.silent = NodeState.STALE
                store.set_state(name, NodeState.STALE, "its series ended", now)
        elif seen.silent is not NodeState.DOWN:
            seen.silent = NodeState.DOWN
            told = f"Prometheus at {self._where} has no series of it; nodes are told by {self._label_names()}"
            store.set_state(name, NodeState.DOWN, told, now)

    def _label_names(self) -> str:
        return ", ".join(self.places.node_labels)

    async def _hand_over(
        self, store: Store, fresh: list[int], found: dict[str, tuple[Floats, Kinds]], traffic: dict[int, NodeTraffic]
    ) -> None:
        """Write fresh nodes into the store, a few at a time, so that the screen stays quick."""
        slots, rows = self.places.slots(), len(self.places.rows)
        columns = {name: _readings(*column, rows) for name, column in found.items()}
        self._sent |= {name for name, (_, kinds) in found.items() if kinds.any()}
        alive = np.any([kinds != MISSING for _, kinds in found.values()], axis=0)
        self._answered |= {int(row) for row in np.flatnonzero(alive)}
        for count, node in enumerate(fresh):
            seen, name = self._seen[node], self.places.names[node]
            assert seen.sampled is not None
            if seen.looked != (self._looked, len(slots[node])):
                seen.looked = (self._looked, len(slots[node]))
                hello = self._greeting(slots[node], seen)
                if seen.greeting is None or _who(hello) != _who(seen.greeting):
                    seen.greeting = hello
                    store.apply(name, hello, seen.sampled)
            lost = [slot for slot, row in slots[node] if row in self._answered and not alive[row]]
            gpus = {m: [columns[m][row] for _, row in slots[node]] for m in columns if m in self._sent}
            store.apply(name, self._tick(node, seen, gpus, lost, traffic.get(node, NodeTraffic())), seen.sampled)
            if count % YIELD_NODES == YIELD_NODES - 1:
                await asyncio.sleep(0)

    def _tick(self, node: int, seen: _Seen, gpus: dict[str, list[Reading]], lost: list[int], of: NodeTraffic) -> Tick:
        trouble = None
        if node in self.places.ambiguous:
            one, other = self.places.ambiguous[node]
            trouble = f"{one} and {other} both could be this node: choose with node_label or matchers"
        links = None if of.facts == seen.links else of.facts
        seen.links = of.facts
        seen.ticks += 1
        names = tuple(self._bus(self.places.rows[node, slot]) or f"slot {slot}" for slot in lost)
        assert seen.sampled is not None
        return Tick(
            seen.ticks, seen.sampled, gpus, links, of.rx_mb_s, of.tx_mb_s, load=of.load, trouble=trouble, lost=names
        )

    def _greeting(self, slots: list[tuple[int, int]], seen: _Seen) -> Hello:
        told = self._identity.get(slots[0][1], {}) if slots else {}
        return Hello(
            1,
            seen.host,
            tuple(self._gpu(slot, row) for slot, row in slots),
            driver=_first(told, self._map.facts.driver),
            reader="Prometheus",
            because="no ssh address is given",
        )

    def _gpu(self, slot: int, row: int) -> GpuFacts:
        told, of = self._identity.get(row, {}), self._map.facts
        numbers: dict[str, Any] = {}
        for name, (values, kinds) in self._facts.items():
            if row < len(values) and kinds[row] != MISSING:
                numbers[name] = "error" if kinds[row] == ERROR else float(values[row])
        return GpuFacts(slot, name=_first(told, of.name), uuid=_first(told, of.uuid), bus_id=self._bus(row), **numbers)

    def _bus(self, row: int) -> str | None:
        return _first(self._identity.get(row, {}), self._map.facts.bus_id)

    # What was before.

    async def backfill(self, store: Store, seconds: float) -> None:
        """Give the store what its history's metrics were in the last `seconds`, before anything is published."""
        await self._look()
        count = max(1, min(HISTORY_SAMPLES, int(seconds / self.step_s)))
        ends = time.time() - self._behind_s
        times: Floats = np.asarray(ends - self.step_s * np.arange(count - 1, -1, -1), float)
        by = ",".join(self._by_gpu())
        columns = {}
        for metric in HISTORY_METRICS:
            ways = [way for way in self._ways.get(metric, ()) if way.series in self._there]
            forms = [(way, f"max by ({by}) (last_over_time({{}}[{int(2000 * self.step_s)}ms]))") for way in ways]
            queries = [(way.scale, form.format(self._selector(way))) for way, form in forms if not way.plus]
            found = await past(self._api, self.places, metric, queries, times, self.step_s)
            columns[metric] = np.full((count, self._all_rows), np.nan)
            columns[metric][:, self._rows_of_all] = found
        store.backfill(np.asarray(times + self._behind_s, float), columns)


def _rows_in_store(cluster: Cluster) -> list[int]:
    """The store's rows of the GPUs that the inventory expects on nodes without an address."""
    out: list[int] = []
    first = 0
    for node in cluster.nodes:
        gpus = cluster.type_of(node).gpus
        if not node.ssh and not node.local:
            out += range(first, first + gpus)
        first += gpus
    return out


def _readings(values: Floats, kinds: Kinds, rows: int) -> list[Reading]:
    """A column as readings: a number, None for what is missing, "error" for what is none."""
    if len(values) < rows:  # GPUs that showed up while it was asked
        values, kinds = np.pad(values, (0, rows - len(values))), np.pad(kinds, (0, rows - len(kinds)))
    out = values.astype(object)
    out[kinds == MISSING], out[kinds == ERROR] = None, "error"
    found: list[Reading] = out.tolist()
    return found


def _who(hello: Hello) -> tuple[object, ...]:
    """What calls for a new greeting: other GPUs, or figures that were not known. Sums that move a little do not."""
    known = [tuple(getattr(g, name) is not None for name in GPU_FACTS) for g in hello.gpus]
    return hello.hostname, hello.driver, tuple((g.index, g.name, g.uuid, g.bus_id) for g in hello.gpus), tuple(known)


def _first(of: dict[str, str], names: Sequence[str]) -> str | None:
    return next((of[name] for name in names if of.get(name)), None)
