"""Memory of the fullest GPU, itemised. Activations after Korthikanti et al. 2022; states after ZeRO (2020). Arrays."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

import numpy as np

from engine.model.rates import Rates
from engine.model.work import Column, Work

GIB = float(1 << 30)
FRAGMENTATION = 0.03
"""Share of the allocated bytes that the caching allocator holds without use."""
WORKSPACE_GIB = 1.0
"""Kernels' workspaces and the communication library's buffers."""


Amount = TypeVar("Amount", Column, float)


@dataclass(frozen=True)
class Memory(Generic[Amount]):
    """GiB on one GPU of the fullest stage; a column each, or a number each for one plan."""

    weights_gib: Amount
    gradients_gib: Amount
    optimizer_gib: Amount
    activations_gib: Amount
    logits_gib: Amount
    reserve_gib: Amount

    @property
    def total_gib(self) -> Amount:
        return (
            self.weights_gib
            + self.gradients_gib
            + self.optimizer_gib
            + self.activations_gib
            + self.logits_gib
            + self.reserve_gib
        )

    def row(self, index: int) -> Memory[float]:
        """One plan's memory, as plain numbers."""
        values: dict[str, Any] = {f.name: float(getattr(self, f.name)[index]) for f in fields(self)}
        return Memory(**values)


def parameters(w: Work, layers: Column, tables: Column) -> tuple[Column, Column]:
    """Weights on one GPU: all but experts, and experts. `tables` embedding tables stand on it."""
    h = w.hidden
    sparse = w.sparse
    shared = w.mlp_matrices * h * w.shared_experts * w.ffn + h * w.experts
    attention = 2.0 * h * (w.attention_width + w.kv_width)
    each = attention + 2 * h + (1 - sparse) * w.mlp_matrices * h * w.mlp_width + sparse * shared
    dense = (layers * each + tables * w.vocab * h) / w.tp
    split = np.where(w.ep > 1, w.ep, w.tp)
    return dense, layers * sparse * w.mlp_matrices * h * w.ffn * w.experts / split


def owned(w: Work, dense: Column, experts: Column, sharded: Any) -> Column:
    """Weights that one GPU owns where they are `sharded` over its group, else all of them; experts are shared by the
    ranks that hold the same ones."""
    group = np.minimum(w.zero_group, w.dp * w.cp)
    alike = np.maximum(1.0, group * w.expert_tp / w.ep)
    return dense / np.where(sharded, group, 1.0) + experts / np.where(sharded, alike, 1.0)


def layer_stash_bytes(w: Work, rates: Rates) -> Column:
    """Bytes that one layer keeps of one microbatch for its backward pass.

    Korthikanti et al. 2022, equations 1 to 4, by tensor: two norms' inputs and outputs (8 h) outside the split part;
    queries, keys, values, attention's output and the MLP's inputs and products inside it. A fused attention keeps no
    scores; where they are written out they cost 5 bytes each, unless the core is recomputed.
    """
    split = np.where(w.split_norms, w.tp, 1.0)
    copies = w.topk * w.sparse
    inside = 2.0 * (
        2 * w.attention_width + 2 * w.kv_width + (w.mlp_matrices + rates.unfused) * w.mlp_width + copies * w.hidden
    )
    kept = w.tokens * (8.0 * w.hidden / split + inside / w.tp)
    if not rates.attention:
        kept = kept + 5.0 * w.scores * (1 - w.recompute_attention)
    return kept


def memory(w: Work, rates: Rates) -> Memory[Column]:
    """The fullest stage: the first holds the most microbatches in flight, the last the head and its logits."""
    stages = _candidates(w, rates)
    fullest = np.stack([m.total_gib for m in stages]).argmax(axis=0)
    found: dict[str, Any] = {
        f.name: np.choose(fullest, [getattr(m, f.name) for m in stages]) for f in fields(stages[0])
    }
    return Memory(**found)


def fullest_gib(w: Work, rates: Rates) -> Column:
    """GiB in all on a GPU of the fullest stage: `memory(...).total_gib` without its parts."""
    return np.asarray(np.max([m.total_gib for m in _candidates(w, rates)], axis=0))


def _candidates(w: Work, rates: Rates) -> tuple[Memory[Column], ...]:
    """The stages that can be the fullest: first, second and last."""
    none = np.zeros(len(w))
    if (w.pp == 1).all():
        return (stage(w, rates, none),)
    return stage(w, rates, none), stage(w, rates, none + 1.0 * (w.pp > 2)), stage(w, rates, w.pp - 1)


def stage(w: Work, rates: Rates, index: Column) -> Memory[Column]:
    """GiB on a GPU of pipeline stage `index` (from 0).

    States are divided as ZeRO has it (Rajbhandari et al. 2020, section 5). 1F1B keeps p - i microbatches on stage i
    (Narayanan et al. 2021, section 2.2); with v chunks a stage 2 (p - i - 1) + (v - 1) p + 1 chunks are in flight,
    which on the first is p (1 + (p - 1)/(p v)) microbatches (Korthikanti et al. 2022, section 5).
    """
    first, last = index == 0, index == w.pp - 1
    layers = np.where(last, w.last_layers, np.where(first, w.first_layers, w.widest_layers))
    tables = np.where(w.pp > 1, 1.0 * first + 1.0 * last, w.tables)
    dense, experts = parameters(w, layers, tables)
    held = dense + experts

    three = w.zero >= 3
    piped = three & (w.pp > 1)  # a pipeline stage keeps its gathered weights between microbatches
    one_layer = held / np.maximum(layers, 1.0)
    live = np.where(piped, held, np.where(three, 2 * one_layer + w.vocab * w.hidden / w.tp, 0.0))
    weights = 2.0 * (owned(w, dense, experts, three) + live)
    gradients = rates.gradient_held * owned(w, dense, experts, w.zero >= 2)
    gradients = gradients + np.where(piped, rates.gradient_held * held, np.where(three, 2.0 * one_layer, 0.0))
    optimizer = w.state_bytes * owned(w, dense, experts, w.zero >= 1)

    behind = w.pp - 1 - index
    chunks = np.minimum(2 * behind + (w.vpp - 1) * w.pp + 1, w.microbatches * w.vpp)
    flight = np.where(w.vpp > 1, chunks / w.vpp, np.minimum(behind + 1, w.microbatches))
    stash = layer_stash_bytes(w, rates)
    inputs = 2.0 * w.tokens * w.hidden / np.where(w.split_norms, w.tp, 1.0)
    per_layer = (1 - w.recompute) * stash + w.recompute * inputs
    activations = flight * layers * per_layer + np.where(w.recompute > 0, stash, 0.0)
    logits = last * rates.logits_kept * w.tokens * w.vocab / w.tp
    used = weights + gradients + optimizer + activations + logits
    return Memory(
        weights / GIB,
        gradients / GIB,
        optimizer / GIB,
        activations / GIB,
        logits / GIB,
        WORKSPACE_GIB + rates.buffers_gib + FRAGMENTATION * used / GIB,
    )
