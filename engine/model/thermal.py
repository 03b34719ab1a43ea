"""Junction and heatsink of every GPU as an RC network, air heated along the chassis, fans. Arrays over GPUs.

Steady state: T = T_inlet + P_front preheat / u + P (R_die + R_sink / u^0.8), u the fans' flow over that at which the
resistances hold. Against measured board power this is linear in P at full flow: leakage, which makes T grow faster
than the load, is inside P (power.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.profile import Cluster

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FLOW_EXPONENT = 0.8
"""Forced convection over fins: heat transfer grows with flow^0.8 (Dittus-Boelter)."""
FAN_S = 8.0
"""Seconds in which fans follow the load; assumed."""


@dataclass(frozen=True)
class Chassis:
    """Constants of n GPUs: resistances in K/W at full flow, capacities in J/K, `front` the GPU whose air each one
    breathes (-1), `node` the chassis it stands in. Fans give `least_flow` of their flow when idle, and all of it from
    a mean power of `full_w` on; liquid has no fans (1)."""

    inlet_c: Floats
    r_die: Floats
    r_sink: Floats
    c_die: Floats
    c_sink: Floats
    preheat_k_w: Floats
    front: Ints
    node: Ints
    least_flow: Floats
    full_w: Floats


@dataclass(frozen=True)
class Heat:
    """State of n GPUs: temperatures in C, and the flow of the fans that cool each."""

    junction_c: Floats
    sink_c: Floats
    flow: Floats


def chassis_of(cluster: Cluster) -> Chassis:
    """One row a GPU, in the cluster's order of nodes; rear slots pair with the front slots in the order given. What
    was learned of a node (`rackside calibrate --thermal`) takes the place of its type's constants."""
    rows: list[tuple[float, ...]] = []
    front: list[int] = []
    for number, node in enumerate(cluster.nodes):
        kind, device = cluster.type_of(node), cluster.device_of(node)
        cooling, first, learned = kind.cooling, len(rows), node.learned
        fronts = [slot for slot in range(kind.gpus) if slot not in cooling.rear]
        ahead = dict(zip(cooling.rear, fronts, strict=False))
        for slot in range(kind.gpus):
            own = learned.gpus[slot] if learned and slot < len(learned.gpus) else None
            rows.append(
                (
                    cluster.inlet_c(node) + (own.inlet_k if own else 0.0),
                    own.r_die_k_w if own else device.die.r_sink_k_w,
                    own.r_sink_k_w if own else cooling.r_sink_air_k_w,
                    device.die.c_j_k,
                    own.c_sink_j_k if own else cooling.c_sink_j_k,
                    (own.preheat_k_w if own else cooling.preheat_k_w) if slot in ahead else 0.0,
                    number,
                    cooling.fan.least if cooling.fan else 1.0,
                    cooling.fan.full_w if cooling.fan else 1.0,
                )
            )
            front.append(first + ahead[slot] if slot in ahead else -1)
    inlet, r_die, r_sink, c_die, c_sink, preheat, place, least, full = np.asarray(rows, float).T
    index = place.astype(np.int64)
    return Chassis(inlet, r_die, r_sink, c_die, c_sink, preheat, np.asarray(front, np.int64), index, least, full)


def flow_for(chassis: Chassis, power_w: Floats) -> Floats:
    """Flow that the fans settle at: with the mean power of their node's GPUs, from the least to full."""
    mean = np.bincount(chassis.node, weights=power_w) / np.bincount(chassis.node)
    return _flow(mean[chassis.node], chassis.least_flow, chassis.full_w)


def air_c(chassis: Chassis, power_w: Floats, flow: Floats) -> Floats:
    """Air that each GPU breathes, C."""
    ahead = np.where(chassis.front >= 0, power_w[chassis.front], 0.0)
    return np.asarray(chassis.inlet_c + chassis.preheat_k_w * ahead / flow)


def steady(chassis: Chassis, power_w: Floats) -> Heat:
    """Where the temperatures settle under constant power."""
    flow = flow_for(chassis, power_w)
    sink = air_c(chassis, power_w, flow) + power_w * chassis.r_sink * flow**-FLOW_EXPONENT
    return Heat(sink + power_w * chassis.r_die, sink, flow)


def hottest_c(chassis: Chassis, power_w: Floats) -> Floats:
    """Junction of the hottest GPU, settled, when every GPU draws `power_w`; one value for each power given. Many GPUs
    share one set of constants, which is then worked out once."""
    behind = np.where(chassis.front >= 0, chassis.preheat_k_w, 0.0)
    kinds = np.unique(
        np.stack([chassis.inlet_c, chassis.r_die, chassis.r_sink, behind, chassis.least_flow, chassis.full_w], axis=1),
        axis=0,
    )
    watts = np.asarray(power_w, float)
    out = np.full(watts.shape, -np.inf)
    for fans in np.unique(kinds[:, 4:], axis=0):
        flow = _flow(watts, fans[0], fans[1])
        slow, slower = watts * flow**-FLOW_EXPONENT, watts / flow
        for inlet, r_die, r_sink, preheat, *_ in kinds[(kinds[:, 4:] == fans).all(axis=1)]:
            out = np.maximum(out, inlet + r_die * watts + r_sink * slow + preheat * slower)
    return out


def step(chassis: Chassis, heat: Heat, power_w: Floats, seconds: float) -> Heat:
    """Advance by `seconds`: each node of the network relaxes exponentially, so that any step is stable."""
    flow = flow_for(chassis, power_w)
    flow += (heat.flow - flow) * np.exp(-seconds / FAN_S)
    r_sink = chassis.r_sink * flow**-FLOW_EXPONENT
    target_sink = air_c(chassis, power_w, flow) + power_w * r_sink
    sink = target_sink + (heat.sink_c - target_sink) * np.exp(-seconds / (r_sink * chassis.c_sink))
    target = sink + power_w * chassis.r_die
    junction = target + (heat.junction_c - target) * np.exp(-seconds / (chassis.r_die * chassis.c_die))
    return Heat(np.asarray(junction), np.asarray(sink), flow)


def temperature_change(chassis: Chassis, before_w: Floats, after_w: Floats) -> Floats:
    """How far the settled junction temperatures move when power changes, K."""
    return np.asarray(steady(chassis, after_w).junction_c - steady(chassis, before_w).junction_c)


def _flow(mean_w: Floats, least: Floats | float, full_w: Floats | float) -> Floats:
    return np.asarray(least + (1.0 - least) * np.clip(mean_w / full_w, 0.0, 1.0))
