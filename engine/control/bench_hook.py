"""How long a command takes from the key to the job, through a whole Control and over SSH."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import numpy as np

from engine.act.action import Stage, Ticket
from engine.control.control import Control
from engine.control.events import Event, TicketChanged
from engine.job.status import JobStatus

JOB = "bench"
START_S, END_S = 60.0, 30.0


async def press(control: Control, seconds: float, progress: Callable[[str], None]) -> dict[str, tuple[float, int]]:
    """Change the job's microbatch over and over; by command the moment of the key, and the step it was in force at."""
    async with control.running():
        events, found = control.events(), dict[str, tuple[float, int]]()
        job = await asyncio.wait_for(_found(control, events), START_S)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            job = _job(control) or job
            proposal = control.propose_microbatch(job, 2 if job.microbatch == 4 else 4)
            control.arming.arm()
            pressed = time.monotonic()
            ticket = control.confirm(proposal)
            last = await asyncio.wait_for(_end(events, ticket.id), END_S)
            if last.stage is not Stage.DONE or last.step is None:
                raise RuntimeError(f"a command of the bench did not come through: {last.line}")
            found[ticket.id] = (pressed, last.step)
            progress(f"{len(found)} commands")
        return found


async def _found(control: Control, events: AsyncIterator[Event]) -> JobStatus:
    async for _ in events:
        if (job := _job(control)) is not None:
            return job
    raise RuntimeError("the control ended")


async def _end(events: AsyncIterator[Event], ticket: str) -> Ticket:
    async for event in events:
        if isinstance(event, TicketChanged) and event.ticket.id == ticket and event.ticket.stage.ended:
            return event.ticket
    raise RuntimeError("the control ended")


def _job(control: Control) -> JobStatus | None:
    return next((j for j in control.jobs.statuses.values() if j.name == JOB and j.attached and j.step_s), None)


def command_ms(
    pressed: Mapping[str, tuple[float, int]], came: Mapping[str, float], steps: Mapping[int, tuple[float, float]]
) -> dict[str, Any]:
    """From the key until the command is in the job, and, once the last rank has come to the boundary, until it is in
    force on all; the wait for that boundary between the two is the job's own step and left out."""
    both = [
        (came[one] - at, steps[step][1] - steps[step][0])
        for one, (at, step) in pressed.items()
        if one in came and step in steps
    ]
    ms = np.array(both).sum(1) * 1e3
    return {"p50": float(np.quantile(ms, 0.5)), "p99": float(np.quantile(ms, 0.99)), "commands": len(ms)}
