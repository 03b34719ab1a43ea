"""What a person names as the target of an action: a GPU, a node, a rack, all; or a job."""

from __future__ import annotations

from collections.abc import Iterable

from engine.control.discover import FoundJob
from engine.control.hookless import trains
from engine.job.status import JobStatus
from engine.profile import Cluster, ProfileError

Cell = tuple[int, int]
"""A node's number in the inventory, and a slot."""


def cells_of(cluster: Cluster, target: str) -> tuple[str, list[Cell]]:
    """`n01`, `n01:3`, `n01:0-3`, `rack:r1` or `all`, several with commas between: a label and the cells. ProfileError
    when it names nothing."""
    cells: list[Cell] = []
    for part in (p.strip() for p in target.split(",")):
        cells += [c for c in _part(cluster, part) if c not in cells]
    if not cells:
        raise ProfileError(f"'{target}' names no GPU of {cluster.name}.")
    return target.strip(), cells


def _part(cluster: Cluster, part: str) -> list[Cell]:
    if part == "all":
        return _nodes(cluster, range(len(cluster.nodes)))
    kind, _, name = part.partition(":")
    if kind == "rack" and not any(n.name == "rack" for n in cluster.nodes):
        there = [i for i, node in enumerate(cluster.nodes) if node.rack == name]
        if not there:
            racks = ", ".join(dict.fromkeys(n.rack for n in cluster.nodes))
            raise ProfileError(f"There is no rack '{name}' in {cluster.name}; it has {racks}.")
        return _nodes(cluster, there)
    at = next((i for i, node in enumerate(cluster.nodes) if node.name == kind), None)
    if at is None:
        some = ", ".join(n.name for n in cluster.nodes[:6]) + (", …" if len(cluster.nodes) > 6 else "")
        raise ProfileError(
            f"There is no node '{kind}' in {cluster.name} ({some}). A target is a node, node:GPU, node:0-3, rack:NAME "
            "or all."
        )
    gpus = cluster.type_of(cluster.nodes[at]).gpus
    first, _, last = (name or f"0-{gpus - 1}").partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < gpus):
        raise ProfileError(f"'{name}' names no GPU of {kind}: they are 0 to {gpus - 1}.")
    return [(at, slot) for slot in range(int(first), int(last) + 1)]


def _nodes(cluster: Cluster, numbers: Iterable[int]) -> list[Cell]:
    return [(i, slot) for i in numbers for slot in range(cluster.type_of(cluster.nodes[i]).gpus)]


def job_of(hooks: Iterable[JobStatus], found: Iterable[FoundJob], target: str) -> JobStatus | FoundJob:
    """The job of that name or id: the one whose hook answers, else one that Slurm or processes tell of; `-` where there
    is but one. ProfileError, with those there are, when it is none or several."""
    attached, every = [j for j in hooks if j.attached], [j for j in found if trains(j)]
    ids = {f.name for f in every if f.id == target and "hook" in f.source}
    others = [f for f in every if "hook" not in f.source]
    either: list[JobStatus | FoundJob] = [*attached, *others]
    named: list[JobStatus | FoundJob] = [j for j in attached if j.name == target or j.name in ids]
    named = named or [f for f in others if target in (f.id, f.name)]
    if target == "-" and len(either) == 1:
        return either[0]
    if len(named) == 1:
        return named[0]
    if len(named) > 1:
        keys = ", ".join(j.key if isinstance(j, JobStatus) else j.id for j in named)
        raise ProfileError(f"Several jobs are called {target}: {keys}.")
    names = sorted(j.name if isinstance(j, JobStatus) else f"{j.id} ({j.name})" for j in either)
    raise ProfileError(f"There is no job '{target}'; there is {', '.join(names) or 'none'}.")


def hooked(job: JobStatus | FoundJob, what: str) -> JobStatus:
    """The job itself, if it has a hook to take a command. ProfileError otherwise: nothing is faked."""
    if isinstance(job, JobStatus):
        return job
    raise ProfileError(
        f"{job.name} ({job.id}) has no hook: {what} is not available. Its trainer would use rackside_hook "
        "(`rackside hook`); pause and resume work without."
    )
