"""What a prediction suggests, in sentences: the reason, and what the model says that following it would do."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.model.predict import PlanError, Prediction, predict
from engine.profile import Cluster, Model, Network, Plan, ProfileError, Stack

BUSY_LINK = 0.7
"""Share of the iteration from which a link is the bottleneck: the 70 % line."""
LONG_BUBBLE = 0.15
IDLE_LINK, CONTENDED_LINK = 0.02, 0.3
"""Shares of the step below which a link idles, and above which another beside it is contended."""
ROOM_GIB = 4.0
"""Memory that should stay free when activations are kept instead of computed again."""


def advice(model: Model, cluster: Cluster, stack: Stack, found: Prediction) -> list[str]:
    """Sentences, the most pressing first; empty when there is nothing to say."""

    def instead(**changes: Any) -> Prediction | None:
        """The prediction with these keys of `parallelism` or `optimizations` changed, or None where none runs."""
        return _predicted(model, _changed(found.plan, changes), cluster, stack)

    out = [] if found.fits else _make_room(found, instead(activation="recompute"))
    out += _precision(found, cluster)
    out += _recompute(found, instead(activation="stash")) if found.plan.optimizations.activation == "recompute" else []
    out += _placement(model, cluster, stack, found)
    out += _links(model, cluster, stack, found)
    out += _bubble(found, instead(microbatch=max(1, found.plan.optimizations.microbatch // 2)))
    out += _throttle(found, cluster, instead(microbatch=max(1, found.plan.optimizations.microbatch // 2)))
    return [*out, *found.confidence.beyond]


def numactl(cluster: Cluster) -> list[str]:
    """The line to start each local rank with, so that its memory and threads stay beside its GPU."""
    lines = []
    for number, gpus in enumerate(cluster.node_type.numa):
        ranks = ", ".join(str(gpu) for gpu in gpus)
        lines.append(f"local ranks {ranks}: numactl --cpunodebind={number} --membind={number}")
    return lines


def _make_room(found: Prediction, recomputed: Prediction | None) -> list[str]:
    text = f"Does not fit: {-found.headroom_gib:.0f} GiB too much of {found.capacity_gib:.0f} GiB a GPU. "
    m, p, o = found.memory, found.plan.parallelism, found.plan.optimizations
    if m.activations_gib + m.logits_gib <= m.weights_gib + m.optimizer_gib + m.gradients_gib:
        more = f"zero {p.zero + 1}, or " if p.zero < 3 else ""
        return [text + f"Weights and states take most of it: {more}more tensor or pipeline parallelism, or more GPUs."]
    if o.activation in ("recompute", "alternate"):
        return [text + "Activations take most of it: a smaller microbatch, or more context or tensor parallelism."]
    if recomputed is not None and recomputed.fits:
        return [text + f"With recompute it fits, {recomputed.headroom_gib:.0f} GiB free: {_effect(found, recomputed)}."]
    return [text + "Activations take most of it: a smaller microbatch, and recompute."]


def _precision(found: Prediction, cluster: Cluster) -> list[str]:
    if found.plan.precision == "bf16" and cluster.device.chip == "mi250":
        return ["bf16 loses precision on MI250: use fp16 with dynamic loss scaling and fp32 gradient aggregation."]
    return []


def _recompute(found: Prediction, kept: Prediction | None) -> list[str]:
    """Recompute is worth it when the model does not fit without it; a deep pipeline hides some of its price."""
    if kept is None or kept.headroom_gib < ROOM_GIB:
        return []
    room = f"without it {kept.headroom_gib:.0f} GiB stay free"
    return [f"Recompute is not needed for room: {room}, {_effect(found, kept)}."]


def _placement(model: Model, cluster: Cluster, stack: Stack, found: Prediction) -> list[str]:
    """Tensor groups over nodes or NUMA nodes, where every layer waits for the slow hop."""
    plan, per_node = found.plan, cluster.gpus_per_node
    if plan.parallelism.tensor > per_node:
        scale = plan.parallelism.tensor // per_node
        deeper = _changed(plan, {"tensor": per_node, "pipeline": plan.parallelism.pipeline * scale})
        other = _predicted(model, deeper, cluster, stack)
        effect = f": {_effect(found, other)}" if other else ""
        return [
            f"Tensor {plan.parallelism.tensor} spans nodes of {per_node} GPUs, so that every layer waits for the "
            f"network; tensor {per_node} in a pipeline {scale} times as deep keeps it on the fabric{effect}."
        ]
    if not any(t.parallelism == "tensor" and t.link == "numa" for t in found.communication):
        return []
    inside = min(len(gpus) for gpus in cluster.node_type.numa)
    other = _predicted(model, _changed(plan, {"tensor": inside, "data": None}), cluster, stack)
    effect = f": {_effect(found, other)}" if other else ""
    return [
        f"Tensor {plan.parallelism.tensor} crosses NUMA nodes of {inside} GPUs; tensor {inside} stays inside one"
        f"{effect}. Bind each rank beside its GPU: {'; '.join(numactl(cluster))}."
    ]


def _links(model: Model, cluster: Cluster, stack: Stack, found: Prediction) -> list[str]:
    """The 70 % line with its remedies, and links that idle beside contended ones."""
    out, step = [], found.iteration_s
    busy: dict[str, float] = {}
    for traffic in found.communication:
        where = "network" if traffic.link in ("network", "spine") else "fabric"
        busy[where] = busy.get(where, 0.0) + traffic.seconds / step
    for where, share in busy.items():
        if share > BUSY_LINK:
            p = found.plan.parallelism
            other = None
            if p.tensor > 1:
                lower = _changed(found.plan, {"tensor": p.tensor // 2, "pipeline": p.pipeline * 2})
                other = _predicted(model, lower, cluster, stack)
            effect = f" (tensor {p.tensor // 2} in a pipeline twice as deep: {_effect(found, other)})" if other else ""
            quick = _predicted(model, found.plan, _faster(cluster), stack) if where == "network" else None
            wider = f" (twice the bandwidth: {_effect(found, quick)})" if quick else ""
            out.append(
                f"The {where} works for {share:.0%} of the step, above the 70 % line: lower the tensor size{effect}, "
                f"enable GPUDirect RDMA, or move to a faster PCIe or network generation{wider}."
            )
    fabric, network = busy.get("fabric", 0.0), busy.get("network", 0.0)
    if network > CONTENDED_LINK and fabric < IDLE_LINK and cluster.gpus_per_node > 1:
        out.append(
            f"The fabric idles ({fabric:.0%} of the step) beside a contended network ({network:.0%}): "
            "a tensor group inside the node would move traffic onto it."
        )
    return out


def _bubble(found: Prediction, smaller: Prediction | None) -> list[str]:
    share = found.breakdown.bubble_s / found.iteration_s
    if share <= LONG_BUBBLE:
        return []
    text = f"The pipeline waits {share:.0%} of the step with {found.microbatches} microbatches: "
    micro = found.plan.optimizations.microbatch
    if micro > 1 and smaller is not None:
        return [text + f"microbatch {micro // 2} makes twice as many, {_effect(found, smaller)}."]
    return [text + "interleaved chunks, a larger global batch or a shallower pipeline shorten that."]


def _throttle(found: Prediction, cluster: Cluster, smaller: Prediction | None) -> list[str]:
    """The power limit and the operating temperature, and what half the microbatch would do to both."""
    limits, device = found.plan.optimizations, cluster.device
    out = []
    if found.sm_clock_mhz < device.clock.max and limits.sm_clock_mhz is None:
        watts = limits.power_limit_w or device.power_limit_w.default
        out.append(
            f"The power limit of {watts:g} W holds the clock at {found.sm_clock_mhz:.0f} of "
            f"{device.clock.max:.0f} MHz for {found.throttled_share:.0%} of the step; a larger microbatch draws no "
            "less."
        )
    if found.temperature_c >= device.temperature_c.operating:
        micro, text = found.plan.optimizations.microbatch, "a power limit or better cooling helps"
        if micro > 1 and smaller is not None:
            text = f"microbatch {micro // 2} settles at {smaller.temperature_c:.0f} C, {_effect(found, smaller)}"
        out.append(
            f"The hottest GPU settles at {found.temperature_c:.0f} C, above its operating limit of "
            f"{device.temperature_c.operating:.0f} C, and will slow itself: {text}."
        )
    return out


def _effect(now: Prediction, then: Prediction) -> str:
    change = then.iteration_s / now.iteration_s - 1
    fits = "" if then.fits or not now.fits else ", but it would not fit"
    return f"step {now.iteration_s:.2f} -> {then.iteration_s:.2f} s ({change:+.0%}){fits}"


def _changed(plan: Plan, changes: dict[str, Any]) -> Plan:
    shape = {k: v for k, v in changes.items() if k in plan.parallelism.__struct_fields__}
    rest = {k: v for k, v in changes.items() if k not in shape}
    return msgspec.structs.replace(
        plan,
        parallelism=msgspec.structs.replace(plan.parallelism, **shape),
        optimizations=msgspec.structs.replace(plan.optimizations, **rest),
    )


def _faster(cluster: Cluster) -> Cluster:
    gbps = cluster.node_gb_s * 8 * 2
    network = (
        msgspec.structs.replace(cluster.network, gbps_per_node=gbps) if cluster.network else Network(gbps_per_node=gbps)
    )
    return msgspec.structs.replace(cluster, network=network)


def _predicted(model: Model, plan: Plan, cluster: Cluster, stack: Stack) -> Prediction | None:
    try:
        return predict(model, plan, cluster, stack)
    except (PlanError, ProfileError):
        return None
