"""Power, clocks and temperatures that somebody measured: what the heat model's constants are fitted to."""

from __future__ import annotations

from pathlib import Path

from engine.profile.document import ProfileError, Record, load
from engine.profile.hardware import Positive
from engine.profile.plan import Plan


class Idle(Record, frozen=True):
    """Board power of a device that does nothing."""

    device: str
    clock_mhz: Positive
    temperature_c: float
    power_w: Positive


class Line(Record, frozen=True):
    """Board power and its memory's share against SM clock under full matrix load."""

    device: str
    source: str
    clock_mhz: tuple[float, ...]
    power_w: tuple[float, ...]
    memory_w: tuple[float, ...]


class Caps(Record, frozen=True):
    """Throughput of a plan under power caps, `relative` to that under the last one."""

    device: str
    node: str
    source: str
    model: str
    gpus: int
    plan: Plan
    power_w: tuple[float, ...]
    relative: tuple[float, ...]


class Settled(Record, frozen=True):
    """Settled temperatures of the front and the rear GPUs of one chassis, all at `power_w`."""

    node: str
    power_w: Positive
    inlet_c: float
    front_c: float
    rear_c: float
    source: str


class Whole(Record, frozen=True):
    """What a node draws in all while it trains, W."""

    node: str
    power_w: Positive
    source: str


class Phase(Record, frozen=True):
    """Seconds and joules of the same work on one GPU at several locked SM clocks."""

    device: str
    source: str
    name: str
    clock_mhz: tuple[float, ...]
    seconds: tuple[float, ...]
    joules: tuple[float, ...]


class Measured(Record, frozen=True):
    """The file."""

    idle: tuple[Idle, ...] = ()
    lines: tuple[Line, ...] = ()
    caps: tuple[Caps, ...] = ()
    chassis: tuple[Settled, ...] = ()
    nodes: tuple[Whole, ...] = ()
    phases: tuple[Phase, ...] = ()


def read(path: Path) -> Measured:
    """Read and check. ProfileError where columns of one series differ in length."""
    found = load(path, Measured)
    every: tuple[Line | Caps | Phase, ...] = (*found.lines, *found.caps, *found.phases)
    for series in every:
        lengths = {name: len(getattr(series, name)) for name in series.__struct_fields__ if _listed(series, name)}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name} {count}" for name, count in lengths.items())
            raise ProfileError(f"{path}: a series of {series.device} has columns of different lengths: {told}.")
    return found


def _listed(series: Record, name: str) -> bool:
    return isinstance(getattr(series, name), tuple)
