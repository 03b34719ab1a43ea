"""A software stack: what a training framework of a given age does with a device. Few, physical, documented."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from engine.profile.document import Record
from engine.profile.hardware import Fraction, NonNegative, Positive

Share = Annotated[float, Meta(ge=0, le=1)]


class Stack(Record, frozen=True):
    """How kernels are chosen and fused, what memory they keep, and what traffic hides behind what.

    Kernels: `attention` their generation (`scores`: the s x s matrix is written out); `selective` what selective
    recompute means there; `elementwise` memory passes over the fused minimum; `logits_bytes` traffic of the loss a
    logit, forward and backward; `fp8_cast` bytes a value that goes into an fp8 product; `fp8_rate` share of the
    device's fp8 rate that the kernels reach; `optimizer_bytes` traffic a weight of the optimizer step; `offload_s`
    seconds a weight that a host's CPU steps; `scales_reduced` whether tensor ranks agree on the scale of each fp8
    tensor before they cast it; `host_s` seconds an iteration outside the GPU's work; `launch_s` host
    seconds a kernel.

    Memory: `logits_kept` bytes a logit that stay until the backward pass; `unfused` further MLP-wide tensors that
    separate activation kernels keep; `gradient_held` bytes a gradient; `buffers_gib` the framework's own buckets.

    Traffic: `*_hidden` the share of each that runs behind products; `gradient_bytes` a gradient on the wire;
    `owner_s` seconds a rank where the owners of optimizer states broadcast their weights in turn; `context_balanced`
    false: context parallel ranks hold consecutive tokens, so that the last has nearly twice the mean of causal work.

    `counts` whether its reported FLOPs hold the causal half of attention or the whole square; `zero` the sharding
    when a run does not say; `frameworks` and `years` say which runs are its own.
    """

    name: str
    frameworks: tuple[str, ...] = ()
    years: tuple[int, int] = (2000, 2100)
    attention: Literal["scores", "flash1", "flash2", "flash3"] = "flash2"
    selective: Literal["attention", "alternate"] = "attention"
    elementwise: Positive = 1.0
    logits_bytes: Positive = 16.0
    fp8_cast: NonNegative = 4.0
    fp8_rate: Fraction = 1.0
    scales_reduced: bool = False
    logits_kept: NonNegative = 10.0
    unfused: NonNegative = 0.0
    buffers_gib: NonNegative = 0.0
    context_balanced: bool = True
    tensor_hidden: Share = 0.0
    expert_hidden: Share = 0.0
    data_hidden: Share = 0.9
    pipeline_hidden: Share = 0.5
    optimizer_bytes: NonNegative = 30.0
    gradient_bytes: Annotated[int, Meta(ge=1, le=4)] = 4
    gradient_held: Annotated[int, Meta(ge=0, le=4)] = 4
    host_s: NonNegative = 0.01
    launch_s: NonNegative = 5e-6
    owner_s: NonNegative = 0.0
    offload_s: NonNegative = 0.0
    counts: Literal["half", "full"] = "half"
    zero: Annotated[int, Meta(ge=0, le=3)] = 1
