"""Whether a plan can be laid over a cluster at all; every refusal is a sentence that says what would fit."""

from __future__ import annotations

from engine.profile import Cluster, Model, Plan


class PlanError(Exception):
    """A plan that cannot run on this model and cluster. The text says what would fit."""


def replicas(model: Model, plan: Plan, cluster: Cluster) -> int:
    """Data-parallel size of the plan on this cluster. PlanError with a sentence that says what would fit."""
    p, gpus = plan.parallelism, cluster.gpus
    if model.heads % p.tensor:
        fit = _divisors(model.heads, 16)
        raise PlanError(f"tensor {p.tensor} does not divide the {model.heads} heads of {model.name}; {fit} do.")
    _check_stages(model, plan)
    seq = plan.sequence or model.seq
    if seq % p.context:
        raise PlanError(f"context {p.context} does not divide the sequence of {seq} tokens; {_divisors(seq, 64)} do.")
    if model.experts % p.expert:
        fit = _divisors(model.experts, 256) if model.experts > 1 else "1 alone"
        raise PlanError(f"expert {p.expert} does not divide the {model.experts} experts of {model.name}; {fit} do.")
    if gpus % plan.model_gpus:
        raise PlanError(
            f"tensor {p.tensor} x pipeline {p.pipeline} x context {p.context} = {plan.model_gpus} GPUs a replica; "
            f"{cluster.name} has {gpus}, which is not a multiple: {gpus // plan.model_gpus * plan.model_gpus} would be."
        )
    dp = p.data or gpus // plan.model_gpus
    if dp * plan.model_gpus != gpus:
        raise PlanError(
            f"{plan.label()} needs {dp * plan.model_gpus} GPUs; {cluster.name} has {gpus}: "
            f"data {gpus // plan.model_gpus} would fill it."
        )
    spread = dp * p.context * p.tensor
    if spread % p.expert:
        raise PlanError(
            f"expert {p.expert} does not divide the {spread} GPUs of a stage (tensor x context x data) over which "
            f"experts are spread; {_divisors(spread, 256)} do."
        )
    if p.zero_group and (dp * p.context) % p.zero_group:
        raise PlanError(
            f"zero_group {p.zero_group} does not divide the {dp * p.context} data-parallel ranks; "
            f"{_divisors(dp * p.context, 64)} do."
        )
    _check_limits(plan, cluster)
    step = dp * plan.optimizations.microbatch
    if plan.global_batch % step:
        lower, upper = plan.global_batch // step * step, -(-plan.global_batch // step) * step
        near = f"{lower} or {upper}" if lower else f"{upper}"
        raise PlanError(
            f"the global batch {plan.global_batch} is not a multiple of data {dp} x microbatch "
            f"{plan.optimizations.microbatch} = {step}; {near} would be."
        )
    return dp


def _check_limits(plan: Plan, cluster: Cluster) -> None:
    device, o = cluster.device, plan.optimizations
    watts, clock = device.power_limit_w, device.clock
    if o.power_limit_w is not None and not watts.min <= o.power_limit_w <= watts.max:
        raise PlanError(
            f"power_limit_w {o.power_limit_w:g} is outside what {device.name} takes: {watts.min:g} to {watts.max:g} W."
        )
    if o.sm_clock_mhz is not None and not clock.idle <= o.sm_clock_mhz <= clock.max:
        raise PlanError(
            f"sm_clock_mhz {o.sm_clock_mhz:g} is outside what {device.name} runs at: "
            f"{clock.idle:g} to {clock.max:g} MHz."
        )


def _check_stages(model: Model, plan: Plan) -> None:
    p = plan.parallelism
    chunks, layers = p.pipeline * p.interleave, model.layers
    if isinstance(p.stages, tuple):
        if len(p.stages) != p.pipeline or sum(p.stages) != layers or min(p.stages) < 1:
            raise PlanError(
                f"stages lists {len(p.stages)} stages with {sum(p.stages)} layers; pipeline {p.pipeline} of "
                f"{model.name} needs {p.pipeline} stages of at least one layer, {layers} in all."
            )
        return
    if p.stages == "ends":
        most = -(-(layers + 2) // p.pipeline)
        if p.pipeline < 2 or most * (p.pipeline - 2) >= layers - 1:
            raise PlanError(
                f"pipeline {p.pipeline} leaves no layers for the end stages of {model.name}'s {layers} layers."
            )
        if most % p.interleave:
            raise PlanError(
                f"interleave {p.interleave} does not divide the {most} layers of a stage; {_divisors(most, 64)} do."
            )
        return
    if layers % chunks:
        hint = " With 'stages: ends' the embedding and the head count as a layer each." if p.pipeline > 1 else ""
        raise PlanError(
            f"pipeline {p.pipeline} x interleave {p.interleave} does not divide the {layers} layers of "
            f"{model.name}; {_divisors(layers, 64)} do.{hint}"
        )


def _divisors(whole: int, most: int) -> str:
    return ", ".join(str(d) for d in range(1, min(whole, most) + 1) if whole % d == 0)
