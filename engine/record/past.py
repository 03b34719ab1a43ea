"""The store of a recording: it publishes the snapshot of any moment, and histories that end there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress

import msgspec
import numpy as np

from engine.record.reading import Reader, Told
from engine.record.schema import STEPS, Floats
from engine.telemetry.links import Labels
from engine.telemetry.reading import CODES, GpuFacts, Hello, ReadingState
from engine.telemetry.snapshot import NodeState, Process, Snapshot
from engine.telemetry.store import COLUMNS, HISTORY_SAMPLES, Store

_PLACES = {name: COLUMNS.index(name) for name in STEPS if name in COLUMNS}
"""What a snapshot's GPU table has of a recording."""
TOLD = ("node", "facts", "processes", "links", "errors")
"""Kinds of events that say what a node is."""


class Past(Store):
    """`nodes` as in a Store. Tell it the events of nodes first, then `show` the moment."""

    def __init__(self, reader: Reader, nodes: Sequence[tuple[str, int]], interval_s: float) -> None:
        super().__init__(nodes, interval_s, history=1)
        self._reader, self._interval_s, self._now = reader, interval_s, reader.start
        self._row_of = {gpu: row for row, gpu in enumerate(reader.gpus)}

    def told(self, event: Told) -> None:
        """An event of a node (TOLD); what cannot be understood is left out."""
        if event.subject not in self._nodes:
            return
        with suppress(KeyError, TypeError, ValueError, msgspec.ValidationError):
            if event.kind == "facts":
                gpus = msgspec.convert(event.data["gpus"], tuple[GpuFacts, ...])
                of = self._nodes[event.subject]
                self.apply(event.subject, Hello(1, of.hostname, gpus, driver=of.driver), event.time)
            elif event.kind == "node":
                self._node(event)
            elif event.kind == "processes":
                gpus = msgspec.convert(event.data["gpus"], tuple[tuple[Process, ...], ...])
                self._nodes[event.subject].processes, self._processes = gpus, None
            elif event.kind == "links":
                self._nodes[event.subject].links.restore(msgspec.convert(event.data, Labels), event.data["peak"])
                self._link_labels = None
            elif event.kind == "errors":
                self._nodes[event.subject].links.count(event.data["errors"])

    def _node(self, event: Told) -> None:
        data, of = event.data, self._nodes[event.subject]
        self.set_state(event.subject, NodeState(data["state"]), str(data.get("reason", "")), event.time)
        of.since = float(data.get("since", event.time))
        of.hostname, of.driver = str(data.get("hostname", "")), str(data.get("driver", ""))
        of.reader, of.because = str(data.get("reader", "")), str(data.get("because", ""))
        of.troubles = tuple(str(t) for t in data.get("troubles", ()))

    def show(self, time: float, columns: Mapping[str, Floats]) -> Snapshot:
        """The snapshot of a moment, of columns in the order of the recording's rows."""
        self._now = time
        ours, theirs = [], []
        for of in self._nodes.values():
            if of.state in (NodeState.LIVE, NodeState.ERROR):
                of.last_sample = time
            for slot, row in enumerate(of.rows):
                known = self._row_of.get((of.name, slot))
                if known is not None:
                    ours.append(row)
                    theirs.append(known)
        for name, place in _PLACES.items():
            values = np.full(self._values.shape[1], np.nan)
            values[ours] = columns[name][theirs]
            self._values[place] = values
            self._codes[place] = np.where(np.isnan(values), CODES[ReadingState.ABSENT], 0)
        self._carry()
        return self.publish(time)

    def history(self, metric: str, row: int) -> tuple[Floats, Floats]:
        """(unix times, values) of one GPU up to the moment that is shown."""
        known = self._row_of.get(self._gpu(row))
        if known is None or metric not in STEPS:
            return np.zeros(0), np.zeros(0)
        begin = self._now - HISTORY_SAMPLES * self._interval_s
        found = self._reader.window(begin, self._now, [metric], row=known)
        return found.times[-HISTORY_SAMPLES:], found.metrics[metric][-HISTORY_SAMPLES:, 0]

    def _carry(self) -> None:
        """What each link carried at this moment, where the recording has that of the links which are there."""
        nodes = list(self._nodes.values())
        ends = np.cumsum([len(of.links) for of in nodes])
        found = self._reader.rates(self._now)
        if found is None or found.shape[1] != ends[-1]:
            found = np.full((2, ends[-1]), np.nan)
        for of, (rx, tx) in zip(nodes, np.split(found, ends[:-1], axis=1), strict=True):
            of.links.rx, of.links.tx = rx, tx

    def _gpu(self, row: int) -> tuple[str, int]:
        for of in self._nodes.values():
            if row in of.rows:
                return of.name, row - of.rows.start
        return "", -1
