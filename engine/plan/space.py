"""Every plan that a model, a cluster and a batch allow, as columns, a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from engine.model.work import Work, columns, stage_layers
from engine.profile import Cluster, Model, Optimizations, Parallelism, Plan
from engine.profile.hardware import Precision

CHUNK = 16_384
"""Plans evaluated at once: enough to keep numpy busy, few enough to stay in the cache."""
ACTIVATIONS = ("stash", "selective", "recompute")


@dataclass(frozen=True)
class Options:
    """What a search may vary beyond the shape. Empty power limits mean the device's default, empty precisions the
    plan's own."""

    zero: tuple[int, ...] = (0, 1, 2, 3)
    activations: tuple[str, ...] = ACTIVATIONS
    overlap: tuple[bool, ...] = (True, False)
    sequence_parallel: tuple[bool, ...] = (True, False)
    stages_inside: tuple[bool, ...] = (False, True)
    interleave: int = 12
    microbatch: int = 64
    context: int = 32
    power_limits_w: tuple[float, ...] = ()
    precisions: tuple[Precision, ...] = ()


@dataclass(frozen=True)
class Shape:
    """How replicas are cut: everything that fixes which GPUs talk to which."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int
    stages: str


def shapes(model: Model, cluster: Cluster, plan: Plan, options: Options) -> list[Shape]:
    """Every shape that divides heads, layers, sequence, experts and GPUs. Tensor groups stay inside a node."""
    gpus, seq = cluster.gpus, plan.sequence or model.seq
    out = []
    for tp in _divisors(model.heads, cluster.gpus_per_node):
        for pp in range(1, model.layers + 1):
            stages = _split(model.layers, pp)
            if stages is None or gpus % (tp * pp):
                continue
            for cp in (c for c in _divisors(seq, options.context) if c & (c - 1) == 0):
                if gpus % (tp * pp * cp):
                    continue
                dp = gpus // (tp * pp * cp)
                if plan.global_batch % dp:
                    continue
                for ep in _divisors(model.experts, model.experts):
                    if (dp * cp * tp) % ep == 0:
                        out.append(Shape(tp, pp, cp, ep, dp, stages))
    return out


def chunks(model: Model, cluster: Cluster, plan: Plan, options: Options) -> Iterator[tuple[Work, float]]:
    """Columns of at most about CHUNK plans each, with the share of the space that they complete; batch, sequence,
    precision and stack are `plan`'s."""
    whole = Plan(name=plan.name, parallelism=Parallelism(), precision=plan.precision, global_batch=plan.global_batch)
    clock = Optimizations(sm_clock_mhz=plan.optimizations.sm_clock_mhz)
    whole = msgspec.structs.replace(whole, sequence=plan.sequence, optimizations=clock)
    base = columns([(model, whole, cluster)], [1])
    limits = options.power_limits_w or (cluster.device.power_limit_w.default,)
    every = shapes(model, cluster, plan, options)
    parts: list[dict[str, npt.NDArray[np.float64]]] = []
    count = 0
    for done, shape in enumerate(every, 1):
        part = _of_shape(model, cluster, plan, options, shape, limits)
        parts.append(part)
        count += len(part["tp"])
        if count >= CHUNK or done == len(every):
            yield _work(base, parts), done / len(every)
            parts, count = [], 0


def plan_of(w: Work, row: int, like: Plan) -> Plan:
    """The plan of a row; name, precision, batch, sequence, clock limit and stack are `like`'s."""

    def whole(name: str) -> int:
        return int(np.broadcast_to(getattr(w, name), (len(w),))[row])

    layers, pp = whole("layers"), whole("pp")
    full, core = whole("recompute"), whole("recompute_attention")
    return msgspec.structs.replace(
        like,
        parallelism=Parallelism(
            tensor=whole("tp"),
            pipeline=pp,
            data=whole("dp"),
            context=whole("cp"),
            expert=whole("ep"),
            interleave=whole("vpp"),
            sequence_parallel=bool(whole("split_norms")),
            zero=whole("zero"),
            stages="even" if layers % pp == 0 else "ends",
            order="tp-cp-pp-dp" if whole("stages_inside") else "tp-cp-dp-pp",
        ),
        optimizations=Optimizations(
            activation="recompute" if full else "selective" if core else "stash",
            overlap=bool(whole("overlap")),
            microbatch=whole("micro"),
            power_limit_w=float(np.broadcast_to(w.power_limit_w, (len(w),))[row]),
            sm_clock_mhz=like.optimizations.sm_clock_mhz,
        ),
    )


def _of_shape(
    model: Model, cluster: Cluster, plan: Plan, options: Options, shape: Shape, limits: tuple[float, ...]
) -> dict[str, npt.NDArray[np.float64]]:
    pp, dp = shape.pipeline, shape.data
    per_replica = plan.global_batch // dp
    first, widest, last = stage_layers(model.layers, pp, shape.stages)
    chunked = _divisors(int(widest), options.interleave) if pp > 1 else [1]
    zero = [z for z in options.zero if pp == 1 or z in (0, 1, 3)]  # gradients of a pipeline stay whole until its flush
    micro = [m for m in _divisors(per_replica, options.microbatch) if m & (m - 1) == 0]
    split = options.sequence_parallel if shape.tensor > 1 else (False,)
    activations = [ACTIVATIONS.index(a) for a in options.activations]
    inside = options.stages_inside if _order_matters(cluster, shape) else options.stages_inside[:1]
    axes = np.meshgrid(chunked, zero, micro, activations, options.overlap, split, inside, limits, indexing="ij")
    vpp, z, mb, act, overlap, norms, order, limit = (axis.ravel().astype(float) for axis in axes)
    # Interleaved schedules take microbatches in groups of as many as there are stages (Megatron-LM).
    keep = (vpp == 1) | ((per_replica / mb) % pp == 0)
    keep &= (order == 0) | (z < 2)  # Megatron-LM's sharded weights do not take the other rank order
    n = int(keep.sum())
    same = {
        "tp": shape.tensor,
        "pp": pp,
        "cp": shape.context,
        "ep": shape.expert,
        "dp": dp,
        "zero_group": dp * shape.context,
        "first_layers": first,
        "widest_layers": widest,
        "last_layers": last,
    }
    return {name: np.full(n, float(value)) for name, value in same.items()} | {
        "vpp": vpp[keep],
        "zero": z[keep],
        "micro": mb[keep],
        "recompute": 1.0 * (act[keep] == 2),
        "recompute_attention": 1.0 * (act[keep] == 1),
        "overlap": overlap[keep],
        "split_norms": norms[keep],
        "stages_inside": order[keep],
        "power_limit_w": limit[keep],
    }


def _work(base: Work, parts: list[dict[str, npt.NDArray[np.float64]]]) -> Work:
    return replace(base, **{name: np.concatenate([p[name] for p in parts]) for name in parts[0]})


def _split(layers: int, pipeline: int) -> str | None:
    if layers % pipeline == 0:
        return "even"
    if (layers + 2) % pipeline == 0 and (layers + 2) // pipeline >= 2:
        return "ends"
    return None


def _order_matters(cluster: Cluster, shape: Shape) -> bool:
    """Whether numbering stages before replicas changes any link: there are both, and more than one kind of link
    outside a stage's own ranks of one replica."""
    leaves = cluster.network is not None and (cluster.network.leaf_nodes or len(cluster.nodes)) < len(cluster.nodes)
    in_node = shape.tensor * shape.context < cluster.gpus_per_node < cluster.gpus
    return shape.pipeline > 1 and shape.data > 1 and (in_node or leaves)


def _divisors(whole: int, most: int) -> list[int]:
    return [d for d in range(1, min(whole, most) + 1) if whole % d == 0]
