"""A running control on its way to a file: telemetry, jobs, alarms and actions, written beside the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from engine.act import alarm, audit
from engine.act.action import Ticket
from engine.act.alarm import Priority, Raised, State, What
from engine.control.control import Control
from engine.control.events import Event, JobChanged, Published, TicketChanged
from engine.job.status import JobStatus
from engine.profile import Cluster
from engine.profile.cluster import Ssh
from engine.record.recording import MOST_BYTES, THIN_AFTER_S, WAITING, Recorder
from engine.record.schema import RecordError
from engine.telemetry.snapshot import NodeState, NodeStatus, Process, Snapshot

BEHIND = 30
"""Seconds that may wait for a slow disk; further ones are not recorded."""
Processes = tuple[tuple[Process, ...], ...]
"""Of each GPU of a node."""
_Written = tuple[float, str, str, dict[str, Any]]


class Recording:
    """Records a control from now on; RecordError when the file cannot be begun. A tap of the control: trouble with
    the disk is an alarm there, and is over when there is room again."""

    def __init__(
        self,
        control: Control,
        path: Path,
        thin_after_s: float = THIN_AFTER_S,
        most_bytes: int = MOST_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        cluster = control.cluster
        told = inventory(cluster)
        self._recorder = Recorder(path, cluster.name, cluster.slots, told, thin_after_s, most_bytes)
        self._control, self.path, self.seconds, self.lost = control, path, 0, 0
        self.trouble = ""
        self._thread = ThreadPoolExecutor(1, "recording")
        self._queued, self._closed = 0, False
        self._nodes: dict[str, object] = {}
        self._facts: dict[str, object] = {}
        self._facts_of: object = None
        self._processes: dict[str, Processes] = {}
        self._processes_of: object = None
        self._jobs: dict[str, JobStatus] = {}
        self._steps: dict[str, JobStatus] = {}
        self._waiting: list[_Written] = []
        self._own: set[str] = set()
        self._log_path, self._log_read = control.audit_path, _size(control.audit_path)
        self._stands()
        control.alarming.heard = self._alarm
        control.taps.append(self)

    def _stands(self) -> None:
        """What is so already when the recording begins."""
        control, now = self._control, self._clock()
        for a in control.alarming.standing:
            self._alarm(alarm.Event(a.since, a.key, What.RAISED, a.priority, a.text, a.node), now)
            if a.state is State.ACKNOWLEDGED:
                self._alarm(alarm.Event(now, a.key, What.ACKNOWLEDGED, by=a.by), now)
        for s in control.alarming.shelved:
            event = alarm.Event(now, s.key, What.SHELVED, Priority.NOTICE, s.text, "", s.by, s.until, s.reason)
            self._alarm(event, now)
        for ticket in control.tickets:
            self._ticket(ticket)
        for status in control.jobs.statuses.values():
            self._steps[status.key] = status

    # Heard in the event loop.

    def heard(self, event: Event) -> None:
        if isinstance(event, JobChanged):
            self._steps[event.job.key] = event.job
        elif isinstance(event, TicketChanged):
            self._ticket(event.ticket)
            self._send(None)
        elif isinstance(event, Published):
            self._take(event.snapshot)

    def amiss(self) -> list[Raised]:
        if not self.trouble:
            return []
        return [Raised("recording", Priority.WARNING, f"The recording misses seconds: {self.trouble}")]

    def close(self) -> None:
        """Write what is on its way and close the file; the control goes on."""
        if self._closed:
            return
        self._closed = True
        self._control.alarming.heard = lambda _: None
        self._thread.shutdown(wait=True)
        if self in self._control.taps:
            self._control.taps = [tap for tap in self._control.taps if tap is not self]
        try:
            for time_s, kind, subject, data in self._waiting:
                self._recorder.event(time_s, kind, subject, data)
            self._recorder.close()
        except RecordError as error:
            self.trouble = str(error)

    def _alarm(self, event: alarm.Event, at: float | None = None) -> None:
        self._waiting.append((at or event.time, "alarm", event.key, msgspec.to_builtins(event)))

    def _ticket(self, ticket: Ticket) -> None:
        self._own.add(ticket.id)
        told = audit.record(self._control.cluster.name, ticket)
        told |= {"scope": ticket.proposal.scope, "notes": ticket.proposal.notes}
        self._waiting.append((self._clock(), "ticket", ticket.id, told))

    def _others(self, now: float) -> None:
        """Actions of other consoles and commands of this user, as they come into the common log."""
        if _size(self._log_path) <= self._log_read:
            return
        with suppress(OSError), self._log_path.open("rb") as file:
            file.seek(self._log_read)
            data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._log_read += len(whole)
            for line in whole.splitlines():
                with suppress(msgspec.MsgspecError):
                    told = msgspec.json.decode(line, type=dict[str, Any])
                    if told.get("cluster") == self._control.cluster.name and str(told.get("id")) not in self._own:
                        self._waiting.append((now, "ticket", str(told.get("id")), told))

    def _take(self, snapshot: Snapshot) -> None:
        self._others(snapshot.time)
        for status in self._steps.values():
            self._job(status, snapshot.time)
        self._steps = {}
        self._waiting += self._of_nodes(snapshot)
        self._send(snapshot)

    def _job(self, status: JobStatus, now: float) -> None:
        """All of a job when more than its step is another, else the step alone."""
        still = replace(status, step=0, step_s=None, loss=None, tokens=None, last_step=None, recent_step_s=())
        if self._jobs.get(status.key) != still:
            self._jobs[status.key] = still
            self._waiting.append((now, "job", status.key, msgspec.to_builtins(status)))
        else:
            step = {name: getattr(status, name) for name in STEP}
            self._waiting.append((now, "step", status.key, step))

    def _of_nodes(self, snapshot: Snapshot) -> list[_Written]:
        out: list[_Written] = []
        for node in snapshot.nodes:
            told = _told(node)
            if self._nodes.get(node.name) != told:
                self._nodes[node.name] = told
                out.append((snapshot.time, "node", node.name, {**told, "reason": node.reason, "since": node.since}))
        if self._facts_of is not snapshot.gpus.facts:
            self._facts_of = snapshot.gpus.facts
            for node in snapshot.nodes:
                facts = snapshot.gpus.facts[node.rows.start : node.rows.stop]
                if self._facts.get(node.name) != facts:
                    self._facts[node.name] = facts
                    out.append((snapshot.time, "facts", node.name, {"gpus": msgspec.to_builtins(facts)}))
        if self._processes_of is not snapshot.gpus.processes:
            self._processes_of = snapshot.gpus.processes
            for node in snapshot.nodes:
                processes = snapshot.gpus.processes[node.rows.start : node.rows.stop]
                known = self._processes.get(node.name, ())
                if processes != known and _who(processes) != _who(known):  # their memory alone is no news
                    self._processes[node.name] = processes
                    out.append((snapshot.time, "processes", node.name, {"gpus": msgspec.to_builtins(processes)}))
        return out

    # Written by the thread.

    def _send(self, snapshot: Snapshot | None) -> None:
        if self._closed:
            return
        if self._queued >= BEHIND:
            self.lost += snapshot is not None
            self.trouble = f"{self.path}: the disk is too slow"
            del self._waiting[:-WAITING]
            return
        events, self._waiting = self._waiting, []
        self._queued += 1
        self._thread.submit(self._write, snapshot, events)

    def _write(self, snapshot: Snapshot | None, events: list[_Written]) -> None:
        try:
            for event in events:
                self._recorder.event(*event)
            if snapshot is None:
                self._recorder.flush()
            else:
                self._recorder.write(snapshot)
                self.seconds += 1
            self.trouble = ""
        except RecordError as error:
            self.lost += snapshot is not None
            self.trouble = str(error)
        except Exception as error:  # a fault of ours must be seen, not lost with the thread's result
            self.trouble = f"rackside itself failed here: {error!r}"
        finally:
            self._queued -= 1


STEP = ("step", "step_s", "loss", "tokens", "last_step")


def inventory(cluster: Cluster) -> str:
    """A cluster as a recording keeps it: whoever is given the file learns no addresses."""
    nodes = tuple(msgspec.structs.replace(n, ssh=None, local=False) for n in cluster.nodes)
    kept = msgspec.structs.replace(cluster, nodes=nodes, ssh=Ssh(), prometheus=None, slurm=False)
    return msgspec.json.encode(kept).decode()


def _who(processes: Processes) -> list[list[tuple[object, ...]]]:
    """Who runs on each GPU; none at all is nobody, however many GPUs there are."""
    who: list[list[tuple[object, ...]]] = [[(p.pid, p.name, p.rank, p.slurm_job) for p in gpu] for gpu in processes]
    return who if any(who) else []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _told(node: NodeStatus) -> dict[str, Any]:
    """What a node is, but for what changes with every second."""
    return {
        "state": node.state.value,
        "hostname": node.hostname,
        "driver": node.driver,
        "reader": node.reader,
        "because": node.because,
        "troubles": node.troubles,
        "why": node.reason if node.state is not NodeState.STALE else "",
    }
