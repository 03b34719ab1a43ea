"""What holds a GPU's clock down: its power limit, a clock lock, and its own protection against heat. Arrays over GPUs.

The board lowers its clock a step at a time above its operating temperature and halves it at its slowdown point; it
raises it again only some degrees below (hysteresis). How fast it steps is published nowhere: assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from engine.model import power, thermal
from engine.model.thermal import Chassis, Heat
from engine.profile import Cluster, Device

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

HYSTERESIS_K = 3.0
STEPS_PER_S = 4.0


@dataclass(frozen=True)
class Boards:
    """The GPUs of a cluster, a row each: which rows are of which device, the air around them, their thresholds."""

    devices: tuple[tuple[Device, Ints], ...]
    chassis: Chassis
    operating_c: Floats
    slowdown_c: Floats
    clock_max_mhz: Floats
    clock_idle_mhz: Floats
    clock_step_mhz: Floats


@dataclass(frozen=True)
class Demand:
    """What a job asks of each GPU: activity while it runs, and the share of the time that it runs."""

    activity: Floats
    busy: Floats


@dataclass(frozen=True)
class State:
    """Every GPU at one moment. `heat_cap_mhz` is what its own protection allows, `capped` where the power limit holds
    the clock."""

    heat: Heat
    clock_mhz: Floats
    heat_cap_mhz: Floats
    power_w: Floats
    capped: npt.NDArray[np.bool_]


def boards_of(cluster: Cluster, chassis: Chassis | None = None) -> Boards:
    """One row a GPU, in the cluster's order of nodes."""
    each = [cluster.device_of(n) for n in cluster.nodes for _ in range(cluster.type_of(n).gpus)]
    names = np.array([d.name for d in each])
    return Boards(
        devices=tuple((d, np.flatnonzero(names == d.name)) for d in {d.name: d for d in each}.values()),
        chassis=chassis or thermal.chassis_of(cluster),
        operating_c=np.array([d.temperature_c.operating for d in each]),
        slowdown_c=np.array([d.temperature_c.slowdown for d in each]),
        clock_max_mhz=np.array([d.clock.max for d in each]),
        clock_idle_mhz=np.array([d.clock.idle for d in each]),
        clock_step_mhz=np.array([d.clock.step for d in each]),
    )


def resting(boards: Boards) -> State:
    """Every GPU idle, settled."""
    idle = Demand(np.zeros(len(boards.operating_c)), np.zeros(len(boards.operating_c)))
    watts = power_of(boards, idle, boards.clock_idle_mhz, np.full(len(idle.busy), 30.0))
    heat = thermal.steady(boards.chassis, watts)
    return State(heat, boards.clock_idle_mhz, boards.clock_max_mhz, watts, np.zeros(len(watts), bool))


def advance(
    boards: Boards, state: State, demand: Demand, limit_w: Floats, seconds: float, lock_mhz: Floats | None = None
) -> State:
    """Move on by `seconds`: protection first, then clocks (none above its lock), power and heat."""
    celsius, running = state.heat.junction_c, demand.busy > 0
    cap = heat_cap(boards, state.heat_cap_mhz, celsius, seconds)
    allowed = np.empty_like(cap)
    for device, rows in boards.devices:
        allowed[rows] = power.clock_under_limit(device, demand.activity[rows], limit_w[rows], celsius[rows])
    clock = np.where(running, np.minimum(allowed, cap), boards.clock_idle_mhz)
    if lock_mhz is not None:
        clock = np.minimum(clock, lock_mhz)
    watts = power_of(boards, demand, clock, celsius)
    heat = thermal.step(boards.chassis, state.heat, watts, seconds)
    return replace(state, heat=heat, clock_mhz=clock, heat_cap_mhz=cap, power_w=watts, capped=running & (allowed < cap))


def heat_cap(boards: Boards, cap_mhz: Floats, celsius: Floats, seconds: float) -> Floats:
    """The clock that a board's own protection allows next: down above its operating temperature, up again below it by
    the hysteresis, half at its slowdown point."""
    move = boards.clock_step_mhz * STEPS_PER_S * seconds
    cap = np.where(celsius > boards.operating_c, cap_mhz - move, cap_mhz)
    cap = np.where(celsius < boards.operating_c - HYSTERESIS_K, cap + move, cap)
    cap = np.where(celsius >= boards.slowdown_c, np.minimum(cap, boards.clock_max_mhz / 2), cap)
    return np.clip(cap, boards.clock_idle_mhz, boards.clock_max_mhz)


def power_of(boards: Boards, demand: Demand, clock_mhz: Floats, celsius: Floats) -> Floats:
    """Mean board power: activity while it runs, waiting with a resident process in between."""
    running = demand.busy > 0
    mean = demand.activity * demand.busy + power.ACTIVITY["wait"] * running * (1 - demand.busy)
    out = np.empty_like(clock_mhz)
    for device, rows in boards.devices:
        out[rows] = power.power_w(device, mean[rows], clock_mhz[rows], celsius[rows])
    return out
