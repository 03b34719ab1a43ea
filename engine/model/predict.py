"""(model, plan, cluster) to a Prediction: iteration time whose parts add up, traffic, memory, power and heat."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np

from engine.model import communication, memory, power, thermal
from engine.model.communication import Group, Traffic
from engine.model.gemm import HBM_SHARE, head_forward, layer_forward, model_flops_per_token
from engine.model.pace import Pace
from engine.profile import Cluster, Model, Plan

OVERLAP = 0.9
"""Share of the backward pass behind which gradient traffic can hide when a plan overlaps."""
OPTIMIZER_BYTES = 30.0
"""Bytes an Adam step moves for each weight it owns: master, two moments read and written, gradient, new weight."""


class PlanError(Exception):
    """A plan that cannot run on this model and cluster. The text says what would fit."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of one iteration on the critical path. Everything but `tp_s` … `ep_s` (of which only exposed parts
    count, in `exposed_comm_s`) adds up to the iteration."""

    compute_s: float
    attention_s: float
    elementwise_s: float
    optimizer_s: float
    bubble_s: float
    exposed_comm_s: float
    tp_s: float
    pp_s: float
    dp_s: float
    cp_s: float
    ep_s: float

    @property
    def iteration_s(self) -> float:
        return (
            self.compute_s
            + self.attention_s
            + self.elementwise_s
            + self.optimizer_s
            + self.bubble_s
            + self.exposed_comm_s
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan does. `microbatches` run one after another on each of `dp` replicas."""

    plan: Plan
    dp: int
    gpus: int
    microbatches: int
    breakdown: Breakdown
    pace: Pace
    iteration_s: float
    tokens_per_iteration: float
    model_flops_per_iteration: float
    mfu: float
    communication: tuple[Traffic, ...]
    memory: memory.Memory
    capacity_gib: float
    activity: float
    busy_activity: float
    sm_clock_mhz: float
    power_w: float
    cluster_w: float
    temperature_c: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_iteration / self.iteration_s

    @property
    def tokens_per_joule(self) -> float:
        """Tokens for each joule that the GPUs and their hosts draw."""
        return self.tokens_per_s / self.cluster_w

    @property
    def headroom_gib(self) -> float:
        return self.capacity_gib - self.memory.total_gib

    @property
    def fits(self) -> bool:
        return self.headroom_gib >= 0


def replicas(model: Model, plan: Plan, cluster: Cluster) -> int:
    """Data-parallel size; PlanError with a sentence that says what would fit."""
    p, gpus = plan.parallelism, cluster.gpus
    if model.heads % p.tensor:
        fit = [d for d in range(1, model.heads + 1) if model.heads % d == 0 and d <= 16]
        raise PlanError(f"tensor {p.tensor} does not divide the {model.heads} heads of {model.name}; {fit} do.")
    if model.layers % (p.pipeline * p.interleave):
        fit = [d for d in range(1, model.layers + 1) if model.layers % d == 0 and d <= 64]
        raise PlanError(
            f"pipeline {p.pipeline} x interleave {p.interleave} does not divide the {model.layers} layers of "
            f"{model.name}; {fit} do."
        )
    if model.experts % p.expert:
        raise PlanError(f"expert {p.expert} does not divide the {model.experts} experts of {model.name}.")
    if gpus % plan.model_gpus:
        raise PlanError(
            f"tensor {p.tensor} x pipeline {p.pipeline} x context {p.context} = {plan.model_gpus} GPUs a replica; "
            f"{cluster.name} has {gpus}, which is not a multiple."
        )
    dp = p.data or gpus // plan.model_gpus
    if dp * plan.model_gpus != gpus:
        raise PlanError(
            f"{plan.label()} needs {dp * plan.model_gpus} GPUs; {cluster.name} has {gpus}: "
            f"data {gpus // plan.model_gpus} would fill it."
        )
    step = dp * plan.optimizations.microbatch
    if plan.global_batch % step:
        lower, upper = plan.global_batch // step * step, -(-plan.global_batch // step) * step
        near = f"{lower} or {upper}" if lower else f"{upper}"
        raise PlanError(
            f"the global batch {plan.global_batch} is not a multiple of data {dp} x microbatch "
            f"{plan.optimizations.microbatch} = {step}; {near} would be."
        )
    return dp


def predict(model: Model, plan: Plan, cluster: Cluster, power_limit_w: float | None = None) -> Prediction:
    """Predict one iteration. PlanError when the plan cannot be laid over the cluster.

    1F1B pipeline in closed form (Narayanan et al., SC'21): bubble = (p - 1)/v stage times. Ranks are numbered tensor,
    context, data, pipeline, innermost first.
    """
    dp = replicas(model, plan, cluster)
    device = cluster.device
    seq = plan.sequence or model.seq
    limit = power_limit_w or device.power_limit_w.default
    at_full_clock = _iteration(model, plan, cluster, dp, seq, 1.0)
    # Power limits clock, clock sets time, time sets activity: two rounds settle it to well under a percent.
    found, clock, watts, celsius = at_full_clock, device.clock.max, limit, 60.0
    for _ in range(2):
        activity = _activity(found[0])
        clock = float(power.clock_under_limit(device, _busy_activity(found[0]), limit, celsius))
        watts = float(power.power_w(device, activity, clock, celsius))
        celsius = _hottest(cluster, watts)
        found = _iteration(model, plan, cluster, dp, seq, clock / device.clock.max)
    breakdown, traffic, pace = found
    tokens = float(plan.global_batch * seq)
    flops = tokens * model_flops_per_token(model, seq)
    seconds = breakdown.iteration_s
    hosts_w = sum(cluster.type_of(n).host_w for n in cluster.nodes)
    return Prediction(
        plan=plan,
        dp=dp,
        gpus=cluster.gpus,
        microbatches=plan.global_batch // (dp * plan.optimizations.microbatch),
        breakdown=breakdown,
        pace=pace,
        iteration_s=seconds,
        tokens_per_iteration=tokens,
        model_flops_per_iteration=flops,
        mfu=flops / (seconds * cluster.gpus * device.peak_flops("bf16")),
        communication=traffic,
        memory=memory.of_plan(model, plan, dp, seq),
        capacity_gib=min(cluster.device_of(n).memory_gib for n in cluster.nodes),
        activity=_activity(breakdown),
        busy_activity=_busy_activity(breakdown),
        sm_clock_mhz=clock,
        power_w=watts,
        cluster_w=watts * cluster.gpus + hosts_w,
        temperature_c=celsius,
    )


def with_microbatch(plan: Plan, microbatch: int) -> Plan:
    """The same plan with another microbatch; the global batch stays."""

    return msgspec.structs.replace(
        plan, optimizations=msgspec.structs.replace(plan.optimizations, microbatch=microbatch)
    )


def _iteration(
    model: Model, plan: Plan, cluster: Cluster, dp: int, seq: int, clock_share: float
) -> tuple[Breakdown, tuple[Traffic, ...], Pace]:
    """Seconds of one iteration with the SM clock at `clock_share` of the highest."""
    p, o, device = plan.parallelism, plan.optimizations, cluster.device
    microbatches = plan.global_batch // (dp * o.microbatch)
    layers = model.layers / p.pipeline
    tokens = o.microbatch * seq / p.context
    one = layer_forward(model, device, plan.precision, tokens, seq, p.tensor, p.context, p.sequence_parallel)
    head = head_forward(model, device, plan.precision, tokens, p.tensor)
    passes = 4.0 if o.activation == "recompute" else 3.0  # backward is two forwards; recompute one more
    attention_passes = 3.5 + (1.0 if o.activation in ("recompute", "selective") else 0.0)  # flash backward: 2.5
    # The head stands in the last stage, which all others wait for.
    matmul = (passes * layers * one.matmul_s + 3.0 * head.matmul_s) / clock_share
    attention = attention_passes * layers * one.attention_s / clock_share
    elementwise = passes * layers * one.elementwise_s + 3.0 * head.elementwise_s
    busy = float(matmul + attention + elementwise)

    tp, cp, pp, data, ep = _traffic(model, plan, cluster, dp, seq, microbatches)
    backward = (passes - 1.0) / passes * busy * (microbatches if p.zero == 3 else 1)
    hidden_dp = min(data.seconds, OVERLAP * backward) if o.overlap else 0.0
    hidden_cp = min(cp.seconds, OVERLAP * float(attention) * microbatches) if o.overlap else 0.0
    hidden_pp = 0.5 * pp.seconds if o.overlap else 0.0  # sends behind the next microbatch; receives are waited for
    each = (tp.seconds + ep.seconds + cp.seconds - hidden_cp + pp.seconds - hidden_pp) / microbatches
    fill = (p.pipeline - 1) / p.interleave
    shard = dp * p.context if p.zero >= 1 else 1
    owned = memory.stage_parameters(model, plan) / shard
    breakdown = Breakdown(
        compute_s=float(matmul) * microbatches,
        attention_s=float(attention) * microbatches,
        elementwise_s=float(elementwise) * microbatches,
        optimizer_s=owned * OPTIMIZER_BYTES / (device.memory_gb_s * 1e9 * HBM_SHARE),
        bubble_s=fill * (busy + each),
        exposed_comm_s=each * microbatches + data.seconds - hidden_dp,
        tp_s=tp.seconds,
        pp_s=pp.seconds,
        dp_s=data.seconds,
        cp_s=cp.seconds,
        ep_s=ep.seconds,
    )
    pace = Pace(
        clocked_s=float(matmul + attention),
        fixed_s=float(elementwise) + each,
        fill=fill,
        once_s=breakdown.optimizer_s + data.seconds - hidden_dp,
    )
    return breakdown, tuple(t for t in (tp, cp, pp, data, ep) if t.count), pace


def _traffic(
    model: Model, plan: Plan, cluster: Cluster, dp: int, seq: int, microbatches: int
) -> tuple[Traffic, Traffic, Traffic, Traffic, Traffic]:
    """Tensor, context, pipeline, data and expert traffic of one GPU in one iteration."""
    p, o = plan.parallelism, plan.optimizations
    tokens = o.microbatch * seq / p.context
    layers = model.layers / p.pipeline
    hidden = 2.0 * tokens * model.hidden  # one activation in 16 bits
    again = 1.5 if o.activation == "recompute" else 1.0

    # Two all-reduces forward and two backward in each layer (Shoeybi et al. 2019); with sequence parallelism each is
    # a reduce-scatter and an all-gather of the same volume (Korthikanti et al. 2022).
    tp = communication.collective("tensor", Group(p.tensor, 1), cluster, hidden, 2.0, 4 * again * layers * microbatches)
    # Ring attention: keys and values go round once forward and twice (with their gradients) backward.
    kv = 2.0 * 2.0 * tokens * model.kv_heads * model.head_size / p.tensor
    cp = communication.collective(
        "context", Group(p.context, p.tensor), cluster, kv * p.context, 1.0, 3 * layers * microbatches
    )
    stride = p.tensor * p.context
    boundary = hidden / (p.tensor if p.sequence_parallel else 1)
    pp = communication.point_to_point(
        "pipeline", Group(p.pipeline, stride * dp), cluster, boundary, 2 * p.interleave * microbatches
    )
    parameters = memory.stage_parameters(model, plan)
    group = Group(dp * p.context, p.tensor)
    if p.zero == 3:  # gather the weights forward and backward, scatter the gradients, 16 bits, every microbatch
        dp_traffic = communication.collective(
            "data", group, cluster, 2.0 * parameters / layers, 1.0, 3 * layers * microbatches
        )
    else:  # gradients reduced once in 32 bits; with sharded states a scatter of those and a gather of 16-bit weights
        rounds = 2.0 if p.zero == 0 else 1.5
        dp_traffic = communication.collective("data", group, cluster, 4.0 * parameters, rounds, 1)
    routed = hidden * model.topk if model.experts > 1 else 0.0
    ep = communication.collective(
        "expert", Group(p.expert, p.tensor), cluster, routed, 1.0, 4 * again * layers * microbatches if routed else 0
    )
    return tp, cp, pp, dp_traffic, ep


def _activity(b: Breakdown) -> float:
    """Mean activity over the iteration: each phase's share of the time times its activity."""
    weights = power.ACTIVITY
    total = (
        b.compute_s * weights["matmul"]
        + b.attention_s * weights["attention"]
        + (b.elementwise_s + b.optimizer_s) * weights["memory"]
        + b.exposed_comm_s * weights["communication"]
        + b.bubble_s * weights["wait"]
    )
    return total / b.iteration_s


def _busy_activity(b: Breakdown) -> float:
    """Activity while kernels run: what the power limiter sees outside of bubbles and waits."""
    return _activity(replace(b, exposed_comm_s=0.0, bubble_s=0.0))


def _hottest(cluster: Cluster, watts: float) -> float:
    chassis = thermal.chassis_of(cluster)
    return float(thermal.steady(chassis, np.full(len(chassis.inlet_c), watts)).junction_c.max())
