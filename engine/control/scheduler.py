"""What is done to a job by Slurm: suspended for a time, resumed, requeued with the words of another plan."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

from engine.act.action import SchedulerAction, Stage, Suspend, Ticket, Unsuspend
from engine.control.slurm import Ran, Run
from engine.telemetry.text import clean

ENDING_LOOKS, ENDING_LOOK_S = 60, 0.5
START = "now+3"
"""When a requeued job may start, in seconds. The node refuses to start it in the very second in which it ended it: its
right to start, dated to the second, is then taken to be that of the run before, and the job fails."""
PLAN_NAME = "rackside-{job}.plan"


async def carry_out(run: Run, ticket: Ticket, action: SchedulerAction) -> Ticket:
    """The ticket at its end."""
    if isinstance(action, Suspend):
        # Before the job is suspended: whatever becomes of this console, it will be resumed.
        await _resume_later(action.job, action.seconds)
        why = _why(await run(("scontrol", "suspend", action.job)))
        return _ended(ticket, why, Unsuspend(action.job, action.nodes))
    if isinstance(action, Unsuspend):
        return _ended(ticket, _why(await run(("scontrol", "resume", action.job))), None)
    path = Path(action.path)
    before = await asyncio.to_thread(_read, path)
    try:
        await asyncio.to_thread(_write, path, action.words)
    except OSError as error:
        return replace(ticket, stage=Stage.FAILED, reason=f"{path}: cannot be written: {error.strerror}")
    why = _why(await run(("scontrol", "requeue", action.job)))
    if why:
        await asyncio.to_thread(_put_back, path, before)
    else:
        await _start_soon(run, action.job)
    return _ended(ticket, why, None)


async def plan_file(run: Run, job: str) -> tuple[str, bool]:
    """Where a job's script would read the words of a plan, and whether it does; "" where Slurm does not tell."""
    told = await run(("scontrol", "show", "job", job))
    folder = ""
    if isinstance(told, Ran) and told.code == 0:
        lines = (line.strip() for line in told.out.splitlines())
        folder = next((line.partition("=")[2] for line in lines if line.startswith("WorkDir=")), "")
    if not folder:
        return "", False
    script = await run(("scontrol", "write", "batch_script", job, "-"))
    text = script.out if isinstance(script, Ran) and script.code == 0 else ""
    names = (PLAN_NAME.format(job=job), PLAN_NAME.format(job="$SLURM_JOB_ID"), PLAN_NAME.format(job="${SLURM_JOB_ID}"))
    return str(Path(folder) / names[0]), any(name in text for name in names)


async def _resume_later(job: str, seconds: float) -> None:
    """A process of its own resumes the job: it outlives this console, and does nothing to a job that runs again."""
    quiet = asyncio.subprocess.DEVNULL
    words = ("sh", "-c", 'sleep "$1"; exec scontrol resume "$2"', "rackside-resume", f"{seconds:.3f}", job)
    await asyncio.create_subprocess_exec(*words, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True)


async def _start_soon(run: Run, job: str) -> None:
    """Once it has ended and waits again: by itself it would wait for two minutes, as after a node that failed."""
    for _ in range(ENDING_LOOKS):
        told = await run(("scontrol", "show", "job", job))
        if not isinstance(told, Ran) or told.code or "JobState=PENDING" in told.out:
            await run(("scontrol", "update", f"JobId={job}", f"StartTime={START}"))
            return
        await asyncio.sleep(ENDING_LOOK_S)


def _why(ran: Ran | str) -> str:
    """Why it was not done; empty when it was."""
    if isinstance(ran, str):
        return ran
    said = clean(" ".join((ran.err or ran.out).split()), 200)
    return "" if ran.code == 0 else f"Slurm refuses: {said or f'scontrol ended with {ran.code}'}"


def _ended(ticket: Ticket, why: str, before: Unsuspend | None) -> Ticket:
    return replace(ticket, stage=Stage.FAILED if why else Stage.DONE, reason=why, before=None if why else before)


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


def _put_back(path: Path, before: str | None) -> None:
    if before is None:
        path.unlink(missing_ok=True)
    else:
        _write(path, before)


def _write(path: Path, text: str) -> None:
    fresh = path.with_suffix(f".{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)
