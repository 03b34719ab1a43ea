"""What the probe prints, as typed values. A reading is a number or a state; only a number is ever used as one."""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec

from engine.telemetry.text import clean

FRAME = b"\x1e"


class ProbeError(Exception):
    """A record that is not the probe's. The text is a sentence."""


class ReadingState(enum.Enum):
    """Why a reading is no number; VALUE when it is one."""

    VALUE = "value"
    ABSENT = "absent"
    UNSUPPORTED = "unsupported"
    ERROR = "error"
    STALE = "stale"
    LOST = "lost"
    BLANK = "blank"
    IMPLAUSIBLE = "implausible"


STATES = tuple(ReadingState)
"""By code, as columns of states hold them; 0 is VALUE."""
CODES = {state: code for code, state in enumerate(STATES)}

Reading = float | str | None

# What a sensor can mean, by metric: outside lies a torn read, not a hot GPU.
PLAUSIBLE: dict[str, tuple[float, float]] = {
    "temperature_c": (-20, 130),
    "memory_temperature_c": (-20, 140),
    "power_w": (0, 3000),
    "power_limit_w": (1, 3000),
    "sm_clock_mhz": (0, 5000),
    "memory_clock_mhz": (0, 20000),
    "utilization_pct": (0, 100),
    "memory_used_mib": (0, 4e6),
    "memory_total_mib": (1, 4e6),
    "energy_j": (0, 1e15),
    "margin_c": (-60, 150),
    "throttle": (0, 2.0**53),
    "power_max_w": (0, 3000),
    "held_by_power": (0, 1),
    "held_by_heat": (0, 1),
    "ecc_corrected": (0, 2.0**53),
    "ecc_uncorrected": (0, 2.0**53),
    "rows_remapped": (0, 1e6),
    "remap_pending": (0, 1),
    "remap_failed": (0, 1),
    "pcie_replays": (0, 2.0**53),
    "xid": (0, 1000),
    "power_limit_min_w": (0, 3000),
    "power_limit_max_w": (1, 3000),
    "power_limit_default_w": (1, 3000),
    "sm_clock_max_mhz": (1, 5000),
    "slowdown_c": (40, 130),
    "shutdown_c": (40, 140),
}


def worded(word: str | None) -> ReadingState:
    """The state that a word in a number's place names."""
    if word is None:
        return ReadingState.ABSENT
    try:
        state = ReadingState(word)
    except ValueError:
        return ReadingState.ERROR
    return ReadingState.ERROR if state is ReadingState.VALUE else state


def judge(metric: str, reading: Reading) -> tuple[float, ReadingState]:
    """The number, or NaN with the state that says why there is none."""
    if isinstance(reading, str) or reading is None:
        return math.nan, worded(reading)
    low, high = PLAUSIBLE[metric]
    if not low <= reading <= high:
        return math.nan, ReadingState.IMPLAUSIBLE
    return float(reading), ReadingState.VALUE


class _Record(msgspec.Struct, frozen=True):
    pass


class MigFacts(_Record, frozen=True):
    """A MIG instance: its profile name, ids, and memory. Its utilisation is not to be had from NVML."""

    name: str = ""
    gpu_instance: int | None = None
    compute_instance: int | None = None
    memory_total_mib: float | None = None
    memory_used_mib: float | None = None


class GpuFacts(_Record, frozen=True):
    """What does not change while a probe runs. `note` says what a reader must know, such as whose power it shares;
    `near` the network ports closest on PCIe; `cpus` those of its NUMA node, as the kernel lists them."""

    index: int
    lost: bool = False
    name: str | None = None
    uuid: str | None = None
    bus_id: str | None = None
    memory_total_mib: Reading = None
    power_limit_min_w: Reading = None
    power_limit_max_w: Reading = None
    power_limit_default_w: Reading = None
    sm_clock_max_mhz: Reading = None
    slowdown_c: Reading = None
    shutdown_c: Reading = None
    numa_node: int | None = None
    cpus: str | None = None
    near: tuple[str, ...] = ()
    persistence: bool | None = None
    mig: tuple[MigFacts, ...] = ()
    note: str | None = None


class Hello(_Record, frozen=True):
    """The first record of a probe, and again whenever it finds the GPUs anew. `reader` is what reads them (NVML,
    nvidia-smi, amd-smi, …), `because` why nothing better does."""

    hello: int
    hostname: str
    gpus: tuple[GpuFacts, ...]
    python: str = ""
    driver: str | None = None
    trouble: str | None = None
    reader: str = "NVML"
    because: str | None = None


class LinkFacts(_Record, frozen=True):
    """One link of a node: `gpu` its GPU's slot or -1, `kind` nvlink, xgmi, pcie or nic, `state` active, inactive or
    unknown, `gb_s` its rate in one direction now and `best_gb_s` as built, `to` the other end where it is told."""

    gpu: int
    kind: str
    name: str
    state: str = "active"
    gb_s: float | None = None
    best_gb_s: float | None = None
    to: str | None = None


class ProcessFacts(_Record, frozen=True):
    """A process on the GPU of slot `gpu`; job fields from its environment; `cpus` it may run on, as the kernel lists
    them."""

    gpu: int
    pid: int
    name: str = ""
    memory_mib: float | None = None
    slurm_job: str | None = None
    rank: str | None = None
    local_rank: str | None = None
    world_size: str | None = None
    cpus: str | None = None


class Tick(_Record, frozen=True):
    """One sample of a node. Metrics of GPUs are columns, one entry a GPU; a metric that is left out has not changed.

    `links` and `processes` come with the first tick and whenever they change; `rx_mb_s` and `tx_mb_s` have an entry a
    link of the last `links`, null where none is known, and so has `link_errors`, sent when it changes. `lost` names
    GPUs that no longer answer, by PCI bus id where known. `samples` is how often power was read within the tick.
    """

    tick: int
    time: float
    gpus: dict[str, list[Reading]] = {}
    links: tuple[LinkFacts, ...] | None = None
    rx_mb_s: list[float | None] = []
    tx_mb_s: list[float | None] = []
    link_errors: list[float | None] | None = None
    processes: tuple[ProcessFacts, ...] | None = None
    load: float | None = None
    hooks: tuple[str, ...] = ()
    trouble: str | None = None
    lost: tuple[str, ...] = ()
    took_ms: float = 0.0
    samples: int = 1


class GpuResult(_Record, frozen=True):
    """What one GPU was set to: a power limit in W, or an SM clock lock in MHz (None: not locked)."""

    before_w: float | None = None
    asked_w: float | None = None
    now_w: float | None = None
    before_mhz: float | None = None
    asked_mhz: float | None = None
    now_mhz: float | None = None


class Result(_Record, frozen=True):
    """The probe's answer to a command, or "unknown" when the connection broke before it came."""

    result: str
    state: str
    reason: str = ""
    gpus: dict[str, GpuResult] = {}
    found: dict[str, str] = {}


class Released(_Record, frozen=True):
    """A lease was given back: `released` is a GPU's index or a pid, `what` power (W), clock (MHz) or stop."""

    released: int
    reason: str
    what: str = "power"
    value: float | None = None
    error: str = ""


ProbeRecord = Hello | Tick | Result | Released

_KINDS: dict[str, type] = {"hello": Hello, "tick": Tick, "result": Result, "released": Released}
_DECODERS: dict[str, msgspec.json.Decoder[Any]] = {key: msgspec.json.Decoder(kind) for key, kind in _KINDS.items()}


def decode(line: bytes) -> ProbeRecord:
    """One framed line, frame taken off. ProbeError, with a sentence, for anything else."""
    kind = _kind_of(line)
    try:
        record: ProbeRecord = _DECODERS[kind].decode(line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProbeError(f"the probe's {kind} record cannot be read: {clean(str(error))}") from None
    return record


def _kind_of(line: bytes) -> str:
    """A tick begins with its key, so that the many need no second look; the few others are looked into."""
    if line.startswith(b'{"tick"'):
        return "tick"
    try:
        data = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        raise ProbeError("a framed line is not JSON") from None
    kind = next((k for k in _KINDS if isinstance(data, dict) and k in data), None)
    if kind is None:
        raise ProbeError("a framed line is none of the probe's records")
    return kind
