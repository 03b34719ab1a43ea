"""One iteration of every plan in the columns, itemised. The one place where kernels, traffic and pipeline meet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.model import communication, gemm, memory, pipeline, power
from engine.model.communication import Traffic
from engine.model.gemm import Times
from engine.model.rates import Rates
from engine.model.thermal import Chassis, hottest_c
from engine.model.work import Column, Work
from engine.profile import Device

PARTS = (
    "compute_s",
    "attention_s",
    "elementwise_s",
    "optimizer_s",
    "bubble_s",
    "exposed_comm_s",
    "straggler_s",
    "host_s",
)


@dataclass(frozen=True)
class Iteration:
    """Seconds on the critical path of one iteration: of the slowest stage, which sets the pace. The `*_s` from
    `compute_s` to `host_s` add up to `iteration_s`; `traffic` is what the links carry, seen or hidden."""

    compute_s: Column
    attention_s: Column
    elementwise_s: Column
    optimizer_s: Column
    bubble_s: Column
    exposed_comm_s: Column
    straggler_s: Column
    host_s: Column
    traffic: dict[str, Traffic]
    microbatch_clocked_s: Column
    microbatch_fixed_s: Column
    fill: Column
    once_s: Column
    clock_mhz: Column

    def row(self, index: int) -> dict[str, float]:
        """One plan's seconds by name, as plain numbers."""
        return {name: float(getattr(self, name)[index]) for name in PARTS}

    @property
    def iteration_s(self) -> Column:
        total: Column = sum(getattr(self, name) for name in PARTS)
        return total

    def activity(self, waiting: bool = True) -> Column:
        """Mean activity: each phase's share of the time times its activity; without waits, what the limiter sees."""
        a = power.ACTIVITY
        wait = self.bubble_s + self.host_s + self.straggler_s if waiting else 0.0
        talk = self.exposed_comm_s if waiting else 0.0
        memory = self.elementwise_s + self.optimizer_s
        total = self.compute_s + self.attention_s + memory + talk + wait
        busy = self.compute_s * a["matmul"] + self.attention_s * a["attention"] + memory * a["memory"]
        return (busy + talk * a["communication"] + wait * a["wait"]) / total


def iteration(w: Work, device: Device, rates: Rates) -> Iteration:
    """Time one iteration with the clock that the power limit allows: power limits clock, clock sets time, time sets
    activity; two rounds settle it to well under a percent."""
    clock = w.clock_limit_mhz
    found = _at_clock(w, device, rates, clock)
    for _ in range(2):
        allowed = power.clock_under_limit(device, found.activity(waiting=False), w.power_limit_w, 60.0)
        lower = np.minimum(allowed, w.clock_limit_mhz)
        if np.array_equal(lower, clock):
            break
        clock = lower
        found = _at_clock(w, device, rates, clock)
    return found


def _at_clock(w: Work, device: Device, rates: Rates, clock: Column) -> Iteration:
    share = clock / device.clock.max
    forward, backward = gemm.layer(w, rates)
    head_f, head_b = gemm.head(w, rates)
    once_more = w.recompute
    attention_again = Times(0 * once_more, forward.attention_s * w.recompute_attention, 0 * once_more)
    layer = forward.times(1 + once_more) + backward + attention_again
    head = head_f + head_b
    layer, head = layer.at_clock(share), head.at_clock(share)
    m = w.microbatches

    # Traffic of one layer and microbatch, then what of it is seen. A collective takes SMs and memory bandwidth from
    # what runs beside it: `beside` of the hidden time comes back as slower kernels.
    fabric = device.fabric.gb_s * 1e9
    one = np.ones(len(w))
    tp, cp = communication.tensor(w, rates, fabric, one), communication.context(w, rates, fabric, one)
    ep = communication.expert(w, rates, fabric, 1.0 - w.dense_layers / w.layers)
    per = 1.0 / m
    overlap = w.overlap
    hideable = rates.tensor_hidden + (1.0 - rates.tensor_hidden) * 0.5 * w.tp_async
    tp_hidden = overlap * hideable * np.minimum(tp.seconds * per, layer.matmul_s)
    cp_hidden = overlap * np.minimum(cp.seconds * per, layer.attention_s)
    seen = tp.seconds * per - (1 - rates.beside) * tp_hidden + cp.seconds * per - (1 - rates.beside) * cp_hidden
    # Experts' traffic hides behind another microbatch's layers where the pipeline interleaves them.
    ep_hidden = overlap * rates.expert_hidden * (w.vpp > 1) * np.minimum(ep.seconds * per, layer.total_s)
    seen = seen + ep.seconds * per - (1 - rates.beside) * ep_hidden
    each_layer = layer.total_s + seen

    # Stages: the first holds the embedding, the last the head; the slowest sets the pace.
    single = w.pp <= 1
    ends = w.last_layers * each_layer + head.total_s
    middle = np.where(single, 0.0, np.maximum(w.first_layers, np.where(w.pp > 2, w.widest_layers, 0)) * each_layer)
    at_end = ends >= middle
    slow_layers = np.where(at_end, w.last_layers, np.maximum(w.first_layers, np.where(w.pp > 2, w.widest_layers, 0)))
    slow = layer.times(slow_layers) + head.times(at_end.astype(float))
    slow_seen = slow_layers * seen

    pp = communication.pipeline(w, rates, fabric)
    pp_each = pp.seconds * per * (1 - overlap * rates.pipeline_hidden)
    microbatch = slow.total_s + slow_seen + pp_each
    passage = w.layers * each_layer + head.total_s + w.pp * pp_each * ~single
    bubble = pipeline.bubble_s(np.maximum(passage, microbatch), microbatch, w.vpp)
    bubble = np.where(single, 0.0, bubble)
    weight_share = np.clip(0.5 * backward.matmul_s / (forward.total_s + backward.total_s), 0, 1)
    bubble = np.where(w.zero_bubble > 0, pipeline.zero_bubble_s(bubble, weight_share), bubble)

    fullest = np.maximum(w.first_layers, np.where(w.pp > 2, w.widest_layers, 0.0))
    dense, experts = memory.parameters(w, fullest, np.where(w.pp > 1, 1.0, w.tables))
    dp, bare = communication.data(w, rates, fabric, dense, experts)
    backward_s = slow_layers * (backward.at_clock(share).total_s + once_more * forward.at_clock(share).total_s)
    three = w.zero >= 3
    room = np.where(three, m * slow.total_s, backward_s + np.where(w.zero >= 1, 0.5, 0.0) * backward_s)
    hidden = overlap * rates.data_hidden * np.minimum(np.maximum(dp.seconds - bare, 0.0), room)
    dp_seen = dp.seconds - (1 - rates.beside) * hidden

    exposed = m * (slow_seen + pp_each) + dp_seen
    owned = memory.owned(w, dense, experts, w.zero >= 1)
    optimizer = owned * rates.optimizer_bytes * np.maximum(w.state_bytes, 4.0) / 12.0 / rates.hbm
    optimizer = np.where(rates.offload_s > 0, owned * rates.offload_s, optimizer)
    busy = m * slow.total_s
    lost = rates.straggler * np.log2(np.maximum(w.nodes, 1.0)) * (busy + exposed + bubble)
    return Iteration(
        compute_s=m * slow.matmul_s,
        attention_s=m * slow.attention_s,
        elementwise_s=m * slow.elementwise_s,
        optimizer_s=optimizer,
        bubble_s=bubble,
        exposed_comm_s=exposed,
        straggler_s=lost,
        host_s=np.full(len(w), rates.host_s),
        traffic={
            "tensor": tp.times(slow_layers),
            "pipeline": pp,
            "data": dp,
            "context": cp.times(slow_layers),
            "expert": ep.times(slow_layers),
        },
        microbatch_clocked_s=slow.matmul_s + slow.attention_s,
        microbatch_fixed_s=slow.elementwise_s + slow_seen + pp_each,
        fill=bubble / microbatch,
        once_s=optimizer + dp_seen + lost + rates.host_s,
        clock_mhz=np.broadcast_to(clock, (len(w),)),
    )


def settled(w: Work, device: Device, chassis: Chassis, found: Iteration) -> tuple[Column, Column]:
    """Mean board power of a GPU, W, and the hottest GPU's junction, C, once temperatures have settled: leakage grows
    with temperature and temperature with leakage; two rounds settle them."""
    activity, celsius = found.activity(), np.full(len(w), 60.0)
    for _ in range(2):
        watts = np.minimum(power.power_w(device, activity, found.clock_mhz, celsius), w.power_limit_w)
        celsius = hottest_c(chassis, watts)
    return watts, celsius
