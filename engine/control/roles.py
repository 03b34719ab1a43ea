"""Who runs where: the rank of each GPU, its place in every parallel group, and whose traffic a link carries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.control import load
from engine.job.status import JobStatus
from engine.model.links import LinkLoad
from engine.model.predict import PlanError, replicas
from engine.profile import Cluster, Parallelism
from engine.telemetry.snapshot import Snapshot

Ints = npt.NDArray[np.int64]

KINDS = ("TP", "CP", "DP", "PP")

Link = tuple[str, int | str]
"""All NVLinks of a GPU, by (node, slot), or one network port, by (node, port's name)."""


@dataclass(frozen=True)
class Role:
    """A global rank; `place` its number within each parallel group, `group` the number of that group among its kind."""

    rank: int
    place: Mapping[str, int]
    group: Mapping[str, int]
    size: Mapping[str, int]

    def text(self) -> str:
        """To read: the kinds that the plan uses."""
        used = [f"{kind} {self.place[kind]} of group {self.group[kind]}" for kind in KINDS if self.size[kind] > 1]
        return f"rank {self.rank}" + (f": {', '.join(used)}" if used else "")


def role(parallelism: Parallelism, dp: int, rank: int) -> Role:
    """Where a rank stands, ranks numbered in the plan's order: group g of a kind of size n and stride s holds the ranks
    that differ in this coordinate alone."""
    p = parallelism
    sizes = {"TP": p.tensor, "CP": p.context, "DP": dp, "PP": p.pipeline}
    order = ("TP", "CP", "PP", "DP") if p.order == "tp-cp-pp-dp" else ("TP", "CP", "DP", "PP")
    place, group, stride = {}, {}, 1
    for kind in order:
        size = sizes[kind]
        place[kind] = rank // stride % size
        group[kind] = rank // (stride * size) * stride + rank % stride
        stride *= size
    return Role(rank, place, group, sizes)


def roles(cluster: Cluster, snapshot: Snapshot, status: JobStatus | None) -> dict[tuple[str, int], Role]:
    """The role of each (node, slot) of the attached job; nothing where the job does not say enough.

    Ranks come from the processes' own environment; where none is told there, from the job's rank order if it fills the
    cluster.
    """
    found = load.planned(status) if status is not None else None
    if status is None or found is None:
        return {}
    try:
        dp = replicas(found.model, found.plan, cluster)
    except PlanError:
        return {}
    p, world = found.plan.parallelism, found.plan.model_gpus * dp
    out = {}
    for node in snapshot.nodes:
        for slot, row in enumerate(node.rows):
            rank = _told(snapshot, row, world)
            if rank is not None:
                out[node.name, slot] = role(p, dp, rank)
    if not out and world == cluster.gpus:
        out = {place: role(p, dp, rank) for rank, place in enumerate(cluster.slots)}
    return out


def _told(snapshot: Snapshot, row: int, world: int) -> int | None:
    """The one rank that the processes on a GPU name; None when none or several do, or when it is not of this job."""
    known = {p.rank for p in snapshot.gpus.processes[row] if p.rank is not None and p.rank.isdecimal()}
    rank = int(known.pop()) if len(known) == 1 else None
    return rank if rank is not None and rank < world else None


def carried(cluster: Cluster, snapshot: Snapshot, found: Mapping[tuple[str, int], Role]) -> dict[Link, str]:
    """Whose traffic goes over a GPU's NVLinks, and over a network port.

    Inside a node runs the innermost group that has more than one rank, outside the first that is wider than a node.
    """
    out: dict[Link, str] = {}
    slots = {node.name: list(node.rows) for node in snapshot.nodes}
    gpus = {node.name: cluster.type_of(node).gpus for node in cluster.nodes}
    for (node, slot), of in found.items():
        inner = next((kind for kind in KINDS if of.size[kind] > 1), None)
        if inner is not None:
            out[node, slot] = f"{inner} group {of.group[inner]}"
        width, outer = 1, None
        for kind in KINDS:
            width *= of.size[kind]
            if outer is None and of.size[kind] > 1 and width > gpus[node]:
                outer = kind
        if outer is not None and slot < len(slots[node]):
            for port in snapshot.gpus.facts[slots[node][slot]].near:
                out.setdefault((node, port), f"{outer} group {of.group[outer]}")
    return out


def expected(carrying: Mapping[Link, str], load: LinkLoad) -> dict[Link, float]:
    """What the links that carry a job's traffic should carry by the cost model, GB/s in each direction, where it knows.

    What leaves a node is spread evenly over the ports that its GPUs are near.
    """
    gpus = Counter(node for node, link in carrying if isinstance(link, int))
    ports = Counter(node for node, link in carrying if isinstance(link, str))
    out = {}
    for node, link in carrying:
        rate = load.inside_gb_s if isinstance(link, int) else load.outside_gb_s * gpus[node] / ports[node]
        if rate > 0:  # not NaN
            out[node, link] = rate
    return out
