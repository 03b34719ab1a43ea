"""Work of one transformer layer: matrix shapes, attention, bytes of the memory-bound rest. All of one GPU's share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.profile import Device, Model

# A scalar or an array over plans: every function here accepts both.
Number = Any

BYTES = {"bf16": 2, "fp16": 2, "fp8": 1, "tf32": 4, "fp32": 4}
HBM_SHARE = 0.85
"""Share of the datasheet's memory bandwidth that streaming kernels reach (STREAM-like measurements)."""

ELEMENTWISE_KERNELS = 10
"""Memory-bound kernels in one layer's forward pass: two norms, rotary, activation, residuals, casts."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one forward pass: what scales with the clock (matmul, attention) and what does not (elementwise)."""

    matmul_s: Number
    attention_s: Number
    elementwise_s: Number

    @property
    def total_s(self) -> Number:
        return self.matmul_s + self.attention_s + self.elementwise_s


def matmul_s(device: Device, precision: str, rows: Number, inner: Number, columns: Number) -> Number:
    """Seconds of a (rows x inner) by (inner x columns) product: the slower of tensor cores and memory, plus a launch.

    Rows and the shorter weight side lose a share t/(t + half) each, a smooth stand-in for tile and wave quantisation.
    """
    curve = device.matmul
    narrow = np.minimum(inner, columns)
    share = curve.best * rows / (rows + curve.half_rows) * narrow / (narrow + curve.half_columns)
    flops_s = 2.0 * rows * inner * columns / (device.peak_flops(precision) * share)
    moved = BYTES[precision] * (rows * inner + inner * columns) + 2 * rows * columns
    return np.maximum(flops_s, moved / (device.memory_gb_s * 1e9 * HBM_SHARE)) + device.kernel_s


def layer_forward(
    model: Model, device: Device, precision: str, tokens: Number, seq: Number, tp: Number, cp: Number, split_norms: bool
) -> Times:
    """One layer, forward, for `tokens` tokens on this GPU (batch x sequence / cp).

    FLOPs as in Narayanan et al., SC'21, eq. 3, with grouped queries, gated MLP and experts; attention causal: half of
    the square. `split_norms` is sequence parallelism (Korthikanti et al., 2022): norms and residuals split over tp.
    """
    kv = model.kv_heads * model.head_size
    h, ffn = model.hidden, model.ffn
    up = (2 if model.gated_mlp else 1) * ffn
    routed = tokens * model.topk if model.experts > 1 else tokens
    matmul = (
        matmul_s(device, precision, tokens, h, (h + 2 * kv) / tp)
        + matmul_s(device, precision, tokens, h / tp, h)
        + matmul_s(device, precision, routed, h, up / tp)
        + matmul_s(device, precision, routed, ffn / tp, h)
    )
    attention_flops = 2.0 * tokens * seq * h / tp  # 4 t s h for the full square, half of it causal
    attention_peak = device.peak_flops("bf16" if precision == "fp8" else precision) * device.matmul.attention
    attention = attention_flops / attention_peak + device.kernel_s
    # Traffic follows the stored activations (Korthikanti, eq. 1: 10 sbh outside, 24 sbh/tp inside the split part).
    outside = 10.0 / (tp if split_norms else 1)
    moved = tokens * h * (outside + 24.0 / tp)
    launches = ELEMENTWISE_KERNELS * device.kernel_s
    return Times(matmul, attention, moved / (device.memory_gb_s * 1e9 * HBM_SHARE) + launches)


def head_forward(model: Model, device: Device, precision: str, tokens: Number, tp: Number) -> Times:
    """Logits and loss, forward: one product with the vocabulary and the softmax traffic (12 bytes a logit)."""
    precision = "bf16" if precision == "fp8" else precision
    product = matmul_s(device, precision, tokens, model.hidden, model.vocab / tp)
    moved = 12.0 * tokens * model.vocab / tp
    return Times(product, 0.0 * product, moved / (device.memory_gb_s * 1e9 * HBM_SHARE))


def model_flops_per_token(model: Model, seq: int) -> float:
    """Forward and backward FLOPs of one token, causal attention counted as half: 6 N_active + 6 L s h."""
    kv = model.kv_heads * model.head_size
    active = model.topk if model.experts > 1 else 1
    matrices = (
        2 * model.hidden**2 + 2 * model.hidden * kv + model.mlp_matrices * model.hidden * model.ffn * active
    ) * model.layers + model.embedding_parameters
    return 6.0 * matrices + 6.0 * model.layers * seq * model.hidden
