"""The guard on a live cluster: what it wishes becomes proposals, and what is confirmed is carried out and logged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace

from engine.act import propose, remedy
from engine.act.action import JobAction, Pause, Proposal, Stage, Ticket
from engine.act.audit import AuditError
from engine.act.guard import Done, Guard, Wish
from engine.act.propose import JobView, Target
from engine.control import load
from engine.control.control import Control, Refused
from engine.control.sight import sight_of
from engine.job.status import JobStatus
from engine.profile.policy import Measure


@dataclass(frozen=True, slots=True)
class Note:
    """One thing the guard did or did not do. `what`: advice, refused, done, failed, kept, restored or left."""

    time: float
    what: str
    node: str
    rule: str
    text: str
    proposal: Proposal | None = None
    ticket: str = ""


class Guarding:
    """Call `look` with every snapshot; `told` hears what comes of it. With `advise` nothing is ever done."""

    def __init__(self, control: Control, told: Callable[[Note], None], advise: bool) -> None:
        self._control, self._told, self._advise = control, told, advise
        cluster = control.cluster
        self._cells = [(i, slot) for i, n in enumerate(cluster.nodes) for slot in range(cluster.type_of(n).gpus)]
        names = [cluster.nodes[i].name for i, _ in self._cells]
        self._starts = {name: names.index(name) for name in dict.fromkeys(names)}
        self._guard = Guard(control.policy, names)
        self._links = any(rule.when.link_share_above is not None for rule in control.policy.rules)
        self._busy: dict[str, asyncio.Task[None]] = {}

    def look(self) -> None:
        """Take the newest snapshot; start what is to be done, one thing at a time on a node and on the jobs."""
        control = self._control
        profile_c = control.watch.boards.slowdown_c
        sight = sight_of(control.cluster, control.snapshot, control.watch, profile_c, self._links)
        for wish in self._guard.look(sight):
            keys = {wish.node, *({"the jobs"} if any(m.of_job for m in wish.measures) else ())}
            if not keys & self._busy.keys():
                for measure in wish.measures:
                    self._guard.tried(wish, measure, sight.time)
                self._start(keys, self._act(wish))
        done = self._guard.calm(sight.time)
        if done is not None and not self._busy:
            self._start({done.node, "the jobs"}, self._take_back(done))

    async def close(self) -> None:
        """Wait for what is on its way, and tell what stays in force without the guard."""
        await asyncio.gather(*self._busy.values(), return_exceptions=True)
        for done in self._guard.done:
            ticket = self._ticket(done.id)
            if ticket is not None and ticket.stage is Stage.DONE and isinstance(ticket.proposal.action, JobAction):
                text = f"{ticket.proposal.title}: stays in force; `rackside undo {done.id[:8]}` takes it back"
                self._tell("left", done.node, done.rule.name, text, ticket=done.id)

    def _start(self, keys: set[str], work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name=f"guard {', '.join(sorted(keys))}")
        self._busy |= dict.fromkeys(keys, task)
        task.add_done_callback(lambda _: [self._busy.pop(key, None) for key in keys])

    async def _act(self, wish: Wish) -> None:
        """A rule's measures one after the other, each foreseen from what the one before it left."""
        for measure in wish.measures:
            found = self._proposal(wish, measure)
            if found is None or found.refusal:
                text = f"{wish.text_of(measure)}: " + (found.refusal if found else "this is for a person to do")
                self._tell("advice" if found is None else "refused", wish.node, wish.rule.name, text, found)
            elif self._advise or not wish.rule.automatic:
                self._tell("advice", wish.node, wish.rule.name, wish.text_of(measure), found)
            else:
                ticket = await self._carry_out(found)
                if isinstance(ticket, Ticket) and ticket.stage is Stage.DONE:
                    self._guard.acted(wish, measure, ticket.id, self._control.snapshot.time)
                    self._tell("done", wish.node, wish.rule.name, f"{wish.why}: {ticket.line}", found, ticket.id)
                else:
                    why = ticket.line if isinstance(ticket, Ticket) else f"{found.title}: {ticket}"
                    self._tell("failed", wish.node, wish.rule.name, why, found)

    async def _take_back(self, done: Done) -> None:
        """Put back what the guard did, unless the heat would come back with it."""
        now, ticket = self._control.snapshot.time, self._ticket(done.id)
        if ticket is None or ticket.stage is not Stage.DONE or ticket.before is None:
            self._guard.undone(done, now)  # by another hand
            return
        rack, _ = self._control.rack_and_load()
        job = self._job(done.node)
        view = self._view(job)
        below = self._limit_c - self._guard.policy.hysteresis_k
        target = self._target(done.node, done.rows)
        title = ticket.proposal.title
        if not remedy.stays_cool(ticket.before, rack, view.load if view else None, view, target, below):
            self._guard.not_yet(done, now)
            self._tell("kept", done.node, done.rule.name, f"{title}: stays, it would be too hot again without it")
            return
        undo = propose.undo(ticket.proposal, ticket.before, ticket.id, rack, view.load if view else None)
        last = await self._carry_out(undo)
        if isinstance(last, Ticket) and last.stage is Stage.DONE:
            self._guard.undone(done, self._control.snapshot.time)
            self._tell("restored", done.node, done.rule.name, last.line, undo, last.id)
        else:
            self._guard.not_yet(done, self._control.snapshot.time)
            why = last.line if isinstance(last, Ticket) else f"{undo.title}: {last}"
            self._tell("failed", done.node, done.rule.name, why, undo)

    async def _carry_out(self, proposal: Proposal) -> Ticket | str:
        """The ticket at its end, or why it did not begin."""
        self._control.arming.arm()
        try:
            return await self._control.ended(self._control.confirm(proposal))
        except (Refused, AuditError) as error:
            return str(error)

    def _proposal(self, wish: Wish, measure: Measure) -> Proposal | None:
        rack, loaded = self._control.rack_and_load()
        view = self._view(self._job(wish.node))
        target = self._target(wish.node, wish.rows)
        loaded = view.load if view else loaded
        found = remedy.proposal(measure, wish, rack, loaded, view, target, self._limit_c)
        if found is None or found.refusal:
            return found
        held_by = self._control.holder_of(found.action)
        foreseen = found if isinstance(found.action, Pause) else self._control.foreseen(found)
        titled = f"{foreseen.title} (guard rule {wish.rule.name})"
        return replace(foreseen, title=titled, refusal=f"left alone: {held_by}" if held_by else "")

    @property
    def _limit_c(self) -> float:
        return float(self._control.watch.boards.operating_c.min())

    def _target(self, node: str, rows: tuple[int, ...]) -> Target:
        slots = ", ".join(str(row - self._starts[node]) for row in rows)
        cells = [self._cells[row] for row in rows]
        return load.target(f"{node} GPU {slots}", cells, self._control.cluster, self._control.snapshot)

    def _job(self, node: str) -> JobStatus | None:
        """The job with a hook on a node; the only one there is, where its ranks do not say where they run."""
        attached = [j for j in self._control.jobs.statuses.values() if j.attached]
        host = next((s.hostname for s in self._control.snapshot.nodes if s.name == node), "")
        there = [j for j in attached if host and any(r.host == host for r in j.ranks)]
        placeless = [j for j in attached if not j.ranks]
        return there[0] if there else placeless[0] if len(attached) == 1 and placeless else None

    def _view(self, job: JobStatus | None) -> JobView | None:
        return load.job_view(job, self._control.cluster, self._control.snapshot) if job else None

    def _ticket(self, ticket_id: str) -> Ticket | None:
        return next((t for t in self._control.tickets if t.id == ticket_id), None)

    def _tell(
        self, what: str, node: str, rule: str, text: str, proposal: Proposal | None = None, ticket: str = ""
    ) -> None:
        self._told(Note(self._control.snapshot.time, what, node, rule, text, proposal, ticket))
