"""The jobs of a running cluster that have no hook, or have one and a scheduler beside it: as Slurm and the processes on
the GPUs tell of them, again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from engine.control import discover, slurm
from engine.control.discover import RANKLESS, FoundJob
from engine.job.status import JobStatus
from engine.profile import Cluster
from engine.telemetry.snapshot import Snapshot
from engine.telemetry.tools.slurm import Job

ASKED_EACH_S = 10.0


class Hookless:
    """`run` asks Slurm on this machine, where the inventory says that it knows the cluster's jobs."""

    def __init__(self, cluster: Cluster, run: slurm.Run | None = None) -> None:
        self._cluster, self.run = cluster, run or slurm.here()
        self._told: tuple[Job, ...] = ()
        self.asked = asyncio.Event()
        """Slurm has answered, or is not to be asked."""
        self.trouble = ""
        """Why Slurm does not tell its jobs, while it does not."""
        if not cluster.slurm:
            self.asked.set()

    async def follow(self) -> None:
        """Ask Slurm for ever."""
        while self._cluster.slurm:
            await self.ask()
            await asyncio.sleep(ASKED_EACH_S)

    async def ask(self) -> None:
        """Ask Slurm once."""
        told = await slurm.jobs(self.run)
        self.trouble = told if isinstance(told, str) else ""
        self._told = () if isinstance(told, str) else told
        self.asked.set()

    def found(self, snapshot: Snapshot, hooks: Iterable[JobStatus]) -> tuple[FoundJob, ...]:
        """One entry a job, with all that is known of it."""
        listed = discover.from_slurm(self._told, self._cluster, snapshot)
        seen = discover.from_processes(snapshot)
        return discover.merged(listed, seen, tuple(h for h in hooks if h.attached))


def pids_of(job: FoundJob) -> dict[str, tuple[int, ...]]:
    """A job's processes on GPUs, by node."""
    out: dict[str, list[int]] = {}
    for at in job.ranks:
        if at.pid is not None and at.pid not in out.setdefault(at.node, []):
            out[at.node].append(at.pid)
    return {node: tuple(pids) for node, pids in out.items() if pids}


def of_slurm(job: FoundJob) -> bool:
    """Whether Slurm knows it."""
    return "Slurm" in job.source


def trains(job: FoundJob) -> bool:
    """Whether it is a job, and not what is left over."""
    return job.name != RANKLESS
