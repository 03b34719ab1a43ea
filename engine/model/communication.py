"""Traffic of each parallelism: bytes, how often, over which link, in how many seconds. Arrays over plans.

Ranks are numbered tensor, context, data, pipeline, innermost first, node by node (pipeline before data where the plan
says so); a group's link class is the slowest one it spans.
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
    `link` an index into LINKS, `peak` the datasheet bandwidth that the group may use, bytes/s. `inside` and `outside`
    are the bytes that a GPU of the group sends over its node's fabric and out of the node, on average."""

    link: Column
    bytes: Column
    count: Column
    seconds: Column
    peak: Column
    inside: Column
    outside: Column

    @property
    def achieved_fraction(self) -> Column:
        """Bytes over seconds, as a share of the link's datasheet bandwidth."""
        rate = self.bytes / np.maximum(self.seconds, 1e-12)
        return np.where(self.seconds > 0, rate / self.peak, 0.0)

    def plus(self, other: Traffic) -> Traffic:
        """This traffic and other over the same link."""
        return Traffic(
            self.link,
            self.bytes + other.bytes,
            self.count + other.count,
            self.seconds + other.seconds,
            self.peak,
            self.inside + other.inside,
            self.outside + other.outside,
        )

    def times(self, factor: Column) -> Traffic:
        """This traffic `factor` times over."""
        return Traffic(
            self.link * (factor > 0),
            self.bytes * factor,
            self.count * factor,
            self.seconds * factor,
            self.peak,
            self.inside * factor,
            self.outside * factor,
        )


@dataclass(frozen=True)
class Group:
    """Groups of `size` ranks, `stride` apart in rank order, each group spread over `span` ranks."""

    size: Column
    stride: Column
    spread: Column | float = 1.0

    @property
    def span(self) -> Column:
        return self.size * self.stride * self.spread


@dataclass(frozen=True)
class Path:
    """What a group's collectives run over: link class, bytes/s reached, datasheet bytes/s, nodes spanned, and the share
    of what its ranks send that leaves their nodes."""

    link: Column
    reached: Column
    peak: Column
    nodes: Column
    leaving: Column


def path(w: Work, rates: Rates, group: Group, fabric_peak: float) -> Path:
    """The slowest link a group spans: the node's fabric, a hop between its NUMA nodes where no switch joins them, the
    network of one rail or leaf, or the spine above.

    Groups that interleave in a node share its ports: with stride s, min(s, GPUs of a node) of them cross at once. A
    hierarchical ring enters and leaves a node once, so a group that fills its node has all the node's ports (NCCL's
    multi-ring; Thakur et al. 2005 for the volume). Of k ranks that a group has in a node one sends out of it: 1/k of
    their bytes leave.
    """
    span, several = group.span, group.size > 1
    crossing = several & (span > w.gpus_per_node)
    hop = several & (w.numa_gpus < w.gpus_per_node) & (span > w.numa_gpus)
    climbing = crossing & (span > w.leaf_nodes * w.gpus_per_node)
    groups = np.minimum(group.stride, w.gpus_per_node)
    network = w.node_gb_s * 1e9 / groups * np.where(climbing, w.spine_share, 1.0)
    inside = np.where(hop, np.minimum(w.numa_gb_s * 1e9, fabric_peak), fabric_peak)
    kind = np.where(climbing, 4.0, np.where(crossing, 3.0, np.where(hop, 2.0, 1.0)))
    peak = np.where(crossing, np.minimum(inside, network), inside)
    share = rates.fabric / fabric_peak
    reached = np.where(crossing, np.minimum(inside * share, network * rates.network_share), inside * share)
    nodes = np.where(crossing, np.maximum(1.0, span / w.gpus_per_node), 1.0)
    leaving = np.where(crossing, groups / w.gpus_per_node, 0.0)
    return Path(np.where(several, kind, 0.0), reached, peak, np.minimum(nodes, group.size), leaving)


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
    return _along(along, volume, count * some, seconds)


def sends(rates: Rates, along: Path, payload: Column, count: Column) -> Traffic:
    """`count` sends of `payload` bytes to a neighbour."""
    some = (along.link > 0) & (count > 0)
    hop = np.where(along.link > 2, rates.network_hop_s, rates.fabric_hop_s)
    volume = np.where(some, payload * count, 0.0)
    seconds = np.where(some, volume / along.reached + count * hop, 0.0)
    return _along(along, volume, count * some, seconds)


def _along(path: Path, volume: Column, count: Column, seconds: Column) -> Traffic:
    """Traffic of `volume` bytes, all of it over one group's path."""
    outside = volume * path.leaving
    return Traffic(path.link * (count > 0), volume, count, seconds, path.peak, volume - outside, outside)


def tensor(w: Work, rates: Rates, fabric_peak: float, layers: Column) -> Traffic:
    """Two all-reduces of an activation forward and two backward in each layer (Shoeybi et al. 2019, section 3); with
    sequence parallelism a gather and a scatter of the same volume (Korthikanti et al. 2022, section 4.2.2). A full
    recompute repeats the forward ones. Where fp8 scales are agreed between the tensor ranks, each of a layer's eight
    casts waits for an all-reduce of one number."""
    along = path(w, rates, Group(w.tp, np.ones(len(w))), fabric_peak)
    again = 1.0 + 0.5 * w.recompute
    payload = w.element * w.tokens * w.hidden
    count = 4 * again * layers * w.microbatches
    scales = rates.scales_reduced * w.fp8 * 2 * count
    return collective(rates, along, w.tp, payload, 2.0, count).plus(
        collective(rates, along, w.tp, np.full(len(w), 4.0), 2.0, scales)
    )


def context(w: Work, rates: Rates, fabric_peak: float, layers: Column) -> Traffic:
    """Keys and values go round the ring once forward and, with their gradients, twice backward (Liu et al. 2023)."""
    along = path(w, rates, Group(w.cp, w.tp), fabric_peak)
    payload = 2.0 * w.element * w.tokens * w.kv_width / w.tp * w.cp
    return collective(rates, along, w.cp, payload, 1.0, (3 + w.recompute) * layers * w.microbatches)


def pipeline(w: Work, rates: Rates, fabric_peak: float) -> Traffic:
    """An activation to the next stage and its gradient back, for each chunk and microbatch (Narayanan et al. 2021,
    section 2.2); with sequence parallelism each tensor rank sends its own share."""
    along = path(w, rates, Group(w.pp, w.tp * w.cp * np.where(w.stages_inside > 0, 1.0, w.dp)), fabric_peak)
    payload = w.element * w.tokens * w.hidden / np.where(w.split_norms, w.tp, 1.0)
    return sends(rates, along, payload, 2 * w.vpp * w.microbatches)


def data(w: Work, rates: Rates, fabric_peak: float, dense: Column, experts: Column) -> tuple[Traffic, Column]:
    """Gradients reduced and weights gathered: once an iteration, or, with weights sharded (ZeRO-3), each microbatch.

    ZeRO (Rajbhandari et al. 2020, section 7): scatter and gather take the place of the all-reduce, and a third pass
    gathers the weights again. Where a group smaller than all replicas shares the states, gradients are still reduced
    over all of them. Expert weights travel between the ranks that hold the same experts. Returns the traffic, and the
    seconds of it that nothing can hide: the first gather and the last scatter of a step.
    """
    size = w.dp * w.cp
    group = np.where(w.zero >= 1, np.minimum(w.zero_group, size), size)
    peers = np.maximum(1.0, size * w.expert_tp / w.ep)
    # Stages that stand in one node each have groups of their own there, which share its ports.
    apart, beside = w.between_replicas, np.clip(w.gpus_per_node / (w.tp * w.cp), 1.0, w.between_replicas)
    everywhere = path(w, rates, Group(size, w.tp * beside, apart / beside), fabric_peak)
    within = path(w, rates, Group(group, w.tp * beside, apart / beside), fabric_peak)
    between = path(w, rates, Group(size / group, w.tp * group * beside, apart / beside), fabric_peak)
    alike = path(w, rates, Group(peers, np.where(w.ep > 1, w.ep, w.tp) * beside, apart / beside), fabric_peak)

    wire, one = rates.gradient_bytes, np.ones(len(w))
    buckets = np.maximum(1.0, np.round(wire * dense / BUCKET_BYTES))
    reduced = collective(rates, everywhere, size, wire * dense / buckets, 1.0, buckets)
    back = np.where(w.zero >= 1, 2.0, wire)
    gathered = collective(rates, within, group, back * dense / buckets, 1.0, buckets)
    whole = reduced.times((group < size).astype(float))
    expert_weights = collective(rates, alike, peers, wire * experts, 1.5, one * (experts > 0))
    once = _together(reduced, gathered, whole, expert_weights)
    owners = np.where((w.zero >= 1) & (group > 1), rates.owner_s * group, 0.0)

    layers = np.maximum(w.layers / w.pp, 1.0)
    passes = 3 * layers * w.microbatches
    shards = collective(rates, within, group, 2.0 * dense / layers, 1.0, passes)
    expert_shards = collective(rates, alike, peers, 2.0 * experts / layers, 1.0, passes * (experts > 0))
    copies = collective(rates, between, size / group, wire * dense / group, 2.0, one)
    sharded = _together(shards, expert_shards, copies)

    three = w.zero >= 3
    found = Traffic(
        np.where(three, sharded.link, once.link),
        np.where(three, sharded.bytes, once.bytes),
        np.where(three, sharded.count, once.count),
        np.where(three, sharded.seconds, once.seconds + owners),
        np.where(three, sharded.peak, once.peak),
        np.where(three, sharded.inside, once.inside),
        np.where(three, sharded.outside, once.outside),
    )
    first = np.where(three, 2.0 * shards.seconds / np.maximum(passes, 1.0), gathered.seconds / buckets + owners)
    return found, np.minimum(first, found.seconds)


def expert(w: Work, rates: Rates, fabric_peak: float, layers: Column) -> Traffic:
    """Each token's copies to its experts and back, forward and backward (Lepikhin et al. 2020): an all-to-all.

    A token crosses to a node once, however many of its experts stand there, and is copied on inside (DeepSeek-V3,
    section 3.2.2): of N nodes, k even draws meet N (1 - (1 - 1/N)^k). What crosses goes through one GPU's part of the
    network, while the rest uses the fabric.
    """
    ranks = w.ep * w.expert_tp
    apart = np.where(ranks > w.tp * w.cp, w.between_replicas, 1.0)
    nodes = np.clip(ranks * apart / w.gpus_per_node, 1.0, ranks)
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
    out = np.where(beyond, across, 0.0) * count
    return Traffic(link, np.where(beyond, across, inside) * count, count, seconds, peak, inside * count, out)


def _together(*parts: Traffic) -> Traffic:
    """Traffic one after another. Over several links the datasheet's bandwidth is the one at which all these bytes
    would take the sum of their times."""
    seconds = np.sum([t.seconds for t in parts], axis=0)
    volume = np.sum([t.bytes for t in parts], axis=0)
    ideal = np.sum([t.bytes / t.peak for t in parts], axis=0)
    peak = np.where(ideal > 0, volume / np.maximum(ideal, 1e-30), parts[0].peak)
    link = np.max([t.link for t in parts], axis=0)
    inside, outside = (np.sum([getattr(t, name) for t in parts], axis=0) for name in ("inside", "outside"))
    return Traffic(link, volume, np.sum([t.count for t in parts], axis=0), seconds, peak, inside, outside)
