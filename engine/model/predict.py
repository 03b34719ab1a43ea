"""(model, plan, cluster, stack) to a Prediction: time whose parts add up, traffic, memory, power, heat and cost."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from engine.model import gemm, thermal
from engine.model.communication import LINKS
from engine.model.confidence import Confidence, confidence
from engine.model.iteration import PARTS, Iteration, iteration, settled, throttled_share
from engine.model.layout import PlanError, replicas
from engine.model.memory import Memory, memory, stage
from engine.model.pace import Pace
from engine.model.rates import rates
from engine.model.work import columns, stage_layers
from engine.profile import Cluster, Model, Plan, Price, Stack

__all__ = ["Breakdown", "PlanError", "Prediction", "Traffic", "predict", "replicas", "with_microbatch"]


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds of one iteration. Those up to `host_s` are on the critical path and add up to it; `tp_s` to `ep_s` are
    what each parallelism's links work, of which `exposed_comm_s` is seen."""

    compute_s: float
    attention_s: float
    elementwise_s: float
    optimizer_s: float
    bubble_s: float
    exposed_comm_s: float
    straggler_s: float
    host_s: float
    tp_s: float
    pp_s: float
    dp_s: float
    cp_s: float
    ep_s: float

    @property
    def iteration_s(self) -> float:
        return float(sum(getattr(self, name) for name in PARTS))


@dataclass(frozen=True, slots=True)
class Traffic:
    """One parallelism's traffic on one GPU in one iteration. `bytes` is what its link carries in one direction;
    `achieved_fraction` bytes over seconds as a share of the link's datasheet bandwidth. `inside_bytes` and
    `outside_bytes` are what a GPU sends over its node's fabric and out of the node, on average."""

    parallelism: str
    link: str
    bytes: float
    count: float
    achieved_fraction: float
    seconds: float
    inside_bytes: float
    outside_bytes: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan does. `microbatches` run one after another on each of `dp` replicas; `memory` is of the fullest
    pipeline stage, `stages_gib` of each; `stage_load` each stage's work over that of the slowest."""

    plan: Plan
    dp: int
    gpus: int
    microbatches: int
    breakdown: Breakdown
    pace: Pace
    iteration_s: float
    tokens_per_iteration: float
    model_flops_per_iteration: float
    hardware_flops_per_iteration: float
    mfu: float
    communication: tuple[Traffic, ...]
    memory: Memory[float]
    stages_gib: tuple[float, ...]
    stage_load: tuple[float, ...]
    capacity_gib: float
    activity: float
    busy_activity: float
    sm_clock_mhz: float
    throttled_share: float
    power_w: float
    cluster_w: float
    temperature_c: float
    price: Price
    confidence: Confidence

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_iteration / self.iteration_s

    @property
    def energy_j(self) -> float:
        """Joules of one iteration: GPUs and their hosts."""
        return self.cluster_w * self.iteration_s

    @property
    def tokens_per_joule(self) -> float:
        return self.tokens_per_s / self.cluster_w

    @property
    def samples_per_kwh(self) -> float:
        """Sequences for each kWh that the GPUs and their hosts draw."""
        return self.plan.global_batch / (self.energy_j / 3.6e6)

    @property
    def cost_per_million_tokens(self) -> float:
        """Energy and GPU time, in the unit of the cluster's prices."""
        hours = self.iteration_s / 3600.0
        cost = self.cluster_w / 1000.0 * hours * self.price.per_kwh + self.gpus * hours * self.price.per_gpu_hour
        return cost / self.tokens_per_iteration * 1e6

    @property
    def headroom_gib(self) -> float:
        return self.capacity_gib - self.memory.total_gib

    @property
    def fits(self) -> bool:
        return self.headroom_gib >= 0


def predict(model: Model, plan: Plan, cluster: Cluster, stack: Stack) -> Prediction:
    """Predict one iteration. PlanError when the plan cannot be laid over the cluster, ProfileError when the device has
    no such precision. A power or clock limit stands in the plan's optimizations."""
    dp = replicas(model, plan, cluster)
    w = columns([(model, plan, cluster)], [dp])
    device = cluster.device
    constants = rates(device, stack, plan.precision)
    found = iteration(w, device, constants)
    breakdown = _breakdown(found)
    activity, busy = float(found.activity()[0]), float(found.activity(waiting=False)[0])
    clock = float(found.clock_mhz[0])
    settled_w, settled_c = settled(w, device, thermal.chassis_of(cluster), found)
    watts, celsius = float(settled_w[0]), float(settled_c[0])
    flops = float(w.tokens_per_iteration[0] * gemm.model_flops_per_token(w)[0])
    seconds = breakdown.iteration_s
    traffic = _traffic(found)
    hosts_w = sum(cluster.type_of(n).host_w for n in cluster.nodes)
    return Prediction(
        plan=plan,
        dp=dp,
        gpus=cluster.gpus,
        microbatches=plan.global_batch // (dp * plan.optimizations.microbatch),
        breakdown=breakdown,
        pace=Pace(
            clocked_s=float(found.microbatch_clocked_s[0]),
            fixed_s=float(found.microbatch_fixed_s[0]),
            fill=float(found.fill[0]),
            once_s=float(found.once_s[0]),
        ),
        iteration_s=seconds,
        tokens_per_iteration=float(w.tokens_per_iteration[0]),
        model_flops_per_iteration=flops,
        hardware_flops_per_iteration=flops + float(gemm.repeated_flops(w)[0]),
        mfu=flops / (seconds * cluster.gpus * device.peak_flops("bf16")),
        communication=traffic,
        memory=memory(w, constants).row(0),
        stages_gib=tuple(
            float(stage(w, constants, np.array([float(i)])).total_gib[0]) for i in range(plan.parallelism.pipeline)
        ),
        stage_load=_stage_load(model, plan, found),
        capacity_gib=min(cluster.device_of(n).memory_gib for n in cluster.nodes),
        activity=activity,
        busy_activity=busy,
        sm_clock_mhz=clock,
        throttled_share=float(throttled_share(w, device, found, settled_c)[0]),
        power_w=watts,
        cluster_w=watts * cluster.gpus + hosts_w,
        temperature_c=celsius,
        price=cluster.price,
        confidence=confidence(device, plan.precision, w, 0, tuple(t.link for t in traffic)),
    )


def with_microbatch(plan: Plan, microbatch: int) -> Plan:
    """The same plan with another microbatch; the global batch stays."""
    return msgspec.structs.replace(
        plan, optimizations=msgspec.structs.replace(plan.optimizations, microbatch=microbatch)
    )


def _breakdown(found: Iteration) -> Breakdown:
    links = {name: float(t.seconds[0]) for name, t in found.traffic.items()}
    return Breakdown(
        **found.row(0),
        tp_s=links["tensor"],
        pp_s=links["pipeline"],
        dp_s=links["data"],
        cp_s=links["context"],
        ep_s=links["expert"],
    )


def _stage_load(model: Model, plan: Plan, found: Iteration) -> tuple[float, ...]:
    p = plan.parallelism
    if isinstance(p.stages, tuple):
        layers = np.asarray(p.stages, float)
    else:
        first, widest, last = stage_layers(model.layers, p.pipeline, p.stages)
        layers = np.array([first, *([widest] * (p.pipeline - 2)), last][: p.pipeline])
    seconds = layers * found.layer_s[0]
    seconds[-1] += found.head_s[0]
    return tuple(float(s) for s in seconds / seconds.max())


def _traffic(found: Iteration) -> tuple[Traffic, ...]:
    return tuple(
        Traffic(
            name,
            LINKS[int(t.link[0])],
            float(t.bytes[0]),
            float(t.count[0]),
            float(t.achieved_fraction[0]),
            float(t.seconds[0]),
            float(t.inside[0]),
            float(t.outside[0]),
        )
        for name, t in found.traffic.items()
        if t.count[0]
    )
