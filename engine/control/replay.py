"""A recording as the console holds it: a control whose now is a moment of the past. Nothing can be done in it."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np

from engine.act.action import Action, Outlook, Proposal, Stage, Ticket
from engine.act.alarm import Alarm, Event, Raised, What
from engine.act.alarmlog import AlarmLog
from engine.act.annunciator import Annunciator
from engine.act.audit import Audit, record
from engine.control.alarming import Alarming
from engine.control.arming import Arming
from engine.control.control import Control, Refused
from engine.control.events import Published
from engine.control.watch import Watch
from engine.job.status import JobStatus
from engine.model import observer
from engine.profile import Cluster, catalog
from engine.record.past import TOLD, Past
from engine.record.reading import Reader, Told
from engine.record.schema import Floats, RecordError
from engine.telemetry.snapshot import Snapshot

NOTHING_DONE = "This is a recording: nothing can be done in it."
SPEEDS = (1.0, 10.0, 60.0)
FRAME_S = 0.25
"""How often what plays is drawn anew."""
WARM_S, GAP_S = 180.0, 60.0
"""The twin sees so much of what was before a moment; a pause in the recording starts it anew."""
_KINDS = {kind.__name__.lower(): kind for kind in get_args(Action)}


class Replay(Control):
    """Opens at the beginning, paused. `seek`, `step` and `jump` move; `running` plays. RecordError when the file is no
    recording, or one without an inventory."""

    def __init__(self, path: Path) -> None:
        self.reader = Reader(path)
        try:
            cluster = msgspec.json.decode(self.reader.inventory, type=Cluster)
        except msgspec.MsgspecError as error:
            raise RecordError(f"{path} holds no inventory that can be read: {error}.") from None
        nowhere = Path(os.devnull)
        super().__init__(cluster, {}, catalog.thermal_policy("margin"), Audit(nowhere), "replay", read_only=True)
        self.arming = Arming(time.monotonic, True, NOTHING_DONE)
        self.alarming = self._past_alarms = PastAlarms(cluster, nowhere)
        self.playing, self.speed = False, SPEEDS[0]
        self.position = -math.inf
        self.marks: tuple[tuple[float, str], ...] = ()
        self._past = self._store()
        self._mark()
        self.seek(self.reader.start)

    @property
    def start(self) -> float:
        return self.reader.start

    @property
    def end(self) -> float:
        return self.reader.end

    def _mark(self) -> None:
        """Where alarms were raised and actions confirmed."""
        found, known = [], set[str]()
        for event in self.reader.events(-math.inf, math.inf, "alarm", "ticket"):
            if event.time <= self.start:
                continue  # it stood already
            if event.kind == "alarm" and event.data.get("what") == What.RAISED.value:
                found.append((event.time, "alarm"))
            elif event.kind == "ticket" and event.subject not in known:
                known.add(event.subject)
                found.append((event.time, "action"))
        self.marks = tuple(sorted(found))

    # Moving.

    def seek(self, moment: float) -> None:
        """Show a moment; what lies outside becomes the first or the last one."""
        before, self.position = self.position, min(max(moment, self.start), self.end)
        at, columns = self.reader.moment(self.position)
        onward = 0 <= self.position - before <= GAP_S
        if onward:
            told = list(self.reader.events(before, self.position, *TOLD, "alarm"))
        else:
            self.store = self._past = self._store()
            self._past_alarms.forget()
            told = [event for kind in TOLD for event in self.reader.newest(self.position, kind)]
            told += self.reader.events(-math.inf, self.position, "alarm")
        for event in told:
            if event.kind == "alarm":
                self._past_alarms.told(event)
            else:
                self._past.told(event)
        last = self.snapshot
        self.snapshot = self._past.show(at, columns)
        self._past_alarms.show(self.snapshot)
        self._look(last, onward)
        self._follow_jobs()
        self.tickets = tickets(self.reader.newest(self.position, "ticket"))
        self._tell(Published(self.snapshot))

    def _store(self) -> Past:
        nodes = [(node.name, self.cluster.type_of(node).gpus) for node in self.cluster.nodes]
        return Past(self.reader, nodes, self.cluster.poll_interval_s)

    def _look(self, last: Snapshot, onward: bool) -> None:
        """Let the twin see it, and after a leap what was before it."""
        now = self.snapshot.time
        if onward:
            self.watch.look(self.snapshot, max(0.0, now - last.time))
            return
        self.watch = PastWatch(self.cluster)
        names = ("temperature_c", "power_w", "power_limit_w")
        found = self.reader.window(now - WARM_S, now, names)
        every = 1 + len(found.gpus) // 512  # of a large rack fewer moments, so that a leap stays one
        previous = math.nan
        for at in [*range(len(found.times))[:-1:every], len(found.times) - 1][-int(WARM_S) :]:
            seconds = 1.0 if math.isnan(previous) else float(found.times[at]) - previous
            if seconds > GAP_S:
                self.watch = PastWatch(self.cluster)
            celsius, watts, limit_w = (found.metrics[name][at] for name in names)
            self.watch.take(celsius, watts, limit_w, seconds)
            previous = float(found.times[at])

    def _follow_jobs(self) -> None:
        """The jobs as they were last heard of, in the order in which they appeared."""
        found = {}
        for event in self.reader.newest(self.position, "job"):
            with suppress(msgspec.ValidationError, TypeError):
                status = msgspec.convert(dict(event.data), JobStatus)
                step = self.reader.last(self.position, "step", event.subject)
                if step is not None and step.id > event.id:
                    status = replace(status, **step.data)
                found[event.subject] = status
        self.jobs.statuses = found

    def step(self, seconds: float) -> None:
        """Go on, or back, by so much."""
        self.seek(self.position + seconds)

    def jump(self, by: int) -> str:
        """Go to the next alarm or action (1), or to the one before (-1); returns why not, or an empty string."""
        times = [t for t, _ in self.marks]
        ahead = [t for t in times if t > self.position] if by > 0 else [t for t in times[::-1] if t < self.position]
        if not ahead:
            return f"There is no alarm or action {'after' if by > 0 else 'before'} this moment."
        self.seek(ahead[0])
        return ""

    def faster(self, by: int) -> None:
        """The next speed, or the one before."""
        self.speed = SPEEDS[max(0, min(len(SPEEDS) - 1, SPEEDS.index(self.speed) + by))]

    def play(self) -> None:
        """Play or pause; at its end it begins anew."""
        self.playing = not self.playing
        if self.playing and self.position >= self.end and not self.refresh():
            self.seek(self.start)

    def refresh(self) -> bool:
        """Whether the file has become longer."""
        longer = self.reader.refresh()
        if longer:
            self._mark()
        return longer

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        playing = asyncio.create_task(self._play(), name="play")
        try:
            yield
        finally:
            playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
            self.reader.close()

    async def _play(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(FRAME_S)
            now = time.monotonic()
            elapsed, last = now - last, now
            if self.playing:
                self._onward(min(elapsed, 4 * FRAME_S) * self.speed)

    def _onward(self, seconds: float) -> None:
        """Play so much further; nothing is drawn while no new second is reached."""
        goal = self.position + seconds
        if goal >= self.end and not self.refresh():
            self.playing = False
        if goal < self.end and goal < self.snapshot.time + self.cluster.poll_interval_s:
            self.position = goal
            return
        self.seek(goal)

    # What a control does that is none any more.

    def confirm(self, proposal: Proposal, steal: str = "") -> Ticket:
        raise Refused(NOTHING_DONE)

    def amiss(self) -> list[Raised]:
        return []

    def logged(self) -> Sequence[Mapping[str, Any]]:
        return [record(self.cluster.name, ticket) for ticket in self.tickets]


class PastWatch(Watch):
    """The twin alone: what it found amiss is in the recording, and need not be found again."""

    def take(self, celsius: Floats, watts: Floats, limit_w: Floats, seconds: float) -> None:
        if seconds > 0:
            self.twin = observer.advance(self.twin, celsius, watts, seconds)
            self.watched_s += seconds
            self._limit_w = np.where(np.isnan(limit_w), np.inf, limit_w)
            self._forecast = None  # made when it is asked for


class PastAlarms(Alarming):
    """The alarms as they stood at a moment. Nobody can decide anything about them any more."""

    def __init__(self, cluster: Cluster, nowhere: Path) -> None:
        super().__init__(cluster, AlarmLog(nowhere, cluster.name), "replay")
        self._racks = {n.name: n.rack for n in cluster.nodes}
        self._rows: dict[tuple[str, str], int] = {}
        self._layout: tuple[range, ...] = ()

    @property
    def standing(self) -> tuple[Alarm, ...]:
        return tuple(replace(a, row=self._row(a.key)) for a in self._state.alarms)

    def _row(self, key: str) -> int:
        """The snapshot's row of an alarm of one GPU, whose key ends in node and slot."""
        words = key.split(":")
        return self._rows.get((words[1], words[2]), -1) if len(words) == 3 else -1

    def forget(self) -> None:
        """Begin anew, for a moment that does not follow the last one."""
        self._state = Annunciator(self._racks)

    def told(self, event: Told) -> None:
        """An event that was recorded."""
        with suppress(msgspec.ValidationError, TypeError):
            self._state.restore([msgspec.convert(dict(event.data), Event)])

    def show(self, snapshot: Snapshot) -> None:
        layout = tuple(node.rows for node in snapshot.nodes)
        if layout != self._layout:
            self._layout = layout
            self._rows = {(n.name, str(s)): row for n in snapshot.nodes for s, row in enumerate(n.rows)}

    def begin(self) -> None: ...

    def look(self, raised: Sequence[Raised], now: float) -> None: ...

    def _decide(self, event: Event) -> None: ...


def tickets(events: Sequence[Told]) -> tuple[Ticket, ...]:
    """Actions as they were recorded, each at its newest stage, oldest first."""
    found = []
    for event in events:
        with suppress(KeyError, TypeError, ValueError, msgspec.ValidationError):
            found.append(_ticket(event.data))
    return tuple(sorted(found, key=lambda t: t.time))


def _ticket(told: Any) -> Ticket:
    asked = msgspec.convert(told["asked"], _KINDS[told["action"]], str_keys=True)
    outlook = {name: _outlook(told["predicted"][name]) for name in ("before", "after")}
    proposal = Proposal(
        str(told["title"]),
        asked,
        outlook["before"],
        outlook["after"],
        str(told.get("scope", "")),
        notes=tuple(told.get("notes", ())),
        undoes=told.get("undoes"),
    )
    measured = told.get("measured")
    return Ticket(
        str(told["id"]),
        float(told["time"]),
        str(told["operator"]),
        proposal,
        Stage(told["stage"]),
        told.get("step"),
        str(told.get("reason") or ""),
        measured=None if measured is None else _outlook(measured),
    )


def _outlook(told: Any) -> Outlook:
    band = told.get("peak_band_c")
    return Outlook(**{**told, "gpu_w": None, "peak_band_c": tuple(band) if band else None})
