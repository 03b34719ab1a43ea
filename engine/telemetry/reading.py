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
    LOST = "lost"
    IMPLAUSIBLE = "implausible"


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
    "power_limit_min_w": (0, 3000),
    "power_limit_max_w": (1, 3000),
    "power_limit_default_w": (1, 3000),
    "sm_clock_max_mhz": (1, 5000),
    "slowdown_c": (40, 130),
    "shutdown_c": (40, 140),
}


def judge(metric: str, reading: Reading) -> tuple[float, ReadingState]:
    """The number, or NaN with the state that says why there is none."""
    if isinstance(reading, str):
        try:
            return math.nan, ReadingState(reading)
        except ValueError:
            return math.nan, ReadingState.ERROR
    if reading is None:
        return math.nan, ReadingState.ABSENT
    low, high = PLAUSIBLE[metric]
    if not low <= reading <= high:
        return math.nan, ReadingState.IMPLAUSIBLE
    return float(reading), ReadingState.VALUE


class _Record(msgspec.Struct, frozen=True):
    pass


class GpuFacts(_Record, frozen=True):
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
    pcie_gen: Reading = None
    pcie_width: Reading = None
    nvlinks: int = 0


class Hello(_Record, frozen=True):
    """The first record of a probe, and again whenever it finds the GPUs anew."""

    hello: int
    hostname: str
    gpus: tuple[GpuFacts, ...]
    python: str = ""
    driver: str | None = None
    trouble: str | None = None


class NvlinkTick(_Record, frozen=True):
    link: int
    active: bool | None = None
    tx_b: Reading = None
    rx_b: Reading = None
    mb_s: float | None = None


class PcieTick(_Record, frozen=True):
    """Counters where the driver has them, else a rate."""

    tx_b: Reading = None
    rx_b: Reading = None
    tx_b_s: Reading = None
    rx_b_s: Reading = None


class ProcessTick(_Record, frozen=True):
    pid: int
    name: str = ""
    memory_mib: float | None = None
    slurm_job: str | None = None
    rank: str | None = None
    local_rank: str | None = None
    world_size: str | None = None


class GpuTick(_Record, frozen=True):
    lost: bool = False
    temperature_c: Reading = None
    memory_temperature_c: Reading = None
    margin_c: Reading = None
    power_w: Reading = None
    power_limit_w: Reading = None
    sm_clock_mhz: Reading = None
    memory_clock_mhz: Reading = None
    utilization_pct: Reading = None
    memory_used_mib: Reading = None
    throttle: Reading = None
    energy_j: Reading = None
    nvlinks: tuple[NvlinkTick, ...] = ()
    pcie: PcieTick | None = None
    processes: tuple[ProcessTick, ...] = ()


class NicTick(_Record, frozen=True):
    name: str
    tx_b: float | None = None
    rx_b: float | None = None
    gbps: float | None = None
    active: bool | None = None


class Tick(_Record, frozen=True):
    """One sample of a node; `lost` names GPUs that no longer answer, by PCI bus id where known."""

    tick: int
    time: float
    gpus: tuple[GpuTick, ...]
    nics: tuple[NicTick, ...] = ()
    load: float | None = None
    hooks: tuple[str, ...] = ()
    trouble: str | None = None
    lost: tuple[str, ...] = ()
    took_ms: float = 0.0


class GpuResult(_Record, frozen=True):
    before_w: float | None = None
    asked_w: float | None = None
    now_w: float | None = None


class Result(_Record, frozen=True):
    """The probe's answer to a command, or "unknown" when the connection broke before it came."""

    result: str
    state: str
    reason: str = ""
    gpus: dict[str, GpuResult] = {}


class Released(_Record, frozen=True):
    """A leased limit was given back."""

    released: int
    reason: str
    limit_w: float | None = None
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
