"""Seconds of the kernels of one layer and of the head, on one GPU. Every argument may be an array over plans."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.model.rates import Rates
from engine.model.work import Column, Work

LAUNCHES = 14
"""Kernels in one layer's forward pass besides its products: norms, rotary, activation, residuals, casts, attention."""
ROUTING = 60
"""Kernels that route one layer's tokens: top-k, histograms, sorts, permutations, dispatch."""
PER_EXPERT = 8
"""Kernels of one local expert's forward pass; casts to fp8 double them."""
SCORE_BYTES = 11.0
"""Bytes a score moves each way where the s x s matrix is written out: product, mask, softmax, dropout."""
UNMASKED = 1.1
"""FLOP/s of fused attention without a mask over those with a causal one, long sequences and heads of 128: 370 / 335
TFLOP/s forward of FlashAttention-2 on an H100, 595 / 539 of cuDNN (Shah et al., FlashAttention-3, 2024, Figure 5)."""


@dataclass(frozen=True)
class Times:
    """Seconds of a pass. Products and attention scale with the SM clock, `elementwise_s` does not."""

    matmul_s: Column
    attention_s: Column
    elementwise_s: Column

    @property
    def total_s(self) -> Column:
        return self.matmul_s + self.attention_s + self.elementwise_s

    def __add__(self, other: Times) -> Times:
        return Times(
            self.matmul_s + other.matmul_s,
            self.attention_s + other.attention_s,
            self.elementwise_s + other.elementwise_s,
        )

    def times(self, factor: Column | float) -> Times:
        """This pass `factor` times over."""
        return Times(self.matmul_s * factor, self.attention_s * factor, self.elementwise_s * factor)

    def at_clock(self, share: Column) -> Times:
        """The same pass at a share of the highest clock."""
        return Times(self.matmul_s / share, self.attention_s / share, self.elementwise_s)


def matmul_s(rates: Rates, fp8: Column | float, rows: Column, inner: Column, columns: Column) -> Column:
    """Seconds of a (rows x inner) by (inner x columns) product: the slower of tensor cores and memory, and a gap.

    The rate falls with the outputs' share of a full wave of tiles and with the inner length: x/(x + half), a smooth
    stand-in for tile and wave quantisation (NVIDIA, Matrix Multiplication Background, "wave quantization"). In fp8 a
    tile takes half the time, so the same prologue costs twice the share.
    """
    outputs = rows * columns
    narrow = inner / (1.0 + np.asarray(fp8))
    share = outputs / (outputs + rates.half_outputs) * narrow / (narrow + rates.half_inner)
    peak = np.where(fp8, rates.peak_fp8 * rates.best_fp8, rates.peak * rates.best)
    width = np.where(fp8, 1.0, rates.element)
    moved = width * (rows * inner + inner * columns) + rates.element * outputs
    return np.maximum(2.0 * rows * inner * columns / (peak * share), moved / rates.hbm) + rates.kernel_s


def fullest_rank(cp: Column, balanced: bool) -> Column:
    """Attention time of the busiest of cp context ranks, over a cp-th of causal attention in one piece.

    The last rank of a plain ring has one masked block and cp - 1 whole ones; where every rank has an early and a late
    half, two masked half blocks and 2 cp - 1 whole ones. Whole blocks run UNMASKED times as fast per FLOP.
    """
    if balanced:
        return np.where(cp > 1, (1.0 + (2.0 * cp - 1.0) / UNMASKED) / (2.0 * cp), 1.0)
    return (1.0 + 2.0 * (cp - 1.0) / UNMASKED) / cp


def attention_s(w: Work, rates: Rates) -> tuple[Column, Column]:
    """Seconds of causal attention, forward and backward, of one layer and microbatch.

    A fused kernel computes half of the square and 2.5 times that backward (Dao, FlashAttention-2, 2023, section 4.1);
    where scores are written out, the whole square and its memory traffic (Korthikanti et al. 2022, section 4.1).
    """
    square = 4.0 * w.tokens * w.seq * w.attention_width / w.tp
    if rates.attention:
        chunk = w.seq / w.cp
        share = rates.attention * w.head_size / (w.head_size + rates.half_head) * chunk / (chunk + 128.0)
        forward = 0.5 * square * fullest_rank(w.cp, rates.context_balanced) / (rates.peak * share)
        forward = forward + rates.kernel_s * w.cp
        return forward, 2.5 * forward
    forward = square / (rates.peak * rates.best) + SCORE_BYTES * w.scores / rates.hbm
    return forward, 2.0 * forward


def expert_rows(w: Work) -> Column:
    """Token copies that one GPU's experts compute in a microbatch. Experts are not split over tp once they are spread
    over GPUs: each tensor rank then routes its own share of the tokens."""
    return w.tokens * w.topk * w.imbalance / w.expert_tp


def mlp_s(w: Work, rates: Rates, rows: Column, width: Column, experts: Column) -> tuple[Column, Column]:
    """Products of an MLP, forward and backward; `rows` token copies over `experts` local experts."""
    each, up = rows / experts, (w.mlp_matrices - 1) * width
    forward = matmul_s(rates, w.fp8, each, w.hidden, up) + matmul_s(rates, w.fp8, each, width, w.hidden)
    backward = (
        matmul_s(rates, w.fp8, each, up, w.hidden)
        + matmul_s(rates, w.fp8, w.hidden, each, up)
        + matmul_s(rates, w.fp8, each, w.hidden, width)
        + matmul_s(rates, w.fp8, width, each, w.hidden)
    )
    return forward * experts, backward * experts


def layer(w: Work, rates: Rates) -> tuple[Times, Times]:
    """Forward and backward of one layer (the mean layer, where some have experts and some not) on one microbatch."""
    t, h, tp = w.tokens, w.hidden, w.tp
    qkv, out = (w.attention_width + 2 * w.kv_width) / tp, w.attention_width / tp
    forward = matmul_s(rates, w.fp8, t, h, qkv) + matmul_s(rates, w.fp8, t, out, h)
    backward = (
        matmul_s(rates, w.fp8, t, qkv, h)
        + matmul_s(rates, w.fp8, h, t, qkv)
        + matmul_s(rates, w.fp8, t, h, out)
        + matmul_s(rates, w.fp8, out, t, h)
    )
    sparse, wide, one = w.sparse, w.mlp_width, np.ones(len(w))
    dense_f, dense_b = mlp_s(w, rates, t, wide / tp, one)
    split = np.where(w.ep > 1, 1.0, tp)
    local = np.maximum(w.experts / w.ep, 1.0)
    rows = expert_rows(w)
    moe_f, moe_b = mlp_s(w, rates, rows, w.ffn / split, local)
    moe_f, moe_b = moe_f / rates.grouped, moe_b / rates.grouped
    shared = w.shared_experts > 0
    shared_f, shared_b = mlp_s(w, rates, t, np.maximum(w.shared_experts, 1.0) * w.ffn / tp, one)
    router = matmul_s(rates, 0.0, t / np.where(w.split_norms, tp, 1.0), h, np.maximum(w.experts, 1.0))
    forward = forward + (1 - sparse) * dense_f + sparse * (moe_f + shared * shared_f + router)
    backward = backward + (1 - sparse) * dense_b + sparse * (moe_b + shared * shared_b + 2 * router)

    # Memory-bound rest, bytes: two norms and two residuals (20 h) outside; rotary, activation inside the split part;
    # with experts the copies are gathered and scattered (8 h a copy). Backward reads half as much again.
    copies = rows * sparse
    active = (1 - sparse) * t * wide / tp + sparse * (rows * w.ffn / split + t * w.shared_experts * w.ffn / tp)
    outside = 20.0 * t * h / np.where(w.split_norms, tp, 1.0)
    inside = 4.0 * t * qkv + 2.0 * w.mlp_matrices * active + 16.0 * copies * h
    moved = rates.elementwise * (outside + inside) * w.element / 2.0
    # Values that are cast on their way into fp8 products: the inputs of the four, and their gradients.
    entering = t * (h + out) + (1 - sparse) * t * (h + wide / tp) + sparse * (rows * (h + w.ffn / split))
    cast = w.fp8 * rates.fp8_cast * entering
    gaps = LAUNCHES * rates.kernel_s
    at_f, at_b = attention_s(w, rates)
    el_f, el_b = (moved + cast) / rates.hbm + gaps, (1.5 * moved + cast) / rates.hbm + 1.5 * gaps
    # The host must issue every kernel: where kernels are shorter than that, the GPU waits for it. Routing makes the
    # host wait in turn: it learns the experts' token counts first and issues their kernels while the GPU stands.
    routed = sparse * (ROUTING + PER_EXPERT * (1 + w.fp8) * local)
    return (
        _not_before(Times(forward, at_f, el_f), rates.launch_s * (LAUNCHES + 4), rates.launch_s * routed),
        _not_before(Times(backward, at_b, el_b), 2 * rates.launch_s * (LAUNCHES + 4), rates.launch_s * routed),
    )


def head(w: Work, rates: Rates) -> tuple[Times, Times]:
    """Logits and loss, forward and backward: 16-bit products with the vocabulary and the loss's traffic."""
    t, h, v = w.tokens, w.hidden, w.vocab / w.tp
    forward = matmul_s(rates, 0.0, t, h, v)
    backward = matmul_s(rates, 0.0, t, v, h) + matmul_s(rates, 0.0, h, t, v)
    half = 0.5 * rates.logits_bytes * t * v / rates.hbm
    none = np.zeros(len(w))
    return Times(forward, none, half), Times(backward, none, half)


def model_flops_per_token(w: Work) -> Column:
    """Forward and backward FLOPs of one token, causal attention counted as half: 6 N_active + 6 L s a."""
    matrices = 2.0 * w.hidden * (w.attention_width + w.kv_width) + w.mlp_matrices * w.hidden * w.mlp_width
    matrices = matrices + w.sparse * w.hidden * w.experts
    return 6.0 * (w.layers * matrices + w.vocab * w.hidden) + 6.0 * w.layers * w.seq * w.attention_width


def repeated_flops(w: Work) -> Column:
    """FLOPs of an iteration that recompute adds to the model's own: a forward pass, or the attention core's."""
    forward = model_flops_per_token(w) / 3.0 - 2.0 * w.vocab * w.hidden
    core = 2.0 * w.layers * w.seq * w.attention_width
    return w.tokens_per_iteration * (w.recompute * forward + w.recompute_attention * core)


def _not_before(times: Times, host_s: Column | float, stall_s: Column) -> Times:
    wait = np.maximum(0.0, host_s - times.total_s) + stall_s
    return Times(times.matmul_s, times.attention_s, times.elementwise_s + wait)
