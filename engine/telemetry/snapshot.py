"""What is happening, as one immutable value: readers never lock and never see half a tick."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.telemetry.reading import STATES, GpuFacts, ReadingState

Floats = npt.NDArray[np.float64]

GPU_HEALTH = (
    "ecc_corrected",
    "ecc_uncorrected",
    "rows_remapped",
    "remap_pending",
    "remap_failed",
    "pcie_replays",
    "xid",
)
"""What a board says of itself; it seldom changes."""

GPU_METRICS = (
    "temperature_c",
    "memory_temperature_c",
    "power_w",
    "power_limit_w",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "utilization_pct",
    "memory_used_mib",
    "energy_j",
    "margin_c",
    "throttle",
    "power_max_w",
    "held_by_power",
    "held_by_heat",
    *GPU_HEALTH,
)
"""Read every tick, or told when they change. `power_w` is the mean and `power_max_w` the largest of the tick's samples;
`held_by_power` and `held_by_heat` the share of the tick in which a limiter held the clock; ECC errors since the driver
started; `xid` the last critical event's number."""

GPU_FACTS = (
    "memory_total_mib",
    "power_limit_min_w",
    "power_limit_max_w",
    "power_limit_default_w",
    "sm_clock_max_mhz",
    "slowdown_c",
    "shutdown_c",
)
"""Read when a node greets."""

_PLACES = {name: place for place, name in enumerate((*GPU_METRICS, *GPU_FACTS))}


class NodeState(enum.Enum):
    """CONNECTING until the first sample; STALE: samples stopped; DOWN: no way to it; ERROR: it answers, not well."""

    CONNECTING = "connecting"
    LIVE = "live"
    STALE = "stale"
    DOWN = "down"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node. `rows` are its rows in the GPU table; times in unix seconds; `dropped` counts implausible readings.
    `missed` counts ticks that the node numbered and that never came; `reader` is what reads its GPUs and `because` why
    nothing better does; `took_ms` its last sample's own time, and `skew_s` how far its clock is ahead of the one here,
    the way's delay in it."""

    name: str
    state: NodeState
    reason: str
    since: float
    last_sample: float | None
    rows: range
    hostname: str
    driver: str
    hook_sockets: tuple[str, ...]
    troubles: tuple[str, ...]
    samples: int
    dropped: int
    reader: str = ""
    because: str = ""
    took_ms: float = math.nan
    skew_s: float = math.nan
    load: float = math.nan
    missed: int = 0


@dataclass(frozen=True, slots=True)
class Process:
    """A process on a GPU; the job fields come from its environment, as text."""

    pid: int
    name: str
    memory_mib: float | None
    slurm_job: str | None = None
    rank: str | None = None
    local_rank: str | None = None
    world_size: str | None = None
    cpus: str | None = None


@dataclass(frozen=True, slots=True)
class GpuTable:
    """One row a GPU, one array a metric (read-only; NaN = not available). `states` has the code of each reading's state
    (STATES), a row a metric in the order of GPU_METRICS and GPU_FACTS."""

    node: tuple[str, ...]
    index: tuple[int, ...]
    name: tuple[str, ...]
    uuid: tuple[str, ...]
    bus_id: tuple[str, ...]
    facts: tuple[GpuFacts, ...]
    columns: Mapping[str, Floats]
    states: npt.NDArray[np.int8]
    processes: tuple[tuple[Process, ...], ...]

    def __getitem__(self, metric: str) -> Floats:
        return self.columns[metric]

    def __len__(self) -> int:
        return len(self.node)

    def state(self, metric: str, row: int) -> ReadingState:
        """Whether a reading is a value, and why not if it is none."""
        return STATES[int(self.states[_PLACES[metric], row])]


@dataclass(frozen=True, slots=True)
class LinkTable:
    """One row a link: `gpu` is its GPU's slot or -1, `kind` nvlink, xgmi, pcie or nic, `state` active, degraded,
    inactive or unknown, `to` the other end where it is known, `of` the rows of each node that has any. Rates and peaks
    in GB/s for one direction, `errors` since the driver started, `well` 0 for links that are degraded or inactive."""

    node: tuple[str, ...]
    gpu: tuple[int, ...]
    kind: tuple[str, ...]
    name: tuple[str, ...]
    state: tuple[str, ...]
    to: tuple[str, ...]
    of: Mapping[str, range]
    columns: Mapping[str, Floats]

    def __getitem__(self, column: str) -> Floats:
        return self.columns[column]

    def __len__(self) -> int:
        return len(self.node)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All nodes at one moment. `version` grows by one with each."""

    version: int
    time: float
    nodes: tuple[NodeStatus, ...]
    gpus: GpuTable
    links: LinkTable
