"""Traffic of each parallelism: bytes, how often, over which link, in how many seconds. Arrays over plans.

Ranks are numbered tensor, context, data, pipeline, innermost first, node by node; a group's link class is the slowest
one it spans.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.model.rates import Rates
from engine.model.work import Column, Work

LINKS = ("none", "nvlink", "numa", "network", "spine")
BUCKET_BYTES = 160e6
"""Gradients are reduced in buckets of about 40 million 32-bit values (Megatron-LM's default)."""


@dataclass(frozen=True)
class Traffic:
    """Traffic of one parallelism on one GPU and iteration. `bytes` is what its link carries in one direction,
    `link` an index into LINKS, `peak` the datasheet bandwidth that the group may use, bytes/s."""

    link: Column
    bytes: Column
    count: Column
    seconds: Column
    peak: Column

    @property
    def achieved_fraction(self) -> Column:
        """Bytes over seconds, as a share of the link's datasheet bandwidth."""
        rate = self.bytes / np.maximum(self.seconds, 1e-12)
        return np.where(self.seconds > 0, rate / self.peak, 0.0)


@dataclass(frozen=True)
class Group:
    """Groups of `size` ranks, `stride` apart in rank order."""

    size: Column
    stride: Column


@dataclass(frozen=True)
class Path:
    """What a group's collectives run over: link class, bytes/s reached, datasheet bytes/s, nodes spanned."""

    link: Column
    reached: Column
    peak: Column
    nodes: Column


def path(w: Work, rates: Rates, group: Group, fabric_peak: float) -> Path:
    """The slowest link a group spans: the node's fabric, a hop between its NUMA nodes where no switch joins them, the
    network of one rail or leaf, or the spine above.

    Groups that interleave in a node share its ports: with stride s, min(s, GPUs of a node) of them cross at once. A
    hierarchical ring enters and leaves a node once, so a group that fills its node has all the node's ports (NCCL's
    multi-ring; Thakur et al. 2005 for the volume).
    """
    span, several = group.size * group.stride, group.size > 1
    crossing = several & (span > w.gpus_per_node)
    hop = several & (w.numa_gpus < w.gpus_per_node) & (span > w.numa_gpus)
    climbing = crossing & (span > w.leaf_nodes * w.gpus_per_node)
    network = w.node_gb_s * 1e9 / np.minimum(group.stride, w.gpus_per_node) * np.where(climbing, w.spine_share, 1.0)
    inside = np.where(hop, np.minimum(w.numa_gb_s * 1e9, fabric_peak), fabric_peak)
    kind = np.where(climbing, 4.0, np.where(crossing, 3.0, np.where(hop, 2.0, 1.0)))
    peak = np.where(crossing, np.minimum(inside, network), inside)
    share = rates.fabric / fabric_peak
    reached = np.where(crossing, np.minimum(inside * share, network * rates.network_share), inside * share)
    nodes = np.where(crossing, np.maximum(1.0, span / w.gpus_per_node), 1.0)
    return Path(np.where(several, kind, 0.0), reached, peak, np.minimum(nodes, group.size))


def collective(rates: Rates, along: Path, size: Column, payload: Column, rounds: float, count: Column) -> Traffic:
    """`count` ring collectives of `payload` bytes; `rounds` is 2 for an all-reduce, 1 for a gather or a scatter.

    rounds (n - 1)/n payload / bandwidth, and a hop's latency for each step of the ring (Thakur, Rabenseifner and
    Gropp, 2005, section 4); NCCL turns to trees (2 log2 n hops) where the ring would be slower.
    """
    some = (along.link > 0) & (count > 0)
    volume = np.where(some, rounds * (size - 1) / size * payload * count, 0.0)
    inside = np.minimum(size - 1, 2 * np.log2(np.maximum(size, 2)))
    across = np.minimum(along.nodes - 1, 2 * np.log2(np.maximum(along.nodes, 2)))
    hops = rounds * (inside * rates.fabric_hop_s + across * rates.network_hop_s)
    seconds = np.where(some, volume / along.reached + count * hops, 0.0)
    return Traffic(along.link * some, volume, count * some, seconds, along.peak)


def sends(rates: Rates, along: Path, payload: Column, count: Column) -> Traffic:
    """`count` sends of `payload` bytes to a neighbour."""
    some = (along.link > 0) & (count > 0)
    hop = np.where(along.link > 2, rates.network_hop_s, rates.fabric_hop_s)
    volume = np.where(some, payload * count, 0.0)
    seconds = np.where(some, volume / along.reached + count * hop, 0.0)
    return Traffic(along.link * some, volume, count * some, seconds, along.peak)


def tensor(w: Work, rates: Rates, fabric_peak: float, layers: Column) -> Traffic:
    """Two all-reduces of an activation forward and two backward in each layer (Shoeybi et al. 2019, section 3); with
    sequence parallelism a gather and a scatter of the same volume (Korthikanti et al. 2022, section 4.2.2). A full
    recompute repeats the forward ones."""
    along = path(w, rates, Group(w.tp, np.ones(len(w))), fabric_peak)
    again = 1.0 + 0.5 * w.recompute
    payload = w.element * w.tokens * w.hidden
    return collective(rates, along, w.tp, payload, 2.0, 4 * again * layers * w.microbatches)


def context(w: Work, rates: Rates, fabric_peak: float, layers: Column) -> Traffic:
    """Keys and values go round the ring once forward and, with their gradients, twice backward (Liu et al. 2023)."""
    along = path(w, rates, Group(w.cp, w.tp), fabric_peak)
    payload = 2.0 * w.element * w.tokens * w.kv_width / w.tp * w.cp
    return collective(rates, along, w.cp, payload, 1.0, (3 + w.recompute) * layers * w.microbatches)


def pipeline(w: Work, rates: Rates, fabric_peak: float) -> Traffic:
    """An activation to the next stage and its gradient back, for each chunk and microbatch (Narayanan et al. 2021,
    section 2.2); with sequence parallelism each tensor rank sends its own share."""
    along = path(w, rates, Group(w.pp, w.tp * w.cp * w.dp), fabric_peak)
    payload = w.element * w.tokens * w.hidden / np.where(w.split_norms, w.tp, 1.0)
    return sends(rates, along, payload, 2 * w.vpp * w.microbatches)


def data(w: Work, rates: Rates, fabric_peak: float, dense: Column, experts: Column) -> tuple[Traffic, Traffic]:
    """Gradients reduced and weights gathered: once an iteration, or, with weights sharded (ZeRO-3), each microbatch.

    ZeRO (Rajbhandari et al. 2020, section 7): scatter and gather take the place of the all-reduce, and a third pass
    gathers the weights again. Expert weights are reduced over the ranks that hold the same experts. Returns the
    traffic, and the part of it that nothing can hide: the first gather and the last scatter of a step.
    """
    size = w.dp * w.cp
    along = path(w, rates, Group(size, w.tp), fabric_peak)
    held = dense + experts
    three = w.zero >= 3
    layers = np.maximum(w.layers / w.pp, 1.0)
    m = w.microbatches
    gathers = collective(rates, along, size, 2.0 * held / layers, 1.0, 3 * layers * m)
    once = collective(rates, along, size, dense, 1.0, np.ones(len(w)))
    buckets = np.maximum(1.0, np.round(rates.gradient_bytes * dense / BUCKET_BYTES))
    wide = collective(rates, along, size, rates.gradient_bytes * dense / buckets, 1.0, buckets)
    group = np.minimum(w.zero_group, size)
    sharing = path(w, rates, Group(np.where(w.zero >= 1, group, size), w.tp), fabric_peak)
    back = np.where(w.zero >= 1, 2.0, rates.gradient_bytes)
    gathered = collective(rates, sharing, np.where(w.zero >= 1, group, size), back * dense / buckets, 1.0, buckets)
    # Where states are shared by fewer ranks than there are replicas, gradients are still reduced over all of them.
    whole = (w.zero >= 1) & (group < size)
    again = collective(rates, along, size, rates.gradient_bytes * dense / buckets, 1.0, buckets)
    peers = np.maximum(1.0, size / w.ep)
    spread = path(w, rates, Group(peers, w.tp * w.ep), fabric_peak)
    expert = collective(rates, spread, peers, rates.gradient_bytes * experts, 1.5, (experts > 0).astype(float))
    owners = np.where((w.zero >= 1) & ~three & (group > 1), rates.owner_s * group, 0.0)
    parts = ((wide, 1.0), (gathered, 1.0), (again, whole), (expert, 1.0))
    seconds = sum((t.seconds * n for t, n in parts), owners)
    volume = sum((t.bytes * n for t, n in parts), np.zeros(len(w)))
    count = sum((t.count * n for t, n in parts), np.zeros(len(w)))
    # Over several links the datasheet's bandwidth is the one at which these bytes would take the sum of their times.
    ideal = sum((t.bytes * n / t.peak for t, n in parts), np.zeros(len(w)))
    peak = np.where(three | (ideal <= 0), along.peak, volume / np.maximum(ideal, 1e-30))
    link = np.maximum(along.link, spread.link * (experts > 0))
    total = Traffic(
        np.where(three, gathers.link, link * (count > 0)),
        np.where(three, gathers.bytes, volume),
        np.where(three, gathers.count, count),
        np.where(three, gathers.seconds, seconds),
        peak,
    )
    bare = np.where(three, 2 * gathers.seconds / np.maximum(gathers.count, 1.0), once.seconds / buckets + owners)
    return total, Traffic(total.link, total.bytes * 0, total.count * 0, np.minimum(bare, total.seconds), along.peak)


def expert(w: Work, rates: Rates, fabric_peak: float, layers: Column) -> Traffic:
    """Each token's copies to its experts and back, forward and backward (Lepikhin et al. 2020): an all-to-all.

    A token crosses to a node once, however many of its experts stand there, and is copied on inside (DeepSeek-V3,
    section 3.2.2): of N nodes, k even draws meet N (1 - (1 - 1/N)^k). What crosses goes through one GPU's part of the
    network, while the rest uses the fabric.
    """
    nodes = np.maximum(1.0, w.ep * np.where(w.ep > 1, w.tp, 1.0) / w.gpus_per_node)
    token = w.tokens / w.tp * w.hidden * w.element * w.imbalance
    met = nodes * (1.0 - (1.0 - 1.0 / nodes) ** w.topk)
    across = token * met * (nodes - 1) / nodes
    inside = token * w.topk * (w.ep - 1) / w.ep
    count = np.where((w.experts > 0) & (w.ep > 1), 4 * (1 + 0.5 * w.recompute), 0.0) * layers * w.microbatches
    port = w.node_gb_s * 1e9 / w.gpus_per_node
    beyond = nodes > 1
    across_s = across / (port * rates.network_share * rates.scatter_share)
    inside_s = inside / (rates.fabric * rates.scatter_share)
    hop = np.where(beyond, rates.network_hop_s, rates.fabric_hop_s)
    seconds = count * (np.maximum(inside_s, across_s) + hop * np.log2(np.maximum(w.ep, 2)))
    peak = np.where(beyond, port, fabric_peak)
    link = np.where(count > 0, np.where(beyond, 3.0, 1.0), 0.0)
    return Traffic(link, np.where(beyond, across, inside) * count, count, seconds, peak)
