"""The jobs of a cluster: found by the hook sockets their nodes show, attached, followed, commanded."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.act.action import Action, JobAction, Microbatch, Pause, Rebalance, Resume, Stage, Ticket
from engine.job import JobClient, JobStatus, ProtocolError, RankPlace, RanksEvent, StepEvent
from engine.job.protocol import Closing, CommandState, Greeting, Holder, HolderEvent, PauseEvent, Rank
from engine.telemetry.snapshot import NodeState, Snapshot
from engine.telemetry.source import NodeSource, SourceError
from engine.telemetry.text import clean

RETRY_S = 3.0
STEPS_KEPT = 120
GONE_KEPT = 32
"""Jobs that are gone and still told of."""


@dataclass
class _Attached:
    client: JobClient | None
    task: asyncio.Task[None] | None


class Jobs:
    """One task a hook socket. `told` is called with every change of a job's status."""

    def __init__(self, sources: Mapping[str, NodeSource], operator: str, told: Callable[[JobStatus], None]) -> None:
        self._sources, self._operator, self._told = sources, operator, told
        self._attached: dict[tuple[str, str], _Attached] = {}
        self.statuses: dict[str, JobStatus] = {}
        self._selected = ""
        self._ambiguous: set[str] = set()
        self._closing = False

    @property
    def current(self) -> JobStatus | None:
        """The job that keys act on: the selected one while it is attached, else the first one, else the last gone."""
        attached = [s for s in self.statuses.values() if s.attached]
        chosen = next((s for s in attached if s.key == self._selected), None)
        return chosen or next(iter(attached), None) or next(reversed(self.statuses.values()), None)

    def select_next(self) -> JobStatus | None:
        """Make the next attached job the current one."""
        keys = [s.key for s in self.statuses.values() if s.attached]
        now = self.current
        if keys and now is not None:
            self._selected = keys[(keys.index(now.key) + 1) % len(keys)] if now.key in keys else keys[0]
        return self.current

    def troubles(self) -> dict[str, str]:
        """Jobs that were attached and are gone without having said goodbye, as sentences."""
        return {
            s.key: f"Job {s.name} on {s.node}: {s.reason}"
            for s in self.statuses.values()
            if not s.attached and s.reason and s.greeted
        }

    def look(self, snapshot: Snapshot) -> None:
        """Attach to every hook socket that a live node shows and that is not attached yet."""
        if self._closing:
            return
        shown = {(node.name, path) for node in snapshot.nodes for path in node.hook_sockets}
        for key in [k for k, a in self._attached.items() if k not in shown and a.task is not None and a.task.done()]:
            del self._attached[key]
        for node in snapshot.nodes:
            if node.state not in (NodeState.LIVE, NodeState.ERROR):
                continue
            for path in node.hook_sockets:
                key = (node.name, path)
                known = self._attached.get(key)
                if known is None or known.task is None or known.task.done():
                    self._attached[key] = attached = _Attached(None, None)
                    attached.task = asyncio.create_task(self._follow(node.name, path, attached), name=f"job {path}")

    async def close(self) -> None:
        """Let go of all jobs; they go on."""
        self._closing = True
        tasks = [a.task for a in self._attached.values() if a.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, node: str, path: str, attached: _Attached) -> None:
        """Attach once and follow until the hook goes; `look` comes back while the socket is still shown."""
        status: JobStatus | None = None
        client: JobClient | None = None
        try:
            reader, writer = await self._sources[node].open_job_socket(path)
            attached.client = client = JobClient(reader, writer)
            status = _greeted(node, path, await client.open(self._operator))
            self._publish(status)
            async for message in client.messages():
                if isinstance(message, StepEvent):
                    status = _stepped(status, message)
                elif isinstance(message, RanksEvent):
                    status = replace(status, ranks=_places(message.ranks))
                elif isinstance(message, PauseEvent):
                    status = replace(status, paused_until=message.until)
                elif isinstance(message, HolderEvent):
                    status = replace(status, **_holder(message.holder))
                elif isinstance(message, CommandState) and message.settings is not None:
                    settings = message.settings
                    status = replace(status, microbatch=settings.microbatch, microbatches=settings.microbatches)
                elif isinstance(message, Closing):
                    self._publish(replace(status, attached=False))
                    return
                self._publish(status)
            raise ProtocolError("it ended, or the way to it was lost, without saying goodbye")
        except (SourceError, ProtocolError) as error:
            self._lost(node, path, status, clean(str(error), 300))
            await asyncio.sleep(random.uniform(RETRY_S / 2, RETRY_S))
        finally:
            attached.client = None
            if client is not None:
                client.close()

    def _lost(self, node: str, path: str, status: JobStatus | None, why: str) -> None:
        """A job that was attached is gone, or a socket never became one. One that said goodbye keeps its good end: its
        node shows the socket for a tick more."""
        known = self.statuses.get(f"{node}:{path}")
        if status is not None:
            self._publish(replace(status, attached=False, reason=why))
        elif known is None or not known.greeted:
            name = clean(path.rpartition("/")[2].removesuffix(".sock"), 60)
            self._publish(JobStatus(name, node, clean(path, 200), attached=False, reason=why, greeted=False))

    def _publish(self, status: JobStatus) -> None:
        status = replace(status, name=self._distinct(status))
        twins = [s for s in self.statuses.values() if s.attached and s.name == status.name and s.key != status.key]
        if status.attached and twins:
            self._ambiguous.add(status.name)
            for twin in (*twins, status):
                self._publish(twin)
            return
        self.statuses[status.key] = status
        for key in [key for key, known in self.statuses.items() if not known.attached][:-GONE_KEPT]:
            del self.statuses[key]
        self._told(status)

    def _distinct(self, status: JobStatus) -> str:
        """What a job is called here. Actions name their job, so one of two that call themselves the same must never be
        taken for the other: both are called by their sockets from then on."""
        socket = status.socket.rpartition("/")[2].removesuffix(".sock")
        return next(
            n for n in (status.given or status.name, f"{socket}@{status.node}", status.key) if n not in self._ambiguous
        )

    async def submit(
        self, ticket: Ticket, action: JobAction, timeout_s: float, progress: Callable[[Ticket], None]
    ) -> Ticket:
        """Send a job's command and follow it to its end; one cut off in flight is asked for again by its id."""
        client = self._client(action.job)
        if client is None:
            return replace(ticket, stage=Stage.FAILED, reason=f"{action.job} is not attached now; nothing was sent")
        command: dict[str, Any] = {"id": ticket.id, **_words(action)}
        if ticket.steal:
            command["steal"] = ticket.steal

        def acknowledged(state: CommandState) -> None:
            if state.state == "scheduled":
                progress(replace(ticket, stage=Stage.ACKNOWLEDGED, step=state.step))

        end = await client.submit(command, timeout_s, acknowledged)
        if end.state == "unknown":
            end = await self._ask_again(action.job, ticket.id) or end
        return _ended(ticket, action, end)

    async def _ask_again(self, job: str, command_id: str) -> CommandState | None:
        """After a lost connection: wait for the job to be attached again and ask where the command stands."""
        until = time.monotonic() + 3 * RETRY_S
        while time.monotonic() < until:
            await asyncio.sleep(RETRY_S / 4)
            client = self._client(job)
            if client is not None:
                found = await client.ask(command_id, timeout_s=30.0)
                return found if found.state != "unknown" else None
        return None

    def _client(self, job: str) -> JobClient | None:
        for (node, path), attached in self._attached.items():
            status = self.statuses.get(f"{node}:{path}")
            if attached.client is not None and status is not None and status.name == job and status.attached:
                return attached.client
        return None


def _greeted(node: str, path: str, greeting: Greeting) -> JobStatus:
    return JobStatus(
        name=clean(greeting.job, 60),
        given=clean(greeting.job, 60),
        node=node,
        socket=path,
        attached=True,
        framework=clean(greeting.framework, 40),
        world_size=greeting.world_size,
        global_batch=greeting.global_batch,
        tokens_per_sample=greeting.tokens_per_sample,
        plan=greeting.plan,
        can=frozenset(greeting.can),
        ranks=_places(greeting.ranks or ()),
        step=greeting.step,
        microbatch=greeting.settings.microbatch,
        microbatches=greeting.settings.microbatches,
        max_pause_s=greeting.max_pause_s,
        paused_until=greeting.paused_until,
        **_holder(greeting.holder),
    )


def _holder(told: Holder | None) -> dict[str, Any]:
    if told is None:
        return {}
    return {"holder": clean(told.operator, 80), "held_since": told.since, "held_because": clean(told.reason, 200)}


def _places(ranks: tuple[Rank, ...]) -> tuple[RankPlace, ...]:
    return tuple(RankPlace(r.rank, clean(r.host, 80), r.device) for r in ranks)


def _stepped(status: JobStatus, event: StepEvent) -> JobStatus:
    recent = status.recent_step_s if event.step_time_s is None else (*status.recent_step_s, event.step_time_s)
    return replace(
        status,
        step=event.step,
        step_s=event.step_time_s if event.step_time_s is not None else status.step_s,
        loss=event.loss,
        tokens=event.tokens,
        microbatch=event.settings.microbatch,
        microbatches=event.settings.microbatches,
        last_step=event.time,
        recent_step_s=recent[-STEPS_KEPT:],
    )


def _words(action: JobAction) -> dict[str, Any]:
    """An action in the hook's protocol."""
    if isinstance(action, Microbatch):
        split = {} if action.then is None else {"microbatches": list(action.then)}
        return {"do": "microbatch", "microbatch": action.microbatch, **split}
    if isinstance(action, Rebalance):
        return {"do": "rebalance", "microbatches": list(action.microbatches)}
    if isinstance(action, Pause):
        return {"do": "pause", "seconds": action.seconds}
    return {"do": "resume"}


def _ended(ticket: Ticket, action: JobAction, end: CommandState) -> Ticket:
    """The ticket at its end, with what to put back when it is in force."""
    if end.state == "applied" and isinstance(action, Pause | Resume):
        undo = Resume(action.job) if isinstance(action, Pause) else None
        return replace(ticket, stage=Stage.DONE, step=end.step, before=undo)
    if end.state == "applied" and end.before is not None:
        back = _put_back(action, end.before.microbatch, end.before.microbatches)
        return replace(ticket, stage=Stage.DONE, step=end.step, before=back)
    stage = Stage.FAILED if end.state == "rejected" else Stage.UNKNOWN
    return replace(ticket, stage=stage, step=end.step, reason=clean(end.reason or "the job does not know it", 300))


def _put_back(action: JobAction, microbatch: int, split: tuple[int, ...]) -> Action:
    """What undoes a job's change: the settings that its hook says were in force before."""
    if isinstance(action, Rebalance):
        return Rebalance(action.job, split)
    return Microbatch(action.job, microbatch, then=split if len(set(split)) > 1 else None)
