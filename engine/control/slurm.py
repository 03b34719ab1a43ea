"""What Slurm says of its jobs, asked on this machine: squeue as JSON, or as text where it is older, and scontrol for
the GPUs of each host."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine.telemetry.text import clean
from engine.telemetry.tools import slurm
from engine.telemetry.tools.json_text import embedded
from engine.telemetry.tools.slurm import Job

TIMEOUT_S, KILLED_S = 20.0, 2.0
LARGEST = 64 * 2**20
COLUMNS = ("JOBID", "USER", "STATE", "NODELIST", "NODES", "PARTITION", "TRES_PER_NODE", "TIME", "NAME")
# The same columns as squeue's signs; the name, which alone may hold anything, comes last.
TEXT = ("squeue", "-h", "-a", "-o", "|#".join(("%i", "%u", "%T", "%N", "%D", "%P", "%b", "%M", "%j")))
JSON, DETAILS = ("squeue", "--json"), ("scontrol", "show", "job", "-d")
_UNKNOWN = ("unrecognized option", "unrecognised option", "invalid option", "unknown option")
_NO_WRITER = ("serializer", "openapi", "data_parser")


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str


Run = Callable[[Sequence[str]], Awaitable[Ran | str]]
"""Runs a command; a sentence where it could not be run to its end."""


def here(timeout_s: float = TIMEOUT_S) -> Run:
    """Run on this machine, each command at most `timeout_s`."""

    async def run(words: Sequence[str]) -> Ran | str:
        if shutil.which(words[0]) is None:
            return f"{words[0]} is not on this machine's PATH: Slurm cannot be asked from here"
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(os.environ),
        )
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout(timeout_s):
                out, err = await asyncio.gather(_bounded(process.stdout), _bounded(process.stderr))
                code = await process.wait()
        except _TooMuch:
            return f"{words[0]} printed more than {LARGEST >> 20} MiB; nothing of it is used"
        except TimeoutError:
            return f"{words[0]} did not end within {timeout_s:g} s: does slurmctld answer?"
        finally:
            if process.returncode is None:
                process.kill()
                await _reaped(process)
        return Ran(code, out.decode(errors="replace"), err.decode(errors="replace"))

    return run


async def jobs(run: Run) -> tuple[Job, ...] | str:
    """Every job that Slurm has in its queue, with its GPUs; a sentence where it does not tell."""
    listed = await _listed(run)
    if isinstance(listed, str) or not listed:
        return listed
    said = await run(DETAILS)
    details = slurm.job_details(said.out) if isinstance(said, Ran) else ()
    known = {job.id: job for job in details}
    return tuple(_detailed(job, known.get(job.id)) for job in listed)


async def _listed(run: Run) -> tuple[Job, ...] | str:
    ran = await run(JSON)
    if isinstance(ran, str):
        return ran
    if ran.code == 0:
        value, _ = embedded(ran.out)
        if isinstance(value, dict) and isinstance(value.get("jobs"), list):
            # With slurmctld gone squeue still ends well: an empty list, and the error beside it.
            wrong = _errors(value.get("errors"))
            return f"Slurm does not tell its jobs: {wrong}" if wrong else slurm.jobs_json(ran.out)
    elif not any(word in ran.err.lower() for word in (*_UNKNOWN, *_NO_WRITER)):
        return _failed(ran)
    ran = await run(TEXT)
    if isinstance(ran, str):
        return ran
    return _failed(ran) if ran.code else slurm.jobs_text(ran.out, COLUMNS)


def _detailed(job: Job, more: Job | None) -> Job:
    """A job with what only scontrol tells."""
    if more is None:
        return job
    return replace(
        job,
        gpus=job.gpus if more.gpus is None else more.gpus,
        gpu_index=more.gpu_index or job.gpu_index,
        run_s=job.run_s if more.run_s is None else more.run_s,
    )


def _errors(told: Any) -> str:
    texts = [
        str(entry.get("description") or entry.get("error") or "an error without words")
        for entry in (told if isinstance(told, list) else [])[:4]
        if isinstance(entry, dict)
    ]
    return clean("; ".join(texts), 200)


def _failed(ran: Ran) -> str:
    words = clean(ran.err.strip() or ran.out.strip() or f"squeue ended with {ran.code}", 200)
    return f"Slurm does not tell its jobs: {words}"


def _environment(ours: Mapping[str, str]) -> dict[str, str]:
    """Ours without what a user set to make squeue print other columns, times or jobs."""
    kept = {k: v for k, v in ours.items() if not k.startswith("SQUEUE_") and k != "SLURM_TIME_FORMAT"}
    return {**kept, "LC_ALL": "C"}


class _TooMuch(Exception):
    """A command prints more than LARGEST bytes."""


async def _bounded(stream: asyncio.StreamReader) -> bytes:
    parts, size = [], 0
    while part := await stream.read(1 << 18):
        parts.append(part)
        size += len(part)
        if size > LARGEST:
            raise _TooMuch
    return b"".join(parts)


async def _reaped(process: asyncio.subprocess.Process) -> None:
    """Read what a killed process left in its pipes: it counts as ended only when they are empty."""
    try:
        async with asyncio.timeout(KILLED_S):
            while process.stdout is not None and await process.stdout.read(1 << 18):
                pass
            await process.wait()
    except (TimeoutError, RuntimeError):
        pass  # a grandchild holds a pipe, or another reader still ends
