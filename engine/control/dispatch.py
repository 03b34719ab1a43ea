"""Confirmed actions on their way: to the probes of the nodes, or to a job's hook; yields every stage they reach."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any

from engine.act.action import (
    ClockLock,
    Freeze,
    JobAction,
    NodeAction,
    SchedulerAction,
    Stage,
    Throttle,
    Ticket,
)
from engine.control import scheduler
from engine.control.jobs import Jobs
from engine.control.slurm import Run
from engine.telemetry.reading import Result
from engine.telemetry.source import NodeSource

LEASE_S = 15.0
NODE_TIMEOUT_S = 10.0
JOB_TIMEOUT_S = 120.0


class Dispatch:
    """Knows the way to nodes and jobs, holds no state of its own."""

    def __init__(self, sources: Mapping[str, NodeSource], jobs: Jobs, slurm: Run) -> None:
        self._sources, self._jobs, self._slurm = sources, jobs, slurm

    async def carry_out(self, ticket: Ticket) -> AsyncIterator[Ticket]:
        """Stages after PENDING, the last one ended; it carries what to put back when it is DONE."""
        action = ticket.proposal.action
        if isinstance(action, NodeAction):
            yield await self._nodes(ticket, action)
            return
        if isinstance(action, Freeze):
            yield await self._freeze(ticket, action)
            return
        if isinstance(action, SchedulerAction):
            yield await scheduler.carry_out(self._slurm, ticket, action)
            return
        async for stage in self._job(ticket, action):
            yield stage

    async def _nodes(self, ticket: Ticket, action: NodeAction) -> Ticket:
        """All nodes or none: when one refuses, those that did it are given theirs back."""
        results = await self._send(ticket, ticket.id, action)
        failed = {node: r for node, r in results.items() if r.state != "done"}
        if not failed:
            return replace(ticket, stage=Stage.DONE, before=_back(action, results))
        done = {node: r for node, r in results.items() if r.state == "done"}
        why = "; ".join(f"{node}: {r.reason}" for node, r in sorted(failed.items()))
        if done and not action.restore:
            back = await self._send(ticket, f"{ticket.id}-back", _back(action, done))
            left = sorted(node for node, r in back.items() if r.state != "done")
            why += f"; put back on {len(done) - len(left)} of {len(done)} other nodes"
            ends = "undo it by hand" if action.permanent else "their lease ends by itself"
            why += f", NOT on {', '.join(left)} ({ends})" if left else ""
        unknown = all(r.state == "unknown" for r in failed.values())
        return replace(ticket, stage=Stage.UNKNOWN if unknown else Stage.FAILED, reason=why)

    async def _freeze(self, ticket: Ticket, action: Freeze) -> Ticket:
        """All processes or none: a job half of which stands waits in its collectives."""

        def stop(node: str) -> dict[str, Any]:
            return {"do": "stop", "pids": list(action.pids[node]), "lease_s": action.seconds}

        def go_on(node: str) -> dict[str, Any]:
            return {"do": "restore", "what": "stop", "pids": list(action.pids[node])}

        results = await self._each(ticket, ticket.id, list(action.pids), go_on if action.restore else stop)
        failed = {node: r for node, r in results.items() if r.state != "done"}
        if not failed:
            back = None if action.restore else replace(action, restore=True)
            return replace(ticket, stage=Stage.DONE, before=back)
        why = "; ".join(f"{node}: {r.reason}" for node, r in sorted(failed.items()))
        stopped = [node for node, r in results.items() if r.state == "done"]
        if stopped and not action.restore:
            await self._each(ticket, f"{ticket.id}-back", stopped, go_on)
            why += f"; on {len(stopped)} other nodes they go on again"
        unknown = all(r.state == "unknown" for r in failed.values())
        return replace(ticket, stage=Stage.UNKNOWN if unknown else Stage.FAILED, reason=why)

    async def _send(self, ticket: Ticket, command_id: str, action: NodeAction) -> dict[str, Result]:
        power = isinstance(action, Throttle)

        def command(node: str) -> dict[str, Any]:
            gpus = action.values[node]
            if action.restore:
                return {"do": "restore", "what": "power" if power else "clock", "gpus": sorted(gpus)}
            values = {str(i): v for i, v in gpus.items()}
            lease_s = None if action.permanent else LEASE_S
            return {"do": "power_limit" if power else "clock_lock", "gpus": values, "lease_s": lease_s}

        return await self._each(ticket, command_id, list(action.values), command)

    async def _each(
        self, ticket: Ticket, command_id: str, nodes: list[str], command: Callable[[str], dict[str, Any]]
    ) -> dict[str, Result]:
        """A command to each node, all at once."""

        async def one(node: str) -> Result:
            source = self._sources.get(node)
            if source is None:
                return Result(command_id, "failed", "no such node in this cluster")
            asked = {"id": command_id, "operator": ticket.operator, **command(node)}
            return await source.command(asked, NODE_TIMEOUT_S)

        return dict(zip(nodes, await asyncio.gather(*(one(n) for n in nodes)), strict=True))

    async def _job(self, ticket: Ticket, action: JobAction) -> AsyncIterator[Ticket]:
        queue: asyncio.Queue[Ticket] = asyncio.Queue()
        task = asyncio.create_task(self._jobs.submit(ticket, action, JOB_TIMEOUT_S, queue.put_nowait))
        while not task.done() or not queue.empty():
            getter = asyncio.create_task(queue.get())
            await asyncio.wait({getter, task}, return_when=asyncio.FIRST_COMPLETED)
            if getter.done():
                yield getter.result()
            else:
                getter.cancel()
        yield task.result()


def _back(action: NodeAction, results: Mapping[str, Result]) -> NodeAction:
    """What undoes it on these nodes: the leases given back, or, where there is none, what the boards had before."""
    if action.permanent and not action.restore:
        if isinstance(action, Throttle):
            limits = {n: {int(i): g.before_w for i, g in r.gpus.items() if g.before_w} for n, r in results.items()}
            return Throttle(limits, permanent=True)
        return ClockLock(
            {n: {int(i): g.before_mhz for i, g in r.gpus.items()} for n, r in results.items()}, permanent=True
        )
    if isinstance(action, Throttle):
        return Throttle({n: action.limits_w[n] for n in results}, restore=not action.restore)
    return ClockLock({n: action.clocks_mhz[n] for n in results}, restore=not action.restore)
