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
    `compute_s` to `host_s` add up to `iteration_s`; `tensor`, `context` and `expert` are the
    traffic of one layer in all microbatches, seen or hidden."""

    compute_s: Column
    attention_s: Column
    elementwise_s: Column
    optimizer_s: Column
    bubble_s: Column
    exposed_comm_s: Column
    straggler_s: Column
    host_s: Column
    tensor: Traffic
    pipeline: Traffic
    data: Traffic
    context: Traffic
    expert: Traffic
    stage_layers: Column
    layer_s: Column
    head_s: Column
    microbatch_clocked_s: Column
    microbatch_fixed_s: Column
    fill: Column
    once_s: Column
    clock_mhz: Column

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Traffic of an iteration by parallelism, on a GPU of the slowest stage."""
        return {
            "tensor": self.tensor.times(self.stage_layers),
            "pipeline": self.pipeline,
            "data": self.data,
            "context": self.context.times(self.stage_layers),
            "expert": self.expert.times(self.stage_layers),
        }

    def row(self, index: int) -> dict[str, float]:
        """One plan's seconds by name, as plain numbers."""
        return {name: float(getattr(self, name)[index]) for name in PARTS}

    @property
    def iteration_s(self) -> Column:
        total: Column = sum(getattr(self, name) for name in PARTS)
        return total

    @property
    def kernels_s(self) -> Column:
        """Seconds in which kernels of the model itself run."""
        return self.compute_s + self.attention_s + self.elementwise_s + self.optimizer_s

    def activity(self, waiting: bool = True) -> Column:
        """Mean activity: each phase's share of the time times its activity; without waits, what the limiter sees."""
        a = power.ACTIVITY
        wait = self.bubble_s + self.host_s + self.straggler_s if waiting else 0.0
        talk = self.exposed_comm_s if waiting else 0.0
        memory = self.elementwise_s + self.optimizer_s
        total = self.kernels_s + talk + wait
        busy = self.compute_s * a["matmul"] + self.attention_s * a["attention"] + memory * a["memory"]
        return (busy + talk * a["communication"] + wait * a["wait"]) / total


@dataclass(frozen=True)
class _Work:
    """What the clock does not change: kernels at the highest clock, traffic, weights on a GPU of the fullest stage."""

    forward: Times
    backward: Times
    head: Times
    tp: Traffic
    cp: Traffic
    ep: Traffic
    pp: Traffic
    dp: Traffic
    bare_s: Column
    owned: Column


def iteration(w: Work, device: Device, rates: Rates) -> Iteration:
    """Time one iteration with the clock that the power limit allows: power limits clock, clock sets time, time sets
    activity; two rounds settle it to well under a percent."""
    clock, work = w.clock_limit_mhz, _work(w, device, rates)
    found = _at_clock(w, device, rates, work, clock)
    for _ in range(2):
        allowed = power.clock_under_limit(device, found.activity(waiting=False), w.power_limit_w, 60.0)
        lower = np.minimum(allowed, w.clock_limit_mhz)
        if np.array_equal(lower, np.broadcast_to(clock, lower.shape)):
            break
        clock = lower
        found = _at_clock(w, device, rates, work, clock)
    return found


def _work(w: Work, device: Device, rates: Rates) -> _Work:
    forward, backward = gemm.layer(w, rates)
    head_f, head_b = gemm.head(w, rates)
    fabric, one = device.fabric.gb_s * 1e9, np.ones(len(w))
    dense, experts = memory.parameters(w, _longest(w), np.where(w.pp > 1, 1.0, w.tables))
    dp, bare = communication.data(w, rates, fabric, dense, experts)
    return _Work(
        forward=forward,
        backward=backward,
        head=head_f + head_b,
        tp=communication.tensor(w, rates, fabric, one),
        cp=communication.context(w, rates, fabric, one),
        ep=communication.expert(w, rates, fabric, w.sparse),
        pp=communication.pipeline(w, rates, fabric),
        dp=dp,
        bare_s=bare,
        owned=memory.owned(w, dense, experts, w.zero >= 1),
    )


def _longest(w: Work) -> Column:
    """Layers of the longest stage but the last."""
    return np.maximum(w.first_layers, np.where(w.pp > 2, w.widest_layers, 0.0))


def _seen_s(w: Work, rates: Rates, work: _Work, layer: Times) -> Column:
    """Seconds of one layer's and microbatch's traffic that its stage sees.

    A collective takes SMs and memory bandwidth from what runs beside it: `beside` of the hidden time comes back as
    slower kernels. Experts' traffic hides behind another microbatch's layers where the pipeline interleaves them.
    """
    per = 1.0 / w.microbatches
    tp, cp, ep = work.tp.seconds * per, work.cp.seconds * per, work.ep.seconds * per
    behind_products = rates.tensor_hidden + (1.0 - rates.tensor_hidden) * 0.5 * w.tp_async
    hidden = behind_products * np.minimum(tp, layer.matmul_s) + np.minimum(cp, layer.attention_s)
    hidden = hidden + rates.expert_hidden * (w.vpp > 1) * np.minimum(ep, layer.total_s)
    return tp + cp + ep - (1 - rates.beside) * w.overlap * hidden


def _at_clock(w: Work, device: Device, rates: Rates, work: _Work, clock: Column) -> Iteration:
    share = clock / device.clock.max
    forward, backward = work.forward.at_clock(share), work.backward.at_clock(share)
    again, core = w.recompute, w.recompute_attention
    layer, head = forward.times(1 + again) + backward, work.head.at_clock(share)
    layer = Times(layer.matmul_s, layer.attention_s + core * forward.attention_s, layer.elementwise_s)
    seen = _seen_s(w, rates, work, layer)
    each_layer, m = layer.total_s + seen, w.microbatches

    # Stages: the first holds the embedding, the last the head; the slowest sets the pace.
    single, longest = w.pp <= 1, _longest(w)
    at_end = single | (w.last_layers * each_layer + head.total_s >= longest * each_layer)
    slow_layers = np.where(at_end, w.last_layers, longest)
    slow = layer.times(slow_layers) + head.times(at_end.astype(float))

    pp_each = work.pp.seconds / m * (1 - w.overlap * rates.pipeline_hidden)
    microbatch = slow.total_s + slow_layers * seen + pp_each
    passage = w.layers * each_layer + head.total_s + w.pp * pp_each
    bubble = np.where(single, 0.0, pipeline.bubble_s(np.maximum(passage, microbatch), microbatch, w.vpp))
    weight_share = np.clip(0.5 * work.backward.matmul_s / (work.forward.total_s + work.backward.total_s), 0, 1)
    bubble = np.where(w.zero_bubble > 0, pipeline.zero_bubble_s(bubble, weight_share), bubble)

    # Data traffic hides behind the last microbatch's backward pass and, where weights are gathered again, behind half
    # as much of the next forward pass; sharded weights travel behind all of the work.
    last_backward = slow_layers * (backward.total_s + again * forward.total_s)
    room = np.where(w.zero >= 3, m * slow.total_s, last_backward * (1.0 + 0.5 * (w.zero >= 1)))
    hidden = w.overlap * rates.data_hidden * np.minimum(np.maximum(work.dp.seconds - work.bare_s, 0.0), room)
    dp_seen = work.dp.seconds - (1 - rates.beside) * hidden

    exposed = m * (slow_layers * seen + pp_each) + dp_seen
    optimizer = work.owned * rates.optimizer_bytes * np.maximum(w.state_bytes, 4.0) / 12.0 / rates.hbm
    optimizer = np.where(rates.offload_s > 0, work.owned * rates.offload_s, optimizer)
    lost = rates.straggler * np.log2(np.maximum(w.nodes, 1.0)) * (m * slow.total_s + exposed + bubble)
    return Iteration(
        compute_s=m * slow.matmul_s,
        attention_s=m * slow.attention_s,
        elementwise_s=m * slow.elementwise_s,
        optimizer_s=optimizer,
        bubble_s=bubble,
        exposed_comm_s=exposed,
        straggler_s=lost,
        host_s=np.full(len(w), rates.host_s),
        tensor=work.tp,
        pipeline=work.pp,
        data=work.dp,
        context=work.cp,
        expert=work.ep,
        stage_layers=slow_layers,
        layer_s=each_layer,
        head_s=head.total_s,
        microbatch_clocked_s=slow.matmul_s + slow.attention_s,
        microbatch_fixed_s=slow.elementwise_s + slow_layers * seen + pp_each,
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


def throttled_share(w: Work, device: Device, found: Iteration, celsius: Column) -> Column:
    """Share of the iteration in which the limiter holds a GPU back: its kernels' time, where the power limit leaves
    less than the asked clock or the hottest GPU settles at its operating limit."""
    held = (found.clock_mhz < w.clock_limit_mhz) | (celsius >= device.temperature_c.operating)
    return np.where(held, found.kernels_s / found.iteration_s, 0.0)
