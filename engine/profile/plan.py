"""A parallelism plan in the shape of the two templates the product grew from, extended."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from engine.profile.document import Record
from engine.profile.hardware import Count, Positive, Precision


class Parallelism(Record, frozen=True):
    """Group sizes. `data` may be left out: what the cluster leaves over. `zero` as in the ZeRO paper (3 = FSDP).

    `zero_group` ranks that share one copy of the states (all of them when left out); `stages` the layers of each
    pipeline stage: `even`, `ends` (embedding and head count as a layer each) or a list; `zero_bubble` the ZB-H1
    schedule; `order` how ranks are numbered, innermost first, and so which parallelism spans nodes.
    """

    tensor: Count = 1
    pipeline: Count = 1
    data: Count | None = None
    context: Count = 1
    expert: Count = 1
    interleave: Count = 1
    sequence_parallel: bool = True
    zero: Annotated[int, Meta(ge=0, le=3)] = 1
    zero_group: Count | None = None
    stages: Literal["even", "ends"] | tuple[int, ...] = "even"
    zero_bubble: bool = False
    order: Literal["tp-cp-dp-pp", "tp-cp-pp-dp"] = "tp-cp-dp-pp"


class Optimizations(Record, frozen=True):
    """`activation`: stash everything, recompute everything, every other layer (alternate), or the attention core only
    (selective). `async_tensor` cuts products up to hide tensor traffic; `expert_imbalance` the fullest expert rank's
    tokens over the mean; `optimizer_bytes` of state a weight; `power_limit_w` and `sm_clock_mhz` limits in force."""

    activation: Literal["stash", "selective", "alternate", "recompute"] = "stash"
    overlap: bool = True
    microbatch: Count = 1
    async_tensor: bool = False
    expert_imbalance: Annotated[float, Meta(ge=1)] = 1.0
    optimizer_bytes: Annotated[float, Meta(ge=0, le=16)] = 12.0
    power_limit_w: Positive | None = None
    sm_clock_mhz: Positive | None = None


class Preference(Record, frozen=True):
    """What the plan was written for; advice only."""

    preferred: str | None = None
    cooling: Literal["air", "liquid"] | None = None


class Plan(Record, frozen=True):
    """How a model is laid over a cluster. `global_batch` in sequences of `sequence` tokens."""

    name: str
    parallelism: Parallelism
    optimizations: Optimizations = Optimizations()
    hardware: Preference = Preference()
    precision: Precision = "bf16"
    stack: str = "megatron-core"
    global_batch: Count = 128
    sequence: Count | None = None

    @property
    def model_gpus(self) -> int:
        """GPUs that hold one copy of the model."""
        p = self.parallelism
        return p.tensor * p.pipeline * p.context

    def label(self) -> str:
        """Short form for tables: TP4 PP8 DP2 mb16."""
        p = self.parallelism
        parts = [f"TP{p.tensor}", f"PP{p.pipeline}"]
        parts += [f"CP{p.context}"] if p.context > 1 else []
        parts += [f"EP{p.expert}"] if p.expert > 1 else []
        parts += [f"DP{p.data}"] if p.data else []
        return " ".join([*parts, f"mb{self.optimizations.microbatch}"])
