"""The training jobs of a cluster without a hook in them: from Slurm, from the processes on its GPUs, from hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.job.status import JobStatus
from engine.profile import Cluster
from engine.telemetry.snapshot import Process, Snapshot
from engine.telemetry.text import clean
from engine.telemetry.tools.slurm import Job

RANKLESS = "processes without a rank"
MOST_RANKS = 1 << 20
ENDED = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)


@dataclass(frozen=True)
class RankAt:
    """A process, or a share of a job, on a GPU; `rank` and `pid` None where they are not told."""

    rank: int | None
    node: str
    slot: int
    pid: int | None


@dataclass(frozen=True)
class FoundJob:
    """A job as far as it is known. `source` names who told of it; `gpus` are those it has or asks for; `said` what
    a person should know of it."""

    id: str
    name: str
    user: str
    state: str
    source: str
    world_size: int | None
    ranks: tuple[RankAt, ...]
    nodes: tuple[str, ...]
    gpus: int | None
    run_s: float | None
    partition: str
    said: str


def from_processes(snapshot: Snapshot) -> tuple[FoundJob, ...]:
    """Jobs by what the processes on GPUs have in their environment: Slurm's job, else the same size and program."""
    groups: dict[tuple[str, ...], list[tuple[RankAt, Process]]] = {}
    for node in snapshot.nodes:
        for slot, row in enumerate(node.rows):
            for process in snapshot.gpus.processes[row]:
                key = _group(process)
                if key:
                    at = RankAt(_whole(process.rank), node.name, slot, process.pid)
                    groups.setdefault(key, []).append((at, process))
    return tuple(_gathered(key, members) for key, members in groups.items())


def from_slurm(jobs: Iterable[Job], cluster: Cluster, snapshot: Snapshot) -> tuple[FoundJob, ...]:
    """Jobs that have not ended, on the nodes of this cluster or waiting; the GPUs that Slurm gave as slots."""
    names = node_names(cluster, snapshot)
    slots = {node.name: len(node.rows) for node in snapshot.nodes}
    found = (_placed(job, names, slots) for job in jobs if job.state not in ENDED)
    return tuple(job for job in found if job)


def merged(
    slurm: Sequence[FoundJob], processes: Sequence[FoundJob], hooks: Sequence[JobStatus] = ()
) -> tuple[FoundJob, ...]:
    """One entry a job: Slurm's facts, the ranks that its processes tell, the hook's name and what it can do."""
    by_id = {job.id: job for job in processes}
    out = []
    for job in slurm:
        seen = by_id.pop(job.id, None)
        out.append(_joined(job, seen) if seen else job)
    out += by_id.values()
    for hook in hooks:
        at = _hooked(out, hook)
        if at is None:
            out.append(_of_hook(hook))
        else:
            out[at] = replace(
                out[at],
                name=hook.name,
                source=f"{out[at].source}, hook",
                world_size=out[at].world_size or hook.world_size,
                said=_and(out[at].said, _can(hook)),
            )
    return tuple(out)


def node_names(cluster: Cluster, snapshot: Snapshot) -> Mapping[str, str]:
    """A node by what Slurm may call it: the inventory's name, its host name, or the first part of either. A short name
    that two nodes share names neither."""
    names: dict[str, str] = {}
    short: dict[str, set[str]] = {}
    for node in snapshot.nodes:
        for name in (node.name, node.hostname):
            if name:
                short.setdefault(name.partition(".")[0].lower(), set()).add(node.name)
    names.update({name: next(iter(of)) for name, of in short.items() if len(of) == 1})
    names.update({s.hostname.lower(): s.name for s in snapshot.nodes if s.hostname})
    names.update({node.name.lower(): node.name for node in cluster.nodes})
    return names


def _group(process: Process) -> tuple[str, ...]:
    """What the processes of one job have in common; nothing for one that is not to be listed."""
    ranked, holds = _whole(process.rank) is not None, bool(process.memory_mib)
    if process.slurm_job and (ranked or holds):
        return ("slurm", process.slurm_job)
    if ranked:
        return ("launched", process.world_size or "?", process.name)
    return ("rankless",) if holds else ()


def _gathered(key: tuple[str, ...], members: Sequence[tuple[RankAt, Process]]) -> FoundJob:
    ranked = [(at, process) for at, process in members if at.rank is not None]
    # A data loader on a GPU inherits its rank's environment or has none: the holder of the memory is the rank.
    best: dict[tuple[int | None, str, int], tuple[RankAt, Process]] = {}
    for at, process in sorted(ranked, key=lambda m: -(m[1].memory_mib or 0.0)):
        best.setdefault((at.rank, at.node, at.slot), (at, process))
    kept = [at for at, _ in best.values()] or [at for at, _ in members]
    sizes = {size for _, process in ranked if (size := _whole(process.world_size))}
    size = sizes.pop() if len(sizes) == 1 else None
    ids = {"slurm": key[-1], "launched": f"{key[-1]}/{size or '?'}", "rankless": "-"}
    return FoundJob(
        id=clean(ids[key[0]], 80),
        name=RANKLESS if key[0] == "rankless" else clean(members[0][1].name, 60),
        user="",
        state="RUNNING",
        source="processes",
        world_size=size,
        ranks=tuple(sorted(kept, key=lambda at: (-1 if at.rank is None else at.rank, at.node, at.slot))),
        nodes=tuple(dict.fromkeys(at.node for at, _ in members)),
        gpus=len({(at.node, at.slot) for at, _ in members}),
        run_s=None,
        partition="",
        said=_odd(kept, size),
    )


def _odd(ranks: Sequence[RankAt], size: int | None) -> str:
    """What does not fit together in a job's ranks."""
    told = [at.rank for at in ranks if at.rank is not None]
    said = ""
    if size is not None and any(rank >= size for rank in told):
        said = _and(said, f"a rank is not below the {size} that the job has")
    if len({(at.rank, at.node) for at in ranks if at.rank is not None}) > len(set(told)):
        said = _and(said, "a rank is on two nodes: these may be several jobs")
    if size is not None and told and len(set(told)) < size:
        said = _and(said, f"{len(set(told))} of {size} ranks were seen on GPUs")
    return said


def _placed(job: Job, names: Mapping[str, str], slots: Mapping[str, int]) -> FoundJob | None:
    """A job of Slurm's on our nodes; None for one that runs elsewhere."""
    known = [(host, node) for host in job.hosts if (node := _node(names, host))]
    if job.hosts and not known:
        return None
    elsewhere = len(job.hosts) - len(known)
    ranks = tuple(
        RankAt(None, node, slot, None)
        for host, node in known
        for slot in job.gpu_index.get(host, ())
        if slot < slots.get(node, 0)
    )
    return FoundJob(
        id=job.id,
        name=clean(job.name, 60),
        user=clean(job.user, 40),
        state=job.state,
        source="Slurm",
        world_size=None,
        ranks=ranks,
        nodes=tuple(dict.fromkeys(node for _, node in known)),
        gpus=job.gpus,
        run_s=job.run_s,
        partition=job.partition,
        said=f"{elsewhere} of its hosts are not in the inventory" if elsewhere else "",
    )


def _node(names: Mapping[str, str], host: str) -> str | None:
    return names.get(host.lower()) or names.get(host.partition(".")[0].lower())


def _joined(job: FoundJob, seen: FoundJob) -> FoundJob:
    """Slurm's entry with the ranks of the processes; GPUs that no process told of stay as Slurm gave them."""
    taken = {(at.node, at.slot) for at in seen.ranks}
    rest = tuple(at for at in job.ranks if (at.node, at.slot) not in taken)
    return replace(
        job,
        source="Slurm, processes",
        world_size=seen.world_size,
        ranks=(*seen.ranks, *rest),
        nodes=tuple(dict.fromkeys((*job.nodes, *seen.nodes))),
        gpus=seen.gpus if job.gpus is None else job.gpus,
        said=_and(job.said, seen.said),
    )


def _hooked(jobs: Sequence[FoundJob], hook: JobStatus) -> int | None:
    """The one job that a hook belongs to: on its node, of its name, else the only one there that trains."""
    there = [i for i, job in enumerate(jobs) if hook.node in job.nodes and job.name != RANKLESS]
    there = [i for i in there if "hook" not in jobs[i].source]
    named = [i for i in there if hook.name in (jobs[i].name, jobs[i].id)]
    fits = named or there
    return fits[0] if len(fits) == 1 else None


def _of_hook(hook: JobStatus) -> FoundJob:
    return FoundJob(
        id=hook.name,
        name=hook.name,
        user="",
        state="RUNNING" if hook.attached else "",
        source="hook",
        world_size=hook.world_size if hook.greeted else None,
        ranks=(),
        nodes=(hook.node,),
        gpus=None,
        run_s=None,
        partition="",
        said=_can(hook),
    )


def _can(hook: JobStatus) -> str:
    if not hook.attached:
        return f"its hook is not attached: {hook.reason}" if hook.reason else "its hook is not attached"
    return f"takes {', '.join(sorted(hook.can))}" if hook.can else "its hook takes no commands"


def _and(first: str, second: str) -> str:
    return "; ".join(part for part in (first, second) if part)


def _whole(text: str | None) -> int | None:
    """A rank or a size as its environment tells it; None for what is no number or no possible one."""
    if text is None or not text.isascii() or not text.isdecimal() or len(text) > 7:
        return None
    return int(text) if int(text) < MOST_RANKS else None
