"""Operators as processes of their own, which a test tells what to do and kills.

`python -m tests.parts.operators INVENTORY NAME` is one: a Control on the inventory that reads an order a line, a JSON
object, and answers each with what became of it. It comes back faster after a cut than a console, and is one otherwise.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from engine.act.action import JobAction, Proposal, Rebalance
from engine.act.audit import Audit, default_path
from engine.control import jobs
from engine.control.connect import sources
from engine.control.control import Control, Refused
from engine.job.status import JobStatus
from engine.profile import catalog
from engine.telemetry.source import Backoff
from tests.parts.waiting import until


class Nothing(Exception):
    """There is nothing to do for this order now."""


@dataclass
class Operator:
    """Inside the process."""

    control: Control
    sent: dict[str, Any] = field(default_factory=dict)

    async def job(self) -> JobStatus:
        def there() -> bool:
            job = self.control.jobs.current
            return job is not None and job.attached and bool(job.step)

        try:
            await until(there, 60, "the job attached")
        except AssertionError:
            nodes, jobs_ = self.control.snapshot.nodes, self.control.jobs.statuses.values()
            why = [(n.state.value, n.reason, n.hook_sockets) for n in nodes], [(j.attached, j.reason) for j in jobs_]
            raise AssertionError(f"the job does not come to be attached: {why}") from None
        job = self.control.jobs.current
        assert job is not None
        return job

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        try:
            if order["do"] == "again":
                return await self._again(await self.job())
            proposal = await self._proposed(order)
            steal = order["steal"] if self.control.holder_of(proposal.action) else ""
            self.control.arming.arm()
            ticket = self.control.confirm(proposal, steal)
        except (Refused, Nothing) as error:
            return {"refused": str(error)}
        if isinstance(proposal.action, JobAction):
            self.sent = {"id": ticket.id, **jobs._words(proposal.action)}
        say({"order": order["order"], "id": ticket.id, "confirmed": True})
        await until(lambda: self._now(ticket.id).stage.ended, 180, proposal.title)
        end = self._now(ticket.id)
        return {"id": end.id, "stage": end.stage.value, "step": end.step, "reason": end.reason}

    def _now(self, ticket: str) -> Any:
        return next(t for t in self.control.tickets if t.id == ticket)

    async def _proposed(self, order: dict[str, Any]) -> Proposal:
        do, control = order["do"], self.control
        if do == "throttle":
            return control.propose_throttle("some", [(0, slot) for slot in order["gpus"]], to_w=order["value"])
        if do == "clock":
            return control.propose_clock("some", [(0, slot) for slot in order["gpus"]], to_mhz=order["value"])
        job = await self.job()
        if do == "undo":
            found = control.propose_undo()
            if found is None:
                raise Nothing("nothing to undo")
            return found
        if do == "pause":
            return control.propose_pause(job, order["value"])
        if do == "resume":
            return control.propose_resume(job)
        if do == "rebalance":
            total = sum(job.microbatches)
            first = round(order["value"] * total)
            proposal = control.propose_microbatch(job, job.microbatch)
            return replace(proposal, title="A split", action=Rebalance(job.name, (first, total - first)), refusal="")
        value = {"halve": job.microbatch // 2, "double": 2 * job.microbatch}.get(order["value"], order["value"])
        return control.propose_microbatch(job, int(value))

    async def _again(self, job: JobStatus) -> dict[str, Any]:
        """The last command once more, by the same id, as a console would that does not trust its line."""
        client = self.control.jobs._client(job.name)
        if not self.sent or client is None:
            raise Nothing("nothing to repeat")
        end = await client.submit(self.sent, 60)
        return {"again": end.id, "stage": end.state, "step": end.step, "reason": end.reason}


def say(message: Mapping[str, Any]) -> None:
    print(json.dumps(message), flush=True)


async def serve(inventory: str, name: str) -> None:
    Backoff.MOST_S, Backoff.SLOW_S, jobs.RETRY_S = 0.3, 0.3, 0.4
    cluster = catalog.cluster(inventory)
    control = Control(cluster, sources(cluster), catalog.thermal_policy("margin"), Audit(default_path()), name)
    operator, tasks = Operator(control), set[asyncio.Task[None]]()

    async def listen() -> None:
        async for _ in control.events():
            pass

    async def one(order: dict[str, Any]) -> None:
        say({"order": order["order"], **await operator.obey(order)})

    async with control.running():
        listener = asyncio.create_task(listen())
        await operator.job()
        say({"ready": True})
        while line := await asyncio.to_thread(sys.stdin.readline):
            task = asyncio.create_task(one(json.loads(line)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        listener.cancel()


@dataclass
class Told:
    """The process as the test sees it: `answers` by order, and what it confirmed."""

    process: asyncio.subprocess.Process
    orders: int = 0
    answers: dict[int, dict[str, Any]] = field(default_factory=dict)
    confirmed: list[str] = field(default_factory=list)
    ready: bool = False
    gone: bool = False
    _listening: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, inventory: str, name: str, environment: Mapping[str, str]) -> Told:
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-m", "tests.parts.operators", inventory, name)
        found = cls(await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=dict(environment)))
        found._listening = asyncio.create_task(found._listen())
        return found

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        with suppress(ValueError):  # a line that a kill cut short
            async for line in self.process.stdout:
                said = json.loads(line)
                if "confirmed" in said:
                    self.confirmed.append(said["id"])
                elif "order" in said:
                    self.answers[said["order"]] = said
                self.ready = self.ready or "ready" in said
        self.gone = True

    def tell(self, order: Mapping[str, Any]) -> int:
        assert self.process.stdin is not None
        self.orders += 1
        with suppress(OSError):
            self.process.stdin.write(json.dumps({**order, "order": self.orders}).encode() + b"\n")
        return self.orders

    async def end(self, kill: bool) -> None:
        """Kill it, or let it finish what it began."""
        assert self.process.stdin is not None
        with suppress(OSError, ProcessLookupError):
            self.process.kill() if kill else self.process.stdin.close()
        async with asyncio.timeout(200):
            await self.process.wait()
            assert self._listening is not None
            await self._listening


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
