"""Actions as values: what is asked, what it will do, how far it has come."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


class Stage(enum.Enum):
    """Where an action stands. UNKNOWN: the line broke in flight; it may or may not have taken effect."""

    PENDING = "pending"
    ACKNOWLEDGED = "acknowledged"
    DONE = "done"
    FAILED = "failed"
    UNKNOWN = "unknown"
    UNDONE = "undone"

    @property
    def ended(self) -> bool:
        return self not in (Stage.PENDING, Stage.ACKNOWLEDGED)


@dataclass(frozen=True, slots=True)
class Throttle:
    """Power limits to set, W: node -> GPU index -> limit. `restore` gives back what was in force before instead;
    `permanent` is not leased and outlives the console."""

    limits_w: Mapping[str, Mapping[int, float]]
    restore: bool = False
    permanent: bool = False

    @property
    def values(self) -> Mapping[str, Mapping[int, float | None]]:
        return self.limits_w

    @property
    def gpus(self) -> int:
        return sum(map(len, self.limits_w.values()))


@dataclass(frozen=True, slots=True)
class ClockLock:
    """Highest SM clocks, MHz: node -> GPU index -> clock (None: not locked). `restore` and `permanent` as above."""

    clocks_mhz: Mapping[str, Mapping[int, float | None]]
    restore: bool = False
    permanent: bool = False

    @property
    def values(self) -> Mapping[str, Mapping[int, float | None]]:
        return self.clocks_mhz

    @property
    def gpus(self) -> int:
        return sum(map(len, self.clocks_mhz.values()))


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Sequences in one forward pass; the global batch stays. `then` restores an uneven split after it (undo)."""

    job: str
    microbatch: int
    then: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Rebalance:
    """How many microbatches each data-parallel rank runs; their sum stays."""

    job: str
    microbatches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pause:
    """The job waits at its next step boundary for `seconds`, then goes on by itself."""

    job: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Resume:
    """A paused job goes on at once."""

    job: str


@dataclass(frozen=True, slots=True)
class Freeze:
    """Stop a job's processes on its GPUs (node -> pids) for `seconds`; they go on by themselves. `restore` lets them go
    on now."""

    job: str
    pids: Mapping[str, tuple[int, ...]]
    seconds: float
    restore: bool = False


@dataclass(frozen=True, slots=True)
class Suspend:
    """Slurm stops its job on `nodes` for `seconds`; then it is resumed."""

    job: str
    nodes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Unsuspend:
    """Slurm lets a job go on."""

    job: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Requeue:
    """Slurm starts its job anew; the words of its new plan are written to `path` first, where its script reads them."""

    job: str
    nodes: tuple[str, ...]
    words: str
    path: str


NodeAction = Throttle | ClockLock
"""What the probes of nodes do to boards."""
JobAction = Microbatch | Rebalance | Pause | Resume
"""What a job's hook does."""
SchedulerAction = Suspend | Unsuspend | Requeue
"""What Slurm does."""
Action = NodeAction | Freeze | JobAction | SchedulerAction
Standstill = Pause | Resume | Freeze | Suspend | Unsuspend | Requeue
"""What stops or starts a job: what comes after it is not its effect, and it is not undone but resumed."""


def kind_of(action: Action) -> str:
    """Name for the log: throttle, clocklock, freeze, microbatch and so on."""
    return type(action).__name__.lower()


@dataclass(frozen=True, slots=True)
class Outlook:
    """The job and the rack, settled: None where nothing is known."""

    step_s: float | None
    tokens_per_s: float | None
    peak_c: float | None
    power_w: float | None
    memory_gib: float | None = None
    gpu_w: npt.NDArray[np.float64] | None = field(default=None, compare=False, repr=False)
    """Mean power of each GPU of the inventory, W: what a forecast of its temperature starts from."""
    peak_band_c: tuple[float, float] | None = None
    """Nine of ten outcomes of the hottest GPU in ten minutes."""
    step_band: float | None = None
    power_band: float | None = None
    """Half-widths, as shares of the step and of the power, that nine of ten outcomes stay within."""

    @property
    def step_kj(self) -> float | None:
        """Energy of one step of the job, kJ: mean power of all GPUs read, times the step."""
        return None if self.step_s is None or self.power_w is None else self.step_s * self.power_w / 1e3


@dataclass(frozen=True, slots=True)
class Proposal:
    """An action with its predicted effect. `refusal` says why it cannot be done; `notes` what else to know."""

    title: str
    action: Action
    before: Outlook
    after: Outlook
    scope: str
    refusal: str = ""
    notes: tuple[str, ...] = ()
    undoes: str | None = None


@dataclass(frozen=True, slots=True)
class Ticket:
    """A confirmed action on its way. `before` is what to put back, filled once the action is known to be in force;
    `measured` what came of it."""

    id: str
    time: float
    operator: str
    proposal: Proposal
    stage: Stage = Stage.PENDING
    step: int | None = None
    reason: str = ""
    before: Action | None = field(default=None)
    measured: Outlook | None = None
    steal: str = ""
    """Why the job is taken from the operator who holds it; empty when nobody else does."""

    @property
    def line(self) -> str:
        """One line for the screen."""
        where = f" at step {self.step}" if self.step is not None else ""
        why = f": {self.reason}" if self.reason else ""
        return f"{self.proposal.title} - {self.stage.value}{where}{why}{self._came()}"

    def _came(self) -> str:
        """What was predicted, beside what was measured."""
        if self.measured is None:
            return ""
        said, came = self.proposal.after, self.measured
        parts = [
            f"{b:.{digits}f} {unit}" + (f" ({a:.{digits}f} predicted)" if a is not None else "")
            for a, b, unit, digits in (
                (said.step_s, came.step_s, "s", 2),
                (_kw(said.power_w), _kw(came.power_w), "kW", 1),
                (said.peak_c, came.peak_c, "C", 0),
            )
            if b is not None
        ]
        return f"; measured {', '.join(parts)}" if parts else ""


def _kw(watts: float | None) -> float | None:
    return None if watts is None else watts / 1000
