"""What is to be predicted, as columns: one row a (model, plan, cluster), one array a quantity.

The planner fills columns by the hundred thousand; `predict` fills one row. Both go through the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from engine.profile import Cluster, Model, Plan

Column = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Work:
    """Columns of length n, that of `tp`; what is the same in every row may be one value long. Counts are held as
    floats; switches are 0 or 1; lengths in tokens or elements."""

    layers: Column
    hidden: Column
    attention_width: Column  # heads x head size
    kv_width: Column  # kv heads x head size
    head_size: Column
    ffn: Column  # of one expert where there are experts
    mlp_matrices: Column
    vocab: Column
    tables: Column  # embedding tables in the whole model: 1 when tied
    experts: Column  # 0: a dense model
    topk: Column
    shared_experts: Column
    dense_layers: Column  # leading layers without experts, as wide as the experts a token meets
    imbalance: Column  # tokens of the fullest expert rank over the mean
    seq: Column
    tp: Column
    pp: Column
    vpp: Column
    dp: Column
    cp: Column
    ep: Column
    zero: Column
    zero_group: Column  # ranks that share one copy of the optimizer states
    split_norms: Column  # sequence parallel: norms and residuals split over tp
    micro: Column
    batch: Column  # sequences in an optimizer step
    first_layers: Column  # layers of the first, the widest other, and the last stage
    widest_layers: Column
    last_layers: Column
    recompute: Column  # share of the layers whose forward pass runs again
    recompute_attention: Column  # 1: the attention core alone runs again
    overlap: Column
    zero_bubble: Column
    stages_inside: Column  # 1: ranks are numbered over pipeline stages before replicas
    tp_async: Column  # matrix products cut up so that tensor traffic hides behind them
    fp8: Column
    element: Column  # bytes of an activation outside fp8 products: 2, or 4 in tf32 and fp32
    state_bytes: Column  # optimizer bytes a weight: 12 with fp32 master and two moments
    gpus_per_node: Column
    node_gb_s: Column
    numa_gpus: Column  # GPUs that reach one another without a hop between NUMA nodes
    numa_gb_s: Column
    leaf_nodes: Column  # nodes below one leaf or rail switch
    spine_share: Column  # of a node's bandwidth that is left above the leaf
    power_limit_w: Column
    clock_limit_mhz: Column

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def gpus(self) -> Column:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def microbatches(self) -> Column:
        return self.batch / (self.dp * self.micro)

    @property
    def tokens(self) -> Column:
        """Tokens of one microbatch on one GPU."""
        return self.micro * self.seq / self.cp

    @property
    def tokens_per_iteration(self) -> Column:
        return self.batch * self.seq

    @property
    def sparse(self) -> Column:
        """Share of the layers that have experts."""
        return np.where(self.experts > 0, 1.0 - self.dense_layers / self.layers, 0.0)

    @property
    def mlp_width(self) -> Column:
        """MLP width that one token meets: the dense one, or that of its experts and the shared ones together."""
        return np.where(self.experts > 0, self.topk + self.shared_experts, 1.0) * self.ffn

    @property
    def scores(self) -> Column:
        """Attention scores of one layer and microbatch on one GPU, the whole square."""
        return self.tokens * self.seq * self.attention_width / self.head_size / self.tp

    @property
    def expert_tp(self) -> Column:
        """Tensor ranks that each hold experts of their own: all of them once experts are spread over GPUs."""
        return np.where(self.ep > 1, self.tp, 1.0)

    @property
    def between_replicas(self) -> Column:
        """Pipeline stages numbered before the next replica: replicas are as many times further apart."""
        return np.where(self.stages_inside > 0, self.pp, 1.0)

    @property
    def nodes(self) -> Column:
        return np.maximum(1.0, self.gpus / self.gpus_per_node)

    def at(self, rows: npt.NDArray[np.int64]) -> Work:
        """These rows alone, every column whole."""
        n = len(self)
        return Work(**{f.name: np.broadcast_to(getattr(self, f.name), (n,))[rows] for f in fields(self)})

    @staticmethod
    def join(parts: Sequence[Work]) -> Work:
        """Rows one after another."""
        return Work(
            **{
                f.name: np.concatenate([np.broadcast_to(getattr(p, f.name), (len(p),)) for p in parts])
                for f in fields(Work)
            }
        )


def columns(cases: Sequence[tuple[Model, Plan, Cluster]], dp: Sequence[int]) -> Work:
    """One row a case; `dp` is each one's data-parallel size (from `layout.replicas`, which checks the plan)."""
    rows = [_row(model, plan, cluster, size) for (model, plan, cluster), size in zip(cases, dp, strict=True)]
    return Work(**{name: np.array([row[name] for row in rows], float) for name in rows[0]})


def stage_layers(layers: int, pipeline: int, split: str | tuple[int, ...]) -> tuple[float, float, float]:
    """Layers of the first, the widest other and the last stage. `even`, `ends` (the embedding and the head each count
    as a layer, so that the end stages hold fewer) or the stages themselves."""
    if pipeline == 1:
        return float(layers), float(layers), float(layers)
    if isinstance(split, tuple):
        return float(split[0]), float(max(split[1:-1], default=max(split))), float(split[-1])
    if split == "ends":
        most = -(-(layers + 2) // pipeline)
        left = layers - (pipeline - 2) * most
        return float(left - left // 2), float(most if pipeline > 2 else left - left // 2), float(left // 2)
    each = layers / pipeline
    return each, each, each


def _row(model: Model, plan: Plan, cluster: Cluster, dp: int) -> dict[str, float]:
    p, o, device = plan.parallelism, plan.optimizations, cluster.device
    first, widest, last = stage_layers(model.layers, p.pipeline, p.stages)
    limit = o.power_limit_w or device.power_limit_w.default
    return {
        "layers": model.layers,
        "hidden": model.hidden,
        "attention_width": model.heads * model.head_size,
        "kv_width": model.kv_heads * model.head_size,
        "head_size": model.head_size,
        "ffn": model.ffn,
        "mlp_matrices": model.mlp_matrices,
        "vocab": model.vocab,
        "tables": 1 if model.tied_embeddings else 2,
        "experts": model.experts if model.experts > 1 else 0,
        "topk": model.topk if model.experts > 1 else 1,
        "shared_experts": model.shared_experts,
        "dense_layers": model.dense_layers,
        "imbalance": o.expert_imbalance if model.experts > 1 else 1,
        "seq": plan.sequence or model.seq,
        "tp": p.tensor,
        "pp": p.pipeline,
        "vpp": p.interleave,
        "dp": dp,
        "cp": p.context,
        "ep": p.expert,
        "zero": p.zero,
        "zero_group": min(p.zero_group or dp * p.context, dp * p.context),
        "split_norms": p.sequence_parallel and p.tensor > 1,
        "micro": o.microbatch,
        "batch": plan.global_batch,
        "first_layers": first,
        "widest_layers": widest,
        "last_layers": last,
        "recompute": {"recompute": 1.0, "alternate": 0.5}.get(o.activation, 0.0),
        "recompute_attention": o.activation == "selective",
        "overlap": o.overlap,
        "zero_bubble": p.zero_bubble,
        "stages_inside": p.order == "tp-cp-pp-dp",
        "tp_async": o.async_tensor,
        "fp8": plan.precision == "fp8",
        "element": 4 if plan.precision in ("tf32", "fp32") else 2,
        "state_bytes": o.optimizer_bytes,
        "gpus_per_node": cluster.gpus_per_node,
        "node_gb_s": cluster.node_gb_s,
        "numa_gpus": cluster.gpus_per_node if device.fabric.switched else min(map(len, cluster.node_type.numa)),
        "numa_gb_s": device.pcie.gb_s,
        "leaf_nodes": (cluster.network and cluster.network.leaf_nodes) or len(cluster.nodes),
        "spine_share": cluster.network.spine_share if cluster.network else 1.0,
        "power_limit_w": min(limit, device.power_limit_w.max),
        "clock_limit_mhz": min(o.sm_clock_mhz or device.clock.max, device.clock.max),
    }
