"""Which node gets which ranks: what is asked most of goes where the air is coolest, hot racks last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from engine.model import pace, power, thermal
from engine.model.predict import Prediction
from engine.profile import Cluster, Node

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Seat:
    """A node, the ranks that start on it, their pipeline stages, and its hottest GPU once settled, C."""

    node: str
    ranks: tuple[int, int]
    stages: tuple[int, int]
    temperature_c: float


@dataclass(frozen=True)
class Placement:
    """Nodes in the order of their ranks. `hottest_c` with it, `listed_c` with the nodes as the cluster lists them;
    `spans` the slowest link that each parallelism's groups meet."""

    seats: tuple[Seat, ...]
    hottest_c: float
    listed_c: float
    spans: dict[str, str]

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(seat.node for seat in self.seats)


def coolest(cluster: Cluster, gpus: int) -> Cluster:
    """The cluster reduced to as many of its coolest nodes as `gpus` need; nodes of one leaf switch stay together."""
    order = [node for leaf in _leaves(cluster) for node in leaf]
    count, taken = 0, []
    for node in order:
        if count < gpus:
            taken.append(node.name)
            count += cluster.type_of(node).gpus
    return msgspec.structs.replace(cluster, nodes=tuple(n for n in cluster.nodes if n.name in taken))


def place(cluster: Cluster, found: Prediction) -> Placement:
    """Seat a predicted plan: of its blocks of ranks, a node each, the busiest goes to the coolest node.

    Nodes below one leaf switch keep neighbouring ranks, so that no group climbs higher than it must.
    """
    per_node, nodes = cluster.gpus_per_node, len(cluster.nodes)
    blocks = _rank_w(cluster, found)[: per_node * nodes].reshape(nodes, per_node).mean(axis=1)
    leaves = _leaves(cluster)
    seated: list[Node | None] = [None] * nodes
    size = max(len(leaf) for leaf in leaves)
    groups = [np.arange(first, min(first + size, nodes)) for first in range(0, nodes, size)]
    for leaf, group in zip(leaves, sorted(groups, key=lambda g: (len(g) != size, -blocks[g].mean())), strict=True):
        for node, block in zip(leaf, group[np.argsort(-blocks[group], kind="stable")], strict=True):
            seated[block] = node
    return seat(cluster, found, [node.name for node in seated if node is not None])


def seat(cluster: Cluster, found: Prediction, hosts: Sequence[str]) -> Placement:
    """The placement with the nodes in this order of ranks."""
    by_name, per_node, watts = {n.name: n for n in cluster.nodes}, cluster.gpus_per_node, _rank_w(cluster, found)
    order = [by_name[name] for name in hosts]
    stage = pace.stage_of_gpu(found.plan, found.dp, cluster.gpus)
    heat = _settled_c(cluster, order, watts)
    listed = _settled_c(cluster, cluster.nodes, watts)
    seats = []
    for block, node in enumerate(order):
        rows = slice(block * per_node, (block + 1) * per_node)
        stages = (int(stage[rows].min()), int(stage[rows].max()))
        seats.append(Seat(node.name, (rows.start, rows.stop - 1), stages, float(heat[rows].max())))
    spans = {t.parallelism: t.link for t in found.communication}
    return Placement(tuple(seats), float(heat.max()), float(listed.max()), spans)


def _rank_w(cluster: Cluster, found: Prediction) -> Floats:
    """Mean power of each rank's GPU, W: stages with less to compute wait more."""
    stage = pace.stage_of_gpu(found.plan, found.dp, cluster.gpus)
    load = np.asarray(found.stage_load)[stage]
    wait = power.ACTIVITY["wait"]
    activity = wait + (found.activity - wait) * load
    watts = power.power_w(cluster.device, activity, found.sm_clock_mhz, found.temperature_c)
    return np.asarray(np.minimum(watts, found.plan.optimizations.power_limit_w or cluster.device.power_limit_w.default))


def _settled_c(cluster: Cluster, order: Sequence[Node], watts: Floats) -> Floats:
    return thermal.steady(thermal.chassis_of(msgspec.structs.replace(cluster, nodes=tuple(order))), watts).junction_c


def _leaves(cluster: Cluster) -> list[list[Node]]:
    """Nodes below each leaf switch (all of them where there is none), coolest first within and among them."""
    size = (cluster.network and cluster.network.leaf_nodes) or len(cluster.nodes)
    leaves = [sorted(cluster.nodes[i : i + size], key=cluster.inlet_c) for i in range(0, len(cluster.nodes), size)]
    return sorted(leaves, key=lambda leaf: (len(leaf) != size, sum(map(cluster.inlet_c, leaf)) / len(leaf)))
