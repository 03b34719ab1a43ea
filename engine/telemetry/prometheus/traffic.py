"""The links and the load of nodes, from the rates of a Prometheus API's counters."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.profile.metrics import LinkSeries, MetricMap
from engine.telemetry.prometheus.api import Api, Sample, labels, number, quoted, selector
from engine.telemetry.prometheus.places import Places
from engine.telemetry.reading import LinkFacts

ACTIVE = 4.0
"""The kernel's number of an InfiniBand port that is up."""
RATE_SAMPLES = 4
"""Samples among which the last two are looked for, so that a lost scrape leaves a rate standing."""

Key = tuple[int, str, str]


@dataclass
class NodeTraffic:
    """One node: `facts`, and MB/s of each; None where none is known."""

    facts: tuple[LinkFacts, ...] = ()
    rx_mb_s: list[float | None] = field(default_factory=list)
    tx_mb_s: list[float | None] = field(default_factory=list)
    load: float | None = None


class Traffic:
    """Asks for what the nodes' links carry."""

    def __init__(self, api: Api, found: MetricMap, places: Places, matchers: Mapping[str, str], step_s: float) -> None:
        self._api, self._map, self._places = api, found, places
        self._matchers = dict(matchers)
        self._window = f"{int(max(60.0, RATE_SAMPLES * step_s) * 1000)}ms"

    def series(self) -> set[str]:
        """Every series that is asked for."""
        of = {name for link in self._map.links for name in (link.rx, link.tx, link.capacity, link.state) if name}
        return of | set(self._map.load)

    async def read(self, there: set[str]) -> dict[int, NodeTraffic]:
        """By number of the node, from the series that are `there`."""
        out: dict[int, NodeTraffic] = {}
        for link in self._map.links:
            if link.rx in there or link.tx in there:
                await self._links(link, there, out)
        for name in self._map.load:
            if name in there:
                await self._loads(name, out)
        return out

    async def _loads(self, series: str, out: dict[int, NodeTraffic]) -> None:
        query = f"max by ({','.join(self._places.node_labels)}) ({selector(series, self._matchers)})"
        for sample in await self._api.instant(query, list):
            node, value = self._places.node(labels(sample.metric)), number(sample.value[1])
            if node is not None and math.isfinite(value):
                out.setdefault(node, NodeTraffic()).load = value

    async def _links(self, link: LinkSeries, there: set[str], out: dict[int, NodeTraffic]) -> None:
        names = [("rx", link.rx), ("tx", link.tx), ("capacity", link.capacity), ("state", link.state)]
        asked = [(what, self._query(link, what, name)) for what, name in names if name in there and name]
        answers = await asyncio.gather(*(self._api.instant(q, lambda s: self._by_link(link, s)) for _, q in asked))
        found: dict[int, dict[Key, dict[str, float]]] = {}
        for (what, _), answer in zip(asked, answers, strict=True):
            for (node, key), value in answer.items():
                found.setdefault(node, {}).setdefault(key, {})[what] = value
        for node, of in found.items():
            carried = {key: values for key, values in of.items() if "rx" in values or "tx" in values}
            _add(out.setdefault(node, NodeTraffic()), carried)

    def _query(self, link: LinkSeries, what: str, series: str) -> str:
        by = [*self._places.node_labels, *(self._places.gpu_labels if link.gpu else ()), *link.name]
        inner = selector(series, self._matchers)
        if link.only:
            inner = f"{inner[:-1]}{',' if self._matchers else ''}{link.name[0]}=~{quoted(f'(?:{link.only}).*')}}}"
        if link.counter and what in ("rx", "tx"):
            inner = f"irate({inner}[{self._window}])"  # of the last two: a rate over all of it is low while it fills
        return f"max by ({','.join(dict.fromkeys(by))}) ({inner})"

    def _by_link(self, link: LinkSeries, samples: Sequence[Sample]) -> dict[tuple[int, Key], float]:
        out: dict[tuple[int, Key], float] = {}
        for sample in samples:
            of = labels(sample.metric)
            node, slot = self._places.node(of), self._places.slot(of) if link.gpu else -1
            value = number(sample.value[1])
            if node is not None and slot is not None and math.isfinite(value):
                name = ":".join(of[label] for label in link.name if of.get(label)) or link.kind
                out[node, (slot, link.kind, name)] = value
        return out


def _add(to: NodeTraffic, of: Mapping[Key, Mapping[str, float]]) -> None:
    """Append links in a lasting order."""
    for (gpu, kind, name), values in sorted(of.items()):
        state, capacity = values.get("state", ACTIVE), values.get("capacity", 0.0)
        gb_s = capacity / 1e9 if capacity > 0 else None
        fact = LinkFacts(gpu, kind, name, "active" if state == ACTIVE else "inactive", gb_s)
        to.facts = (*to.facts, fact)
        to.rx_mb_s.append(values["rx"] / 1e6 if "rx" in values else None)
        to.tx_mb_s.append(values["tx"] / 1e6 if "tx" in values else None)
