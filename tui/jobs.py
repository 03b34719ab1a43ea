"""`rackside jobs`: the training jobs of a cluster, printed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from engine.control import discover, look, slurm
from engine.control.connect import sources
from engine.control.jobs import Jobs
from engine.job.status import JobStatus
from engine.profile import Cluster, catalog
from engine.telemetry.snapshot import Snapshot
from engine.telemetry.source import NodeSource
from engine.telemetry.text import clean
from tui.output import printed

GREETING_S = 5.0
COLUMNS = ("id", "name", "user", "state", "nodes", "GPUs", "ranks", "source")


def jobs(given: Any) -> int:
    """Print the jobs that Slurm, the nodes' processes and hooks tell of; 1 when Slurm was to be asked and fails."""
    found, trouble = asyncio.run(_found(catalog.cluster(given.cluster), given.wait))
    print(printed([asdict(job) for job in found]) if given.json else _table(found))
    if trouble:
        print(f"rackside: {trouble}.", file=sys.stderr)
    return 1 if trouble else 0


async def _found(cluster: Cluster, wait_s: float) -> tuple[tuple[discover.FoundJob, ...], str]:
    reached = sources(cluster)
    asked = asyncio.create_task(slurm.jobs(slurm.here())) if cluster.slurm else None
    async with look.following(cluster, reached, wait_s) as snapshot:
        hooks = await _hooks(reached, snapshot)
    told = await asked if asked else ()
    listed = () if isinstance(told, str) else discover.from_slurm(told, cluster, snapshot)
    seen = discover.from_processes(snapshot)
    return discover.merged(listed, seen, hooks), told if isinstance(told, str) else ""


async def _hooks(reached: Mapping[str, NodeSource], snapshot: Snapshot) -> list[JobStatus]:
    """What the hooks whose sockets the nodes show say of themselves."""
    wanted = sum(len(node.hook_sockets) for node in snapshot.nodes)
    every = asyncio.Event()
    told: dict[str, JobStatus] = {}

    def heard(status: JobStatus) -> None:
        told[status.key] = status
        if len(told) >= wanted:
            every.set()

    following = Jobs(reached, "rackside jobs", heard)
    following.look(snapshot)
    try:
        if wanted:
            await asyncio.wait_for(every.wait(), GREETING_S)
    except TimeoutError:
        pass
    finally:
        await following.close()
    return list(told.values())


def _table(found: tuple[discover.FoundJob, ...]) -> str:
    if not found:
        return "No jobs were found."
    rows = [COLUMNS, *(_row(job) for job in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    notes = [f"{clean(job.id, 24)}: {clean(job.said)}" for job in found if job.said]
    return "\n".join([*lines, *notes])


def _row(job: discover.FoundJob) -> tuple[str, ...]:
    ranked = len({at.rank for at in job.ranks if at.rank is not None})
    placed = f"{ranked} of {job.world_size}" if job.world_size else str(ranked)
    nodes = ", ".join(job.nodes[:3]) + (f" and {len(job.nodes) - 3} more" if len(job.nodes) > 3 else "")
    gpus = "-" if job.gpus is None else str(job.gpus)
    cells = (clean(job.id, 24), clean(job.name, 32), clean(job.user, 20), clean(job.state, 16), clean(nodes, 60))
    return tuple(cell or "-" for cell in (*cells, gpus, placed, job.source))
