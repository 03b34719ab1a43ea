"""A parallelism plan in the shape of the two templates the product grew from, extended."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from engine.profile.document import Record
from engine.profile.hardware import Count, Precision


class Parallelism(Record, frozen=True):
    """Group sizes. `data` may be left out: what the cluster leaves over. `zero` as in the ZeRO paper (3 = FSDP)."""

    tensor: Count = 1
    pipeline: Count = 1
    data: Count | None = None
    context: Count = 1
    expert: Count = 1
    interleave: Count = 1
    sequence_parallel: bool = True
    zero: Annotated[int, Meta(ge=0, le=3)] = 1


class Optimizations(Record, frozen=True):
    """`activation`: stash everything, recompute everything, or recompute the attention core only (selective)."""

    activation: Literal["stash", "selective", "recompute"] = "stash"
    overlap: bool = True
    microbatch: Count = 1


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
