"""A job as its hook reports it: the value that the screen shows and that proposals start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a data-parallel rank runs: host name and its GPU (index, PCI bus id or UUID) as its process knows them."""

    rank: int
    host: str
    device: str | None


@dataclass(frozen=True, slots=True)
class JobStatus:
    """`node` and `socket` name the hook; `can` what it offers; times in unix seconds. `name` is unique among attached
    jobs; `given` is what the job calls itself.

    `reason` says why a job that is not attached is gone; empty when it ended well. A socket that never greeted is a
    status, too, so that the screen can say why no job is there. `holder` is the operator whose commands it takes now.
    """

    name: str
    node: str
    socket: str
    attached: bool
    reason: str = ""
    framework: str = ""
    world_size: int = 1
    global_batch: int = 1
    tokens_per_sample: int | None = None
    plan: Mapping[str, Any] | None = None
    can: frozenset[str] = frozenset()
    ranks: tuple[RankPlace, ...] = ()
    step: int = 0
    step_s: float | None = None
    loss: float | None = None
    tokens: float | None = None
    microbatch: int = 1
    microbatches: tuple[int, ...] = (1,)
    last_step: float | None = None
    recent_step_s: tuple[float, ...] = field(default=())
    greeted: bool = True
    max_pause_s: float = 0.0
    paused_until: float | None = None
    holder: str = ""
    held_since: float | None = None
    held_because: str = ""
    given: str = ""

    @property
    def key(self) -> str:
        return f"{self.node}:{self.socket}"

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of the last step over its time."""
        if self.step_s and self.tokens:
            return self.tokens / self.step_s
        if self.step_s and self.tokens_per_sample:
            return self.tokens_per_sample * self.global_batch / self.step_s
        return None
