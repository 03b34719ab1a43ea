"""A plan in the words of a training framework. What a framework has no word for is said, not dropped."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import yaml

from engine.profile import Plan

Exported = tuple[str, list[str]]
"""Text in the framework's form, and a sentence for each thing that it does not carry."""


def to_yaml(plan: Plan) -> Exported:
    """The product's own plan profile, in the shape of the two templates."""
    return yaml.safe_dump(msgspec.to_builtins(plan), sort_keys=False, default_flow_style=None), []


def to_megatron(plan: Plan) -> Exported:
    """Arguments of Megatron-LM's training scripts."""
    p, o, lost = plan.parallelism, plan.optimizations, _common(plan)
    args = [
        f"--tensor-model-parallel-size {p.tensor}",
        f"--pipeline-model-parallel-size {p.pipeline}",
        f"--context-parallel-size {p.context}",
        f"--micro-batch-size {o.microbatch}",
        f"--global-batch-size {plan.global_batch}",
    ]
    args += [f"--seq-length {plan.sequence}"] if plan.sequence else []
    args += [f"--num-virtual-stages-per-pipeline-rank {p.interleave}"] if p.interleave > 1 else []
    if p.stages == "ends":
        args += ["--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]
    elif p.stages != "even" and p.interleave > 1:
        lost.append(f"Stages of {list(p.stages)} layers: write them as a --pipeline-model-parallel-layout of your own.")
    elif p.stages != "even":
        args.append(f"--pipeline-model-parallel-layout '{_layout(p.stages)}'")
    args += [f"--expert-model-parallel-size {p.expert}"] if p.expert > 1 else []
    args += ["--use-tp-pp-dp-mapping"] if p.order == "tp-cp-pp-dp" else []
    args += ["--sequence-parallel"] if p.tensor > 1 and p.sequence_parallel else []
    args += {0: [], 1: ["--use-distributed-optimizer"]}.get(
        p.zero, ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {_STRATEGY.get(p.zero, '')}"]
    )
    args += {
        "stash": [],
        "selective": ["--recompute-granularity selective"],
        "recompute": ["--recompute-granularity full", "--recompute-method uniform", "--recompute-num-layers 1"],
        "alternate": ["--recompute-granularity full", "--recompute-method block"],
    }[o.activation]
    if o.activation == "alternate":
        lost.append("Every other layer recomputed: add --recompute-num-layers with half of a stage's layers.")
    if o.overlap:
        args += ["--overlap-grad-reduce"] + (["--overlap-param-gather"] if p.zero else [])
        args += ["--tp-comm-overlap"] if p.tensor > 1 and p.sequence_parallel else []
    args += {"bf16": ["--bf16"], "fp16": ["--fp16"], "fp8": ["--bf16", "--fp8-format hybrid"]}.get(plan.precision, [])
    return " \\\n".join(args) + "\n", lost


def to_nemo(plan: Plan) -> Exported:
    """Overrides of a NeMo Megatron-Bridge recipe."""
    p, o, lost = plan.parallelism, plan.optimizations, _common(plan)
    values: dict[str, Any] = {
        "model.tensor_model_parallel_size": p.tensor,
        "model.pipeline_model_parallel_size": p.pipeline,
        "model.virtual_pipeline_model_parallel_size": p.interleave if p.interleave > 1 else None,
        "model.context_parallel_size": p.context,
        "model.expert_model_parallel_size": p.expert,
        "model.sequence_parallel": p.tensor > 1 and p.sequence_parallel,
        "train.micro_batch_size": o.microbatch,
        "train.global_batch_size": plan.global_batch,
        "ddp.use_distributed_optimizer": p.zero >= 1,
        "ddp.overlap_grad_reduce": o.overlap,
        "ddp.overlap_param_gather": o.overlap and p.zero >= 1,
    }
    if p.order == "tp-cp-pp-dp":
        values["dist.use_tp_pp_dp_mapping"] = True
    if plan.sequence:
        values |= {"model.seq_length": plan.sequence, "dataset.sequence_length": plan.sequence}
    if p.stages == "ends":
        values |= {
            "model.account_for_embedding_in_pipeline_split": True,
            "model.account_for_loss_in_pipeline_split": True,
        }
    elif p.stages != "even" and p.interleave == 1:
        values["model.pipeline_model_parallel_layout"] = f"'{_layout(p.stages)}'"
    elif p.stages != "even":
        lost.append(f"Stages of {list(p.stages)} layers: write them as a pipeline_model_parallel_layout of your own.")
    if o.activation == "selective":
        values["model.recompute_granularity"] = "selective"
    elif o.activation in ("recompute", "alternate"):
        values |= {"model.recompute_granularity": "full", "model.recompute_method": "uniform"}
        values["model.recompute_num_layers"] = 1
    if o.activation == "alternate":
        lost.append("Every other layer recomputed: written as full recompute, which keeps less and takes longer.")
    if p.zero >= 2:
        values |= {"ddp.use_megatron_fsdp": True, "ddp.data_parallel_sharding_strategy": _STRATEGY[p.zero]}
    return "\n".join(f"{key}={_hydra(value)}" for key, value in values.items()) + "\n", lost


def to_torchtitan(plan: Plan) -> Exported:
    """A torchtitan configuration, TOML."""
    p, o, lost = plan.parallelism, plan.optimizations, [*_common(plan), *_order(plan)]
    dp = p.data or 1
    replicate, shard = (1, dp) if p.zero >= 2 else (dp, 1)
    if p.zero_group and p.zero >= 2:
        replicate, shard = dp // p.zero_group, p.zero_group
    if p.zero == 1:
        lost.append("zero 1 has no word in torchtitan: written as plain replicas; zero 3 is its way to save memory.")
    if p.interleave > 2:
        lost.append(f"interleave {p.interleave}: torchtitan takes two chunks a rank; set its layers for each stage.")
    stages = p.stages if isinstance(p.stages, tuple) and p.interleave == 1 else ()
    if p.stages != "even" and not stages:
        lost.append(
            f"stages {p.stages}: torchtitan splits layers by its own weights, or by module_fqns_per_model_part."
        )
    if p.data is None:
        lost.append("data is not fixed in the plan: data_parallel_shard_degree -1 takes what the GPUs leave over.")
        if p.pipeline > 1:
            lost.append("local_batch_size is written for one replica: divide it by the replicas that there will be.")
    sections: dict[str, dict[str, Any]] = {
        "parallelism": {
            "data_parallel_replicate_degree": replicate if p.data else 1,
            "data_parallel_shard_degree": shard if p.data else -1,
            "tensor_parallel_degree": p.tensor,
            "pipeline_parallel_degree": p.pipeline,
            "pipeline_parallel_schedule": "Interleaved1F1B" if p.interleave > 1 else "1F1B",
            "pipeline_parallel_microbatch_size": o.microbatch,
            "context_parallel_degree": p.context,
            "expert_parallel_degree": p.expert,
            "enable_async_tensor_parallel": o.async_tensor,
        },
        "training": {
            "local_batch_size": plan.global_batch // dp if p.pipeline > 1 else o.microbatch,
            "global_batch_size": plan.global_batch,
        },
        "activation_checkpoint": {
            "mode": {"stash": "none", "recompute": "full"}.get(o.activation, "selective"),
            "selective_ac_option": "2" if o.activation == "alternate" else "op",
        },
        "compile": {"enable": True},
    }
    if stages:
        sections["parallelism"]["module_fqns_per_model_part"] = _module_names(stages)
    if plan.sequence:
        sections["training"]["seq_len"] = plan.sequence
    if o.activation == "selective":
        lost.append("Recompute of the attention core alone: written as torchtitan's per-operation selection.")
    lines = []
    for name, values in sections.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""]
    return "\n".join(lines), lost


def to_deepspeed(plan: Plan) -> Exported:
    """A DeepSpeed configuration, JSON. Pipeline and context parallelism are set up in code there."""
    p, o, lost = plan.parallelism, plan.optimizations, [*_common(plan), *_order(plan)]
    config: dict[str, Any] = {
        "train_batch_size": plan.global_batch,
        "train_micro_batch_size_per_gpu": o.microbatch,
        "zero_optimization": {"stage": p.zero, "overlap_comm": o.overlap},
    }
    if p.data:
        config["gradient_accumulation_steps"] = plan.global_batch // (p.data * o.microbatch)
    if plan.precision in ("bf16", "fp16"):
        config[plan.precision] = {"enabled": True}
    if p.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": p.tensor}
    for name, value in (("pipeline", p.pipeline), ("context", p.context), ("expert", p.expert)):
        if value > 1:
            lost.append(f"{name} {value}: DeepSpeed takes it from the training code, not from this file.")
    if o.activation != "stash":
        lost.append("Recompute: switched on in the model (gradient checkpointing), not in this file.")
    return json.dumps(config, indent=2) + "\n", lost


FORMATS: dict[str, Callable[[Plan], Exported]] = {
    "yaml": to_yaml,
    "megatron": to_megatron,
    "nemo": to_nemo,
    "torchtitan": to_torchtitan,
    "deepspeed": to_deepspeed,
}

_STRATEGY = {2: "optim_grads", 3: "optim_grads_params"}


def _common(plan: Plan) -> list[str]:
    """What no framework's launch words carry."""
    o, lost = plan.optimizations, []
    if o.power_limit_w is not None:
        lost.append(f"power_limit_w {o.power_limit_w:g}: set it on the nodes (nvidia-smi -pl {o.power_limit_w:g}).")
    if o.sm_clock_mhz is not None:
        lost.append(f"sm_clock_mhz {o.sm_clock_mhz:g}: lock it on the nodes (nvidia-smi -lgc {o.sm_clock_mhz:g}).")
    if plan.parallelism.zero_bubble:
        lost.append("zero_bubble: the schedule is chosen in the framework's code.")
    if plan.precision in ("tf32", "fp32"):
        lost.append(f"precision {plan.precision}: no flag is needed; make sure that none for 16 bits is given.")
    return lost


def _order(plan: Plan) -> list[str]:
    """A framework that numbers replicas before stages can only be given hosts in another order."""
    if plan.parallelism.order == "tp-cp-dp-pp":
        return []
    return ["order tp-cp-pp-dp: this framework numbers replicas before pipeline stages, as was not predicted."]


def _layout(stages: tuple[int, ...]) -> str:
    """Megatron-LM's words for layers by stage: E the embedding, t a layer, L the loss."""
    parts = [f"t*{layers}" for layers in stages]
    return f"E{'|'.join(parts)}L"


def _module_names(stages: tuple[int, ...]) -> list[list[str]]:
    """torchtitan's names of the modules of each stage."""
    firsts = [sum(stages[:i]) for i in range(len(stages))]
    parts = [[f"layers.{first + i}" for i in range(n)] for first, n in zip(firsts, stages, strict=True)]
    return [["tok_embeddings", *parts[0]], *parts[1:-1], [*parts[-1], "norm", "output"]]


def _hydra(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
