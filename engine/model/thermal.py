"""Junction and heatsink of every GPU as an RC network, air heated along the chassis. Arrays over GPUs.

Steady state: T = T_inlet + preheat P_front + P (R_die + R_sink). Leakage inside P makes it grow faster than linearly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.profile import Cluster

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Chassis:
    """Constants of n GPUs: resistances in K/W, capacities in J/K, `front` the GPU whose air each one breathes (-1)."""

    inlet_c: Floats
    r_die: Floats
    r_sink: Floats
    c_die: Floats
    c_sink: Floats
    preheat_k_w: Floats
    front: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Heat:
    """State of n GPUs, C."""

    junction_c: Floats
    sink_c: Floats


def chassis_of(cluster: Cluster) -> Chassis:
    """One row a GPU, in the cluster's order of nodes; rear slots pair with the front slots in the order given."""
    rows: list[tuple[float, float, float, float, float, float]] = []
    front: list[int] = []
    for node in cluster.nodes:
        kind, device = cluster.type_of(node), cluster.device_of(node)
        cooling, first = kind.cooling, len(rows)
        fronts = [slot for slot in range(kind.gpus) if slot not in cooling.rear]
        ahead = dict(zip(cooling.rear, fronts, strict=False))
        for slot in range(kind.gpus):
            rows.append(
                (
                    cluster.inlet_c(node),
                    device.die.r_sink_k_w,
                    cooling.r_sink_air_k_w,
                    device.die.c_j_k,
                    cooling.c_sink_j_k,
                    cooling.preheat_k_w if slot in ahead else 0.0,
                )
            )
            front.append(first + ahead[slot] if slot in ahead else -1)
    inlet, r_die, r_sink, c_die, c_sink, preheat = np.asarray(rows, float).T
    return Chassis(inlet, r_die, r_sink, c_die, c_sink, preheat, np.asarray(front, np.int64))


def air_c(chassis: Chassis, power_w: Floats) -> Floats:
    """Air that each GPU breathes, C."""
    ahead = np.where(chassis.front >= 0, power_w[chassis.front], 0.0)
    return np.asarray(chassis.inlet_c + chassis.preheat_k_w * ahead)


def steady(chassis: Chassis, power_w: Floats) -> Heat:
    """Where the temperatures settle under constant power."""
    sink = air_c(chassis, power_w) + power_w * chassis.r_sink
    return Heat(sink + power_w * chassis.r_die, sink)


def hottest_c(chassis: Chassis, power_w: Floats) -> Floats:
    """Junction of the hottest GPU, settled, when every GPU draws `power_w`; one value for each power given.

    With equal power every GPU's temperature is a line in it, and many GPUs share one.
    """
    slope = chassis.r_die + chassis.r_sink + np.where(chassis.front >= 0, chassis.preheat_k_w, 0.0)
    lines = np.unique(np.stack([chassis.inlet_c, slope], axis=1), axis=0)
    return np.asarray(np.max(lines[:, :1] + lines[:, 1:] * np.asarray(power_w, float), axis=0))


def step(chassis: Chassis, heat: Heat, power_w: Floats, seconds: float) -> Heat:
    """Advance by `seconds`: each node of the network relaxes exponentially, so that any step is stable."""
    target_sink = air_c(chassis, power_w) + power_w * chassis.r_sink
    sink = target_sink + (heat.sink_c - target_sink) * np.exp(-seconds / (chassis.r_sink * chassis.c_sink))
    target = sink + power_w * chassis.r_die
    junction = target + (heat.junction_c - target) * np.exp(-seconds / (chassis.r_die * chassis.c_die))
    return Heat(np.asarray(junction), np.asarray(sink))


def temperature_change(chassis: Chassis, change_w: Floats) -> Floats:
    """How far the settled junction temperatures move when power changes by `change_w`, K."""
    zero = np.zeros_like(change_w)
    return np.asarray(steady(chassis, change_w).junction_c - steady(chassis, zero).junction_c)
