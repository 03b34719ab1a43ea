"""Memory of the fullest GPU, GiB, itemised. Activations after Korthikanti et al. 2022; states after ZeRO (2020)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.profile import Model, Plan

GIB = float(1 << 30)
FRAGMENTATION = 0.05
"""Share of the allocated bytes that the caching allocator holds without use."""
CONTEXT_GIB = 2.0
"""CUDA context, NCCL buffers and workspaces."""


@dataclass(frozen=True, slots=True)
class Memory:
    """GiB on one GPU."""

    weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float
    logits_gib: float
    reserve_gib: float

    @property
    def total_gib(self) -> float:
        return (
            self.weights_gib
            + self.gradients_gib
            + self.optimizer_gib
            + self.activations_gib
            + self.logits_gib
            + self.reserve_gib
        )


def stage_parameters(model: Model, plan: Plan) -> float:
    """Weights on one GPU of the fullest stage: its layers over tp (experts over ep too) and one embedding table."""
    p = plan.parallelism
    layers = -(-model.layers // p.pipeline)
    experts = model.mlp_matrices * model.hidden * model.ffn * model.experts if model.experts > 1 else 0
    dense = model.layer_parameters - experts
    tables = 1 if p.pipeline > 1 or model.tied_embeddings else 2
    return (layers * (dense + experts / p.expert) + tables * model.embedding_parameters) / p.tensor


def layer_activation_bytes(model: Model, plan: Plan, tokens: float, seq: float) -> float:
    """Bytes kept for the backward pass of one layer and microbatch.

    Korthikanti et al., eq. 2 and 4: 10 sbh outside and 24 sbh/t inside the split part, the inside scaled to grouped
    queries and gated MLP; a fused attention keeps no s x s scores. Full recompute keeps the layer's input alone.
    """
    p, h = plan.parallelism, model.hidden
    split = p.tensor if p.sequence_parallel else 1
    if plan.optimizations.activation == "recompute":
        return 2.0 * tokens * h / split
    kv = model.kv_heads * model.head_size
    experts = model.topk if model.experts > 1 else 1
    attention = 2.0 * (2 * h + 2 * kv) / h
    mlp = 2.0 * (3 if model.gated_mlp else 2) * model.ffn / h * experts
    return tokens * h * (10.0 / split + (attention + mlp) / p.tensor)


def of_plan(model: Model, plan: Plan, dp: int, seq: int) -> Memory:
    """Memory of the first stage, which holds the most microbatches in flight (1F1B: as many as there are stages)."""
    p = plan.parallelism
    parameters = stage_parameters(model, plan)
    shard = dp * p.context
    weights = 2.0 * parameters / (shard if p.zero == 3 else 1)
    gradients = (2.0 if p.zero == 3 else 4.0) * parameters / (shard if p.zero >= 2 else 1)
    optimizer = 12.0 * parameters / (shard if p.zero >= 1 else 1)
    tokens = plan.optimizations.microbatch * seq / p.context
    microbatches = max(1, plan.global_batch // (dp * plan.optimizations.microbatch))
    in_flight = float(min(p.pipeline, microbatches))
    if p.interleave > 1:
        in_flight = in_flight * (1 + (p.pipeline - 1) / (p.pipeline * p.interleave))
    layers = -(-model.layers // p.pipeline)
    activations = in_flight * layers * layer_activation_bytes(model, plan, tokens, seq)
    if plan.optimizations.activation == "recompute":
        stash = Plan(name="one layer", parallelism=p, precision=plan.precision)
        activations += layer_activation_bytes(model, stash, tokens, seq)
    if p.zero == 3:
        weights += 2 * 2.0 * (model.layer_parameters / p.tensor)  # the gathered layer and the next one
    logits = 6.0 * tokens * model.vocab / p.tensor if p.pipeline == 1 else 0.0
    used = weights + gradients + optimizer + activations + logits
    return Memory(
        weights / GIB,
        gradients / GIB,
        optimizer / GIB,
        activations / GIB,
        logits / GIB,
        CONTEXT_GIB + FRAGMENTATION * used / GIB,
    )
