"""The one object a screen holds: it owns the tasks, publishes snapshots, and carries out what was confirmed."""

from __future__ import annotations

import asyncio
import shlex
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.act import held, propose, without_hook
from engine.act.action import (
    Action,
    Freeze,
    JobAction,
    NodeAction,
    Proposal,
    Requeue,
    Stage,
    Standstill,
    Ticket,
)
from engine.act.alarm import Alarm, Priority, Raised
from engine.act.alarmlog import AlarmLog
from engine.act.audit import Audit, AuditError, Tail
from engine.act.bands import Bands, learned
from engine.act.detect import causes
from engine.act.effect import Load, Rack
from engine.act.measure import Measuring
from engine.control import load, scheduler
from engine.control.alarming import Alarming
from engine.control.arming import Arming
from engine.control.conditions import conditions
from engine.control.discover import FoundJob
from engine.control.dispatch import Dispatch
from engine.control.events import Event, JobChanged, Published, Tap, TicketChanged
from engine.control.hookless import Hookless, of_slurm, pids_of
from engine.control.jobs import Jobs
from engine.control.restarting import restart_of
from engine.control.roles import Link, Role, carried, expected, roles
from engine.control.watch import Watch, on_snapshot
from engine.job.status import JobStatus
from engine.model.links import link_load
from engine.model.predict import Prediction
from engine.plan.compare import Compared, alternatives
from engine.plan.conditions import Conditions, limited, under
from engine.plan.export import FORMATS
from engine.plan.restart import Restart
from engine.profile import Cluster, Plan, Policy
from engine.telemetry.snapshot import Snapshot
from engine.telemetry.source import NodeSource
from engine.telemetry.store import Store


class Refused(Exception):
    """An action must not start: the console is not armed, or the proposal itself says why not."""


class Control:
    """Live state of one cluster. Use `async with control.running():`, then iterate `events()`."""

    def __init__(
        self,
        cluster: Cluster,
        sources: Mapping[str, NodeSource],
        policy: Policy,
        audit: Audit,
        operator: str,
        read_only: bool = False,
        alarms: Path | None = None,
    ) -> None:
        self.cluster, self.policy, self.operator = cluster, policy, operator
        self.sources = sources
        self.store = Store([(n.name, cluster.type_of(n).gpus) for n in cluster.nodes])
        self.snapshot: Snapshot = self.store.publish(time.time())
        log = AlarmLog(alarms or audit.path.with_name("alarms.jsonl"), cluster.name)
        self.alarming = Alarming(cluster, log, operator)
        self.tickets: tuple[Ticket, ...] = ()
        self.arming = Arming(time.monotonic, read_only)
        self.jobs = Jobs(sources, operator, lambda status: self._tell(JobChanged(status)))
        self.hookless = Hookless(cluster)
        self._dispatch = Dispatch(sources, self.jobs, self.hookless.run)
        self._audit, self._audit_trouble = audit, ""
        self._log = Tail(audit.path)
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self.taps: list[Tap] = []
        self._acting: set[asyncio.Task[None]] = set()
        self._measuring: dict[str, Measuring] = {}
        self._placed: tuple[object, ...] | None = None
        self._roles: dict[tuple[str, int], Role] = {}
        self._carried: dict[Link, str] = {}
        self._expected: tuple[object, object, dict[Link, float]] = (None, None, {})
        self.watch = Watch(cluster)
        self._bands = Bands()
        self._slowdown_c = [
            cluster.device_of(n).temperature_c.slowdown for n in cluster.nodes for _ in range(cluster.type_of(n).gpus)
        ]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Poll the nodes and watch the jobs for as long as the block runs; actions in flight are waited for."""
        self.alarming.begin()
        self._bands = learned(self._audit.read())
        found = await asyncio.to_thread(dict, self.sources)  # keys are answered while SSH loads
        tasks = [asyncio.create_task(source.run(self.store), name=f"poll {n}") for n, source in found.items()]
        tasks.append(asyncio.create_task(self._publish(), name="publish"))
        tasks.append(asyncio.create_task(self.hookless.follow(), name="Slurm"))
        try:
            yield
        finally:
            if self._acting:
                await asyncio.wait(self._acting, timeout=5)
            await self.jobs.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for tap in self.taps:
                tap.close()

    async def events(self) -> AsyncIterator[Event]:
        """What changes, as it changes."""
        while True:
            yield await self._events.get()

    def _tell(self, event: Event) -> None:
        self._events.put_nowait(event)
        for tap in self.taps:
            tap.heard(event)

    async def _publish(self) -> None:
        """One snapshot a poll interval, on a fixed grid."""
        interval, began, ticks = self.cluster.poll_interval_s, time.monotonic(), 0
        while True:
            ticks += 1
            await asyncio.sleep(max(0.0, began + ticks * interval - time.monotonic()))
            await self.look(time.time())

    async def look(self, now: float) -> None:
        """Publish what the nodes have told, and look at it."""
        before, self.snapshot = self.snapshot, self.store.publish(now)
        await asyncio.sleep(0)  # keys are answered between the steps of a look
        self.watch.look(self.snapshot, max(0.0, self.snapshot.time - before.time))
        await asyncio.sleep(0)
        self.jobs.look(self.snapshot)
        self._measure()
        self.alarming.look(self.amiss(), self.snapshot.time)
        self._tell(Published(self.snapshot))

    def _measure(self) -> None:
        """What came of the last action, while it is the one in force."""
        for ticket in [t for t in self.tickets if t.id in self._measuring]:
            measuring = self._measuring[ticket.id]
            found = measuring.look(self.snapshot.time, self.jobs.current, self._rack())
            if found is not None:
                self._update(replace(ticket, measured=found))
            if measuring.over or ticket.stage is not Stage.DONE:
                self._measuring.pop(ticket.id, None)

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """What an operator is shown, the most urgent first."""
        return self.alarming.standing

    def amiss(self) -> list[Raised]:
        """All that there is to alarm about in the newest snapshot."""
        points = self._slowdown_c
        rows = len(self.snapshot.gpus["temperature_c"])
        if rows != len(points):  # a node shows more or fewer GPUs than its type has: the lowest point guards them all
            points = [min(points)] * rows
        found = causes(self.snapshot, self.policy, points, self.jobs.troubles(), self.alarming.seen)
        found += on_snapshot(self.watch.raised(self.rack_and_load), self.cluster, self.snapshot)
        found += held.drifted(self.snapshot, self.tickets)
        if self._audit_trouble:
            found.append(Raised("audit", Priority.CRITICAL, self._audit_trouble))
        return [*found, *(raised for tap in self.taps for raised in tap.amiss())]

    # What could be done: pure proposals from the present state.

    def propose_throttle(
        self,
        label: str,
        cells: list[tuple[int, int]],
        step_w: float = 0.0,
        to_w: float | None = None,
        permanent: bool = False,
    ) -> Proposal:
        """Lower the limits of `cells`, (node number, slot) pairs, by `step_w` watts each, or set them to `to_w`."""
        selection = load.target(label, cells, self.cluster, self.snapshot)
        return self.foreseen(propose.throttle(self._rack(), self._load(), selection, step_w, to_w, permanent))

    def propose_clock(
        self,
        label: str,
        cells: list[tuple[int, int]],
        share: float = 1.0,
        to_mhz: float | None = None,
        permanent: bool = False,
    ) -> Proposal:
        """Lock the SM clocks of `cells` at a share of what they run at, or at `to_mhz`."""
        selection = load.target(label, cells, self.cluster, self.snapshot)
        return self.foreseen(propose.clock_lock(self._rack(), self._load(), selection, share, to_mhz, permanent))

    def propose_pause(self, job: JobStatus, seconds: float) -> Proposal:
        """Let a job wait at its next step boundary."""
        return propose.pause(self._rack(), load.job_view(job, self.cluster, self.snapshot), seconds)

    def propose_resume(self, job: JobStatus) -> Proposal:
        """Let a paused job go on."""
        return propose.resume(self._rack(), load.job_view(job, self.cluster, self.snapshot))

    @property
    def found_jobs(self) -> tuple[FoundJob, ...]:
        """All jobs that are known here, with a hook or without."""
        return self.hookless.found(self.snapshot, self.jobs.statuses.values())

    def cells_of_job(self, job: JobStatus | FoundJob) -> list[tuple[int, int]]:
        """The (node number, slot) pairs that a job runs on, as far as they are known."""
        if isinstance(job, JobStatus):
            found = load.planned(job)
            replica = load.replica_rows(job, self.cluster, self.snapshot, found.plan if found else None)
            gpus = [self.cluster.type_of(n).gpus for n in self.cluster.nodes]
            every = [(number, slot) for number, count in enumerate(gpus) for slot in range(count)]
            return [] if replica is None else [cell for cell, r in zip(every, replica, strict=True) if r >= 0]
        numbers = {n.name: i for i, n in enumerate(self.cluster.nodes)}
        return list(dict.fromkeys((numbers[at.node], at.slot) for at in job.ranks if at.node in numbers))

    def propose_standstill(self, job: FoundJob, seconds: float, by: str = "") -> Proposal:
        """Stop a job that has no hook for a time: by Slurm where Slurm knows it, else its processes; or as `by` says
        (slurm, processes)."""
        if by == "slurm" or (not by and of_slurm(job)):
            return without_hook.suspend(self._rack(), None, job.id, job.nodes, job.state, seconds)
        return without_hook.freeze(self._rack(), None, job.name, pids_of(job), seconds)

    async def propose_requeue(self, job: FoundJob, plan: Plan, to: str) -> Proposal:
        """Let Slurm start a job anew with the words of another plan, in the framework `to`'s form."""
        text, lost = FORMATS[to](plan)
        if to in ("megatron", "nemo"):
            text = " ".join(shlex.split(text)) + "\n"  # the shell splits what $(cat FILE) gives, and unquotes nothing
        path, reads_plan = await scheduler.plan_file(self.hookless.run, job.id) if of_slurm(job) else ("", False)
        action = Requeue(job.id, job.nodes, text, path)
        return without_hook.requeue(self._rack(), None, action, job.state, reads_plan, plan.name, tuple(lost))

    def restart(self, job: JobStatus) -> Restart:
        """What a job should be started with next time, on this minute's rack. ProfileError where it names no plan."""
        return restart_of(job, self.cluster, self.snapshot, self.conditions())

    def propose_go_on(self, job: FoundJob) -> Proposal:
        """Let a job that Slurm suspended, or whose processes this console stopped, go on."""
        if of_slurm(job):
            return without_hook.unsuspend(self._rack(), job.id, job.nodes, job.state)
        pids = pids_of(job)
        frozen = Freeze(job.name, pids, 0.0, restore=True)
        return without_hook.thaw(self._rack(), frozen, self.frozen(job))

    def frozen(self, job: FoundJob) -> bool:
        """Whether this console has stopped a job's processes and their time is not up."""
        return any(
            isinstance(action := t.proposal.action, Freeze)
            and not action.restore
            and t.stage is Stage.DONE
            and action.pids == pids_of(job)
            and time.time() < t.time + action.seconds
            for t in self.tickets
        )

    def propose_microbatch(self, job: JobStatus, value: int) -> Proposal:
        """Set a job's microbatch."""
        view = load.job_view(job, self.cluster, self.snapshot)
        return self.foreseen(propose.microbatch(self._rack(), view, value))

    def propose_rebalance(self, job: JobStatus, moves: int = 1) -> Proposal:
        """Move microbatches from a job's hot ranks to its cold ones."""
        threshold = min(self._slowdown_c) - propose.HOT_MARGIN_K
        view = load.job_view(job, self.cluster, self.snapshot)
        return self.foreseen(propose.rebalance(self._rack(), view, threshold, moves))

    def propose_undo(self) -> Proposal | None:
        """Put back what the last action that is still in force changed; None when there is none. A pause is resumed."""
        undoable = (t for t in reversed(self.tickets) if t.stage is Stage.DONE and not t.proposal.undoes)
        last = next((t for t in undoable if not isinstance(t.proposal.action, Standstill)), None)
        if last is None or last.before is None:
            return None
        return propose.undo(last.proposal, last.before, last.id, self._rack(), self._load())

    def roles(self) -> dict[tuple[str, int], Role]:
        """What the current job has on each (node, slot)."""
        self._place_job()
        return self._roles

    def carried(self) -> dict[Link, str]:
        """Whose traffic goes over each GPU's links and each network port."""
        self._place_job()
        return self._carried

    def expected(self, own: Prediction | None) -> dict[Link, float]:
        """GB/s in each direction that those links should carry by `own`, the current job's prediction; nothing while no
        job is attached. The same value as long as nothing changes."""
        job, carrying = self.jobs.current, self.carried()
        own = own if job is not None and job.attached else None
        if self._expected[0] is not carrying or self._expected[1] is not own:
            self._expected = (carrying, own, expected(carrying, link_load(own)) if own else {})
        return self._expected[2]

    def _place_job(self) -> None:
        """Work out who runs where, again only when the processes, the GPUs or the job changed."""
        gpus, job = self.snapshot.gpus, self.jobs.current
        known = (gpus.processes, gpus.facts, job.plan if job else None)
        if self._placed is None or any(a is not b for a, b in zip(known, self._placed, strict=True)):
            self._placed, self._roles = known, roles(self.cluster, self.snapshot, job)
            self._carried = carried(self.cluster, self.snapshot, self._roles)

    def conditions(self) -> Conditions:
        """This minute's limits, clocks, links and warmth of the rack."""
        return conditions(self.cluster, self.snapshot, self.watch.settled_c)

    def alternatives(self, now: Conditions) -> Sequence[Compared]:
        """At least three plans for the running job's model on this cluster as it is now, its own first."""
        job = self.jobs.current
        found = load.planned(job) if job else None
        if found is None:
            return ()
        return alternatives(found.model, under(self.cluster, now), limited(found.plan, now))

    def rack_and_load(self) -> tuple[Rack, Load | None]:
        """The rack as it is measured and known now, and the job that runs on it."""
        return self._rack(), self._load()

    def foreseen(self, proposal: Proposal) -> Proposal:
        """The proposal with its bands; of the hottest GPU: where it will be ten minutes after it."""
        proposal = self._bands.of(proposal)
        if proposal.after.gpu_w is None:
            return proposal
        found = self.watch.forecast(proposal.after.gpu_w)
        if np.isnan(found.celsius[:, -1]).all():
            return proposal
        hottest = int(np.nanargmax(found.celsius[:, -1]))
        band = (float(found.low[hottest, -1]), float(found.high[hottest, -1]))
        return replace(proposal, after=replace(proposal.after, peak_band_c=band))

    def _rack(self) -> Rack:
        return load.rack_now(self.cluster, self.snapshot, self.watch.settled_c, self.watch.chassis)

    def _load(self) -> Load | None:
        job = self.jobs.current
        return load.load_of(job, self.cluster, self.snapshot) if job else None

    # What is done.

    def holder_of(self, action: Action) -> str:
        """Who else holds the job that an action reaches, as a sentence; nothing when it is free or ours."""
        for job in self.jobs.statuses.values():
            if job.attached and job.holder and job.holder != self.operator and self._reaches(action, job):
                since = time.strftime("%H:%M:%S", time.localtime(job.held_since or 0.0))
                return f"{job.holder} holds {job.name} since {since}. Steal it with a reason to act."
        return ""

    def _reaches(self, action: Action, job: JobStatus) -> bool:
        """Whether an action changes a job, or a limit of a node that it runs on."""
        if isinstance(action, JobAction):
            return action.job == job.name
        hosts = {s.name: s.hostname for s in self.snapshot.nodes}
        return bool({hosts.get(node) for node in _nodes_of(action)} & {r.host for r in job.ranks})

    def nodes_reached(self, action: Action) -> int:
        """How many nodes an action touches: those of its limits, or those of the job's ranks; the most it can be while
        the job has not told where all of them run."""
        if not isinstance(action, JobAction):
            return len(_nodes_of(action))
        job = next((j for j in self.jobs.statuses.values() if j.attached and j.name == action.job), None)
        if job is None or len(job.ranks) < job.world_size:
            return min(len(self.cluster.nodes), job.world_size if job else len(self.cluster.nodes))
        return len({r.host for r in job.ranks})

    def confirm(self, proposal: Proposal, steal: str = "") -> Ticket:
        """Carry out a proposal; `steal` is the reason to take the job from another operator. Refused or AuditError,
        with a sentence, when it must not start."""
        if proposal.refusal:
            raise Refused(proposal.refusal)
        if not steal and (held_by := self.holder_of(proposal.action)):
            raise Refused(held_by)
        if not self.arming.left_s:
            raise Refused("This console is read-only: arm it first (key a).")
        ticket = Ticket(uuid.uuid4().hex, time.time(), self.operator, proposal, steal=steal)
        self._audit.write(self.cluster.name, ticket)  # what cannot be logged is not done
        self._update(ticket, log=False)
        task = asyncio.create_task(self._carry_out(ticket), name=f"act {ticket.id}")
        self._acting.add(task)
        task.add_done_callback(self._acting.discard)
        return ticket

    async def ended(self, ticket: Ticket) -> Ticket:
        """A confirmed action at its end."""
        on_its_way = {task for task in self._acting if task.get_name() == f"act {ticket.id}"}
        if on_its_way:
            await asyncio.wait(on_its_way)
        return next((t for t in self.tickets if t.id == ticket.id), ticket)

    async def _carry_out(self, ticket: Ticket) -> None:
        last = ticket
        try:
            async for last in self._dispatch.carry_out(ticket):
                self._update(last)
        except Exception as error:  # our own fault must not leave an action that seems to be on its way for ever
            last = replace(last, stage=Stage.UNKNOWN, reason=f"rackside itself failed here: {error!r}")
            self._update(last)
        if last.stage is Stage.DONE:  # from here on an earlier one is no longer alone in force
            self._measuring.clear()
            if not isinstance(ticket.proposal.action, Standstill):  # what comes after a pause is not its effect
                self._measuring[last.id] = Measuring(self.snapshot.time, self.jobs.current, last.step)
        undone = next((t for t in self.tickets if t.id == ticket.proposal.undoes), None)
        if last.stage is Stage.DONE and undone is not None:
            self._update(replace(undone, stage=Stage.UNDONE, reason=""))

    def _update(self, ticket: Ticket, log: bool = True) -> None:
        if log:
            try:
                self._audit.write(self.cluster.name, ticket)
                self._audit_trouble = ""
            except AuditError as error:
                self._audit_trouble = f"{error}; the action '{ticket.proposal.title}' went on unlogged"
        others = tuple(t for t in self.tickets if t.id != ticket.id)
        self.tickets = held.kept(sorted((*others, ticket), key=lambda t: t.time))
        self._tell(TicketChanged(ticket))

    @property
    def audit_path(self) -> Path:
        """The log of actions, which this user's consoles share."""
        return self._audit.path

    def logged(self) -> Sequence[Mapping[str, Any]]:
        """What was done on this cluster by this user's consoles, commands and guards, oldest first, as the log has
        it."""
        return [entry for entry in self._log.look() if entry.get("cluster") == self.cluster.name]

    @property
    def leased_gpus(self) -> int:
        """GPUs whose limit or clock this console holds down: they get their own back when it ends."""
        return len(held.leased(self.tickets))


def _nodes_of(action: Action) -> tuple[str, ...]:
    """The nodes that an action names; a job's command names none."""
    if isinstance(action, NodeAction):
        return tuple(action.values)
    return tuple(action.pids) if isinstance(action, Freeze) else getattr(action, "nodes", ())
