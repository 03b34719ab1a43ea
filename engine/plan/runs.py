"""A measured run as what `predict` takes. What a source leaves out is filled in, and every such assumption is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from engine.model.memory import memory
from engine.model.rates import rates
from engine.model.work import columns
from engine.profile import (
    Cluster,
    Inlet,
    Model,
    Network,
    Node,
    Optimizations,
    Parallelism,
    Plan,
    Price,
    Ssh,
    Stack,
    catalog,
)
from engine.profile.document import ProfileError
from engine.profile.hardware import Precision
from engine.profile.run import Run

TOO_MUCH = 1.35
"""Predicted memory over the device's from which a run cannot have kept its activations (the model errs by less)."""


@dataclass(frozen=True)
class Case:
    """A run, ready to predict. `assumed` are sentences."""

    model: Model
    plan: Plan
    cluster: Cluster
    stack: Stack
    assumed: tuple[str, ...]


def case_of(run: Run) -> Case:
    """The model, plan, cluster and stack of a run. ProfileError with a sentence when it names what nobody knows."""
    assumed: list[str] = []
    stack = stack_of(run)
    model = _model(run)
    p = run.parallel
    replica = p.tp * p.pp * p.cp
    if p.dp is None and run.gpus % replica:
        raise ProfileError(f"tp {p.tp} x cp {p.cp} x pp {p.pp} = {replica} does not divide its {run.gpus} GPUs.")
    dp = p.dp or run.gpus // replica
    micro = run.batch.micro or _micro(run, dp)
    if run.batch.micro is None:
        assumed.append(f"microbatch {micro}")
    whole = run.batch.whole or dp * micro * (8 if p.pp > 1 else 1)
    if run.batch.whole is None:
        assumed.append(f"global batch {whole}")
    if whole % (dp * micro):
        near = max(1, round(whole / (dp * micro))) * dp * micro
        assumed.append(f"global batch {near}: {whole} is no multiple of dp {dp} x microbatch {micro}")
        whole = near
    chunks = _interleave(run, assumed)
    words = run.words
    plan = Plan(
        name=run.id,
        parallelism=Parallelism(
            tensor=p.tp,
            pipeline=p.pp,
            data=dp,
            context=p.cp,
            expert=p.ep,
            interleave=chunks,
            sequence_parallel=p.tp > 1 if p.sequence_parallel is None else p.sequence_parallel,
            zero=stack.zero if p.zero is None else p.zero,
            zero_group=run.zero_group,
            stages=_stages(run, chunks),
        ),
        optimizations=Optimizations(
            activation=_activation(run, stack),
            overlap=True,
            microbatch=micro,
            async_tensor="async tp" in words,
            optimizer_bytes=_optimizer_bytes(run),
            power_limit_w=run.power_limit_w,
            sm_clock_mhz=run.sm_clock_mhz,
        ),
        precision=_precision(run),
        stack=stack.name,
        global_batch=whole,
    )
    cluster = _cluster(run, assumed)
    if run.recompute is None and model.experts == 1:
        plan = _made_to_fit(model, plan, cluster, stack, assumed)
    return Case(model, plan, cluster, stack, tuple(assumed))


def stack_of(run: Run) -> Stack:
    """The stack a run names, else that of its framework and year; torchtitan's modes stand in its notes."""
    if run.stack:
        return catalog.stack(run.stack)
    name = (run.framework or "").lower()
    if "torchtitan" in name:
        if "rowwise" in run.words:
            return catalog.stack("torchtitan-rowwise")
        if "eager" in run.words:
            return catalog.stack("torchtitan-eager")
        return catalog.stack("torchtitan-2024" if (run.year or 2100) < 2025 else "torchtitan-compile")
    if "offload" in name:
        return catalog.stack("deepspeed-offload")
    return catalog.stack_of(run.framework, run.year)


def _made_to_fit(model: Model, plan: Plan, cluster: Cluster, stack: Stack, assumed: list[str]) -> Plan:
    """The plan with full recompute where the source does not say and keeping every activation is far from fitting."""
    dp = plan.parallelism.data or 1
    used = memory(columns([(model, plan, cluster)], [dp]), rates(cluster.device, stack, plan.precision)).total_gib[0]
    if used <= TOO_MUCH * cluster.device.memory_gib:
        assumed.append("no recompute")
        return plan
    assumed.append(f"full recompute (without it {used:.0f} of {cluster.device.memory_gib:.0f} GiB)")
    return msgspec.structs.replace(
        plan, optimizations=msgspec.structs.replace(plan.optimizations, activation="recompute")
    )


def _model(run: Run) -> Model:
    m = run.model
    return Model(
        name=m.name,
        layers=m.layers,
        hidden=m.hidden,
        heads=m.heads,
        kv_heads=m.kv_heads or m.heads,
        ffn=m.ffn or 4 * m.hidden,
        gated_mlp=m.gated_mlp,
        vocab=m.vocab,
        tied_embeddings=m.tied_embeddings,
        seq=m.seq,
        experts=m.experts,
        topk=m.topk,
        shared_experts=m.shared_experts,
        dense_layers=m.dense_layers,
        head_dim=m.head_dim,
    )


def _precision(run: Run) -> Precision:
    known: tuple[Precision, ...] = ("bf16", "fp16", "fp8", "tf32", "fp32")
    found = next((p for p in known if p == run.precision), None)
    if found is None:
        raise ProfileError(f"precision '{run.precision}' is not one of {', '.join(known)}.")
    return found


def _micro(run: Run, dp: int) -> int:
    """Until 2024 torchtitan cut a rank's batch into as many microbatches as there are stages unless told otherwise;
    elsewhere they usually run one sequence at a time."""
    titan = "torchtitan" in (run.framework or "").lower() and (run.year or 2100) < 2025
    if run.batch.whole and run.parallel.pp > 1 and titan:
        return max(1, run.batch.whole // (dp * run.parallel.pp))
    return 1


def _interleave(run: Run, assumed: list[str]) -> int:
    p = run.parallel
    if p.vpp is not None or p.pp == 1:
        return p.vpp or 1
    layers = run.model.layers
    chunks = [v for v in range(1, 7) if layers % (p.pp * v) == 0 or (layers + 2) % (p.pp * v) == 0]
    best = max(chunks, default=1)
    assumed.append(f"{best} chunks a stage")
    return best


def _stages(run: Run, chunks: int) -> Literal["even", "ends"] | tuple[int, ...]:
    """Even where the layers divide; else with embedding and head counted as layers; else as even as whole layers go,
    the longer stages inside."""
    pp, layers = run.parallel.pp, run.model.layers
    if layers % (pp * chunks) == 0:
        return "even"
    most = -(-(layers + 2) // pp)
    if pp > 1 and most % chunks == 0 and most * (pp - 2) < layers - 1:
        return "ends"
    short, longer = divmod(layers, pp)
    first = (pp - longer) // 2
    return tuple(short + (first <= i < first + longer) for i in range(pp))


def _activation(run: Run, stack: Stack) -> Literal["stash", "selective", "alternate", "recompute"]:
    text = (run.recompute or "none").lower()
    if text == "none" or text.startswith("no"):
        return "stash"
    if text.startswith("full"):
        return "recompute"
    if text.startswith("selective"):
        return "alternate" if stack.selective == "alternate" else "selective"
    return "selective" if "attention" in text or "core" in text else "recompute"


def _optimizer_bytes(run: Run) -> float:
    if run.optimizer_bytes is not None:
        return run.optimizer_bytes
    if "offload" in (run.framework or "").lower():
        return 0.0
    return 4.0 if "pure" in run.words else 12.0


def _cluster(run: Run, assumed: list[str]) -> Cluster:
    device = catalog.device(run.hardware)
    base = next(
        (catalog.node_type(n) for n in catalog.names("node type") if catalog.node_type(n).device == device.name), None
    )
    if base is None:
        raise ProfileError(f"no node type holds a {device.name}.")
    per_node = min(run.gpus_per_node, run.gpus)
    kind = msgspec.structs.replace(base, gpus=per_node, numa=(tuple(range(per_node)),))
    gbps = run.node_gbps
    if gbps is None:
        gbps = base.nic.gb_s * 8 * min(1.0, run.gpus_per_node / base.gpus)
        if run.gpus > per_node:
            assumed.append(f"{gbps:.0f} Gbit/s a node")
    count = -(-run.gpus // per_node)
    nodes = tuple(Node(name=f"n{i}", type=kind.name) for i in range(count))
    return Cluster(
        name=run.id,
        nodes=nodes,
        types={kind.name: kind},
        devices={device.name: device},
        ssh=Ssh(),
        poll_interval_s=1.0,
        network=Network(gbps_per_node=gbps),
        inlet=Inlet(),
        price=Price(),
    )
