"""Traffic of each parallelism: bytes, how often, over which link, at which achieved share, in how many seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.profile import Cluster

Link = Literal["nvlink", "network", "none"]

# Default achieved shares of link bandwidth (the measured utilisations that the product's source text reports).
ACHIEVED = {"data": 0.85, "tensor": 0.45, "pipeline": 0.72, "context": 0.72, "expert": 0.38}

LATENCY_S = {"nvlink": 8e-6, "network": 20e-6, "none": 0.0}
"""Start of one collective on a link class; NCCL's published small-message times are of this order."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """One parallelism's traffic on one GPU in one iteration. `bytes` is what its link carries in one direction."""

    parallelism: str
    link: Link
    bytes: float
    count: float
    achieved_fraction: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Group:
    """A communication group: `size` ranks, `stride` apart in rank order."""

    size: int
    stride: int


def link_of(group: Group, cluster: Cluster) -> Link:
    """The slowest link class the group really spans, ranks being numbered node by node."""
    if group.size <= 1:
        return "none"
    return "nvlink" if group.size * group.stride <= cluster.gpus_per_node else "network"


def link_gb_s(group: Group, cluster: Cluster) -> float:
    """GB/s in one direction that a rank of the group may use of its slowest link.

    Groups that interleave in a node share its ports: with stride s, min(s, GPUs per node) of them cross at once.
    """
    fabric = cluster.device.fabric.gb_s
    if link_of(group, cluster) != "network":
        return fabric
    sharing = min(group.stride, cluster.gpus_per_node)
    return min(fabric, cluster.node_gb_s / sharing)


def collective(
    parallelism: str, group: Group, cluster: Cluster, payload: float, rounds: float, count: float
) -> Traffic:
    """`count` ring collectives of `payload` bytes each; `rounds` is 2 for an all-reduce, 1 for gather or scatter.

    Ring cost as in Thakur et al. 2005: rounds (n - 1)/n payload / bandwidth, plus a start latency each.
    """
    link = link_of(group, cluster)
    share = ACHIEVED[parallelism]
    if link == "none" or count == 0:
        return Traffic(parallelism, "none", 0.0, 0.0, share, 0.0)
    volume = rounds * (group.size - 1) / group.size * payload * count
    seconds = volume / (link_gb_s(group, cluster) * 1e9 * share) + count * LATENCY_S[link]
    return Traffic(parallelism, link, volume, count, share, seconds)


def point_to_point(parallelism: str, group: Group, cluster: Cluster, payload: float, count: float) -> Traffic:
    """`count` sends of `payload` bytes to the neighbour in the group."""
    link = link_of(group, cluster)
    share = ACHIEVED[parallelism]
    if link == "none" or count == 0:
        return Traffic(parallelism, "none", 0.0, 0.0, share, 0.0)
    seconds = payload * count / (link_gb_s(group, cluster) * 1e9 * share) + count * LATENCY_S[link]
    return Traffic(parallelism, link, payload * count, count, share, seconds)
