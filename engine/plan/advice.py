"""What a prediction suggests, in sentences with the reason and, where it can be said, the predicted effect."""

from __future__ import annotations

from engine.model.predict import Prediction
from engine.profile import Cluster

BUSY_LINK = 0.7
"""Share of the iteration from which a link is the bottleneck: the 70 % line."""
LONG_BUBBLE = 0.15


def advice(found: Prediction, cluster: Cluster) -> list[str]:
    """Sentences, the most pressing first; empty when there is nothing to say."""
    out = []
    plan, p = found.plan, found.plan.parallelism
    if not found.fits:
        out.append(_make_room(found))
    if plan.precision == "bf16" and cluster.device.vendor == "amd" and cluster.device.chip == "mi250":
        out.append("bf16 loses precision on MI250: use fp16 with dynamic loss scaling and fp32 gradient aggregation.")
    for traffic in found.communication:
        share = traffic.seconds / found.iteration_s
        if share > BUSY_LINK:
            out.append(
                f"{traffic.parallelism.capitalize()} traffic keeps the {traffic.link} busy for {share:.0%} of the "
                "step: lower the tensor size, enable GPUDirect RDMA, or move to a faster PCIe or network generation."
            )
    if p.tensor > cluster.gpus_per_node:
        out.append(
            f"Tensor {p.tensor} spans nodes of {cluster.gpus_per_node} GPUs: every layer waits for the network; "
            f"tensor {cluster.gpus_per_node} with a deeper pipeline keeps it on the fabric."
        )
    bubble = found.breakdown.bubble_s / found.iteration_s
    if bubble > LONG_BUBBLE:
        out.append(
            f"The pipeline waits {bubble:.0%} of the step: more microbatches ({found.microbatches} now), "
            "interleaved chunks or a shallower pipeline shorten that."
        )
    if plan.optimizations.activation == "recompute" and found.headroom_gib > found.memory.total_gib * 0.6:
        out.append(f"Recompute is not needed for room: {found.headroom_gib:.0f} GiB stay free with it.")
    out += found.confidence.beyond
    return out


def _make_room(found: Prediction) -> str:
    text = f"Does not fit: {-found.headroom_gib:.0f} GiB too much of {found.capacity_gib:.0f} GiB a GPU. "
    m, p = found.memory, found.plan.parallelism
    activations = m.activations_gib + m.logits_gib
    if activations > m.weights_gib + m.optimizer_gib + m.gradients_gib:
        if found.plan.optimizations.activation == "stash":
            return text + "Activations take most of it: recompute, or a smaller microbatch."
        return text + "Activations take most of it: a smaller microbatch, or more context or tensor parallelism."
    if p.zero < 3:
        return text + f"Weights and states take most of it: zero {p.zero + 1}, or more tensor or pipeline parallelism."
    return text + "Weights and states take most of it: more tensor or pipeline parallelism, or more GPUs."
