"""How fast a device is under a software stack: the constants that the kernels' formulas use, in SI units."""

from __future__ import annotations

from dataclasses import dataclass

from engine.profile import Device, Stack


@dataclass(frozen=True)
class Rates:
    """Rates of one device under one stack at the highest clock. Bandwidths are what is reached, bytes/s."""

    peak: float  # dense peak of the plan's 16- or 32-bit precision, FLOP/s
    peak_fp8: float
    element: float  # bytes of a value outside fp8 products
    best: float
    best_fp8: float
    half_outputs: float
    half_inner: float
    attention: float  # share of the peak that the stack's attention kernel reaches; 0 where scores are written out
    half_head: float
    hbm: float
    kernel_s: float
    launch_s: float
    elementwise: float
    logits_bytes: float
    logits_kept: float
    unfused: float
    buffers_gib: float
    context_balanced: bool
    fp8_cast: float
    scales_reduced: bool
    fabric: float
    fabric_hop_s: float
    network_share: float
    scatter_share: float
    grouped: float
    network_hop_s: float
    beside: float
    straggler: float
    tensor_hidden: float
    expert_hidden: float
    data_hidden: float
    pipeline_hidden: float
    optimizer_bytes: float
    gradient_bytes: float
    gradient_held: float
    host_s: float
    owner_s: float
    offload_s: float


def rates(device: Device, stack: Stack, precision: str) -> Rates:
    """Combine what the device can do with how the stack uses it. ProfileError for a precision it does not have."""
    curve = device.curve
    sixteen = "bf16" if precision == "fp8" else precision
    return Rates(
        peak=device.peak_flops(sixteen),
        element=4.0 if precision in ("tf32", "fp32") else 2.0,
        peak_fp8=device.peak_flops("fp8") if precision == "fp8" else device.peak_flops(sixteen),
        best=curve.best,
        best_fp8=curve.best_fp8 * stack.fp8_rate,
        half_outputs=curve.half_outputs,
        half_inner=curve.half_inner,
        attention=0.0 if stack.attention == "scores" else getattr(curve, stack.attention),
        half_head=curve.half_head,
        hbm=device.memory_gb_s * 1e9 * curve.hbm_share,
        kernel_s=curve.kernel_s,
        launch_s=stack.launch_s,
        elementwise=stack.elementwise,
        logits_bytes=stack.logits_bytes,
        logits_kept=stack.logits_kept,
        unfused=stack.unfused,
        buffers_gib=stack.buffers_gib,
        context_balanced=stack.context_balanced,
        fp8_cast=stack.fp8_cast,
        scales_reduced=stack.scales_reduced,
        fabric=device.fabric.gb_s * 1e9 * curve.fabric_share,
        fabric_hop_s=curve.fabric_hop_s,
        network_share=curve.network_share,
        scatter_share=curve.scatter_share,
        grouped=curve.grouped,
        network_hop_s=curve.network_hop_s,
        beside=curve.beside,
        straggler=curve.straggler,
        tensor_hidden=stack.tensor_hidden,
        expert_hidden=stack.expert_hidden,
        data_hidden=stack.data_hidden,
        pipeline_hidden=stack.pipeline_hidden,
        optimizer_bytes=stack.optimizer_bytes,
        gradient_bytes=stack.gradient_bytes,
        gradient_held=stack.gradient_held,
        host_s=stack.host_s,
        owner_s=stack.owner_s,
        offload_s=stack.offload_s,
    )
