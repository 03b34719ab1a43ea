"""This minute's rack as the planner needs it: limits, clocks, links and warmth, each said where it is not well."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.control import load
from engine.model import thermal
from engine.plan.conditions import Conditions
from engine.profile import Cluster
from engine.telemetry.snapshot import LinkTable, Snapshot

Floats = npt.NDArray[np.float64]

SET_DOWN = 0x02 | 0x08 | 0x20 | 0x40 | 0x80
"""NVML's reasons that hold a clock down other than the power limit: a clock setting, heat, the power brake."""
CLOCK_STEP_MHZ = 30.0
LEAST_W = 1.0
LEAST_K = 2.0
"""Steps in which conditions are told, so that noise does not make a new answer of every reading."""


def conditions(cluster: Cluster, snapshot: Snapshot, settled_c: Floats) -> Conditions:
    """Read them off a snapshot; `settled_c` where each GPU of the inventory is headed. What is not read is healthy."""
    told: list[str] = []
    clock, watts = _clock(cluster, snapshot, told), _limit(cluster, snapshot, told)
    warmer = _warmer(cluster, snapshot, settled_c, told)
    fabric = _fabric(snapshot.links, told)
    network = _ports(snapshot.links, told)
    return Conditions(clock, watts, fabric, network, warmer, tuple(told))


def _place(cluster: Cluster, row: int) -> str:
    for node in cluster.nodes:
        gpus = cluster.type_of(node).gpus
        if row < gpus:
            return f"{node.name} GPU {row}"
        row -= gpus
    return f"row {row}"


def _clock(cluster: Cluster, snapshot: Snapshot, told: list[str]) -> float | None:
    reasons = np.nan_to_num(load.column(cluster, snapshot, "throttle")).astype(np.int64)
    mhz = np.where(reasons & SET_DOWN, load.column(cluster, snapshot, "sm_clock_mhz"), np.nan)
    if np.isnan(mhz).all():
        return None
    row = int(np.nanargmin(mhz))
    clock = max(float(mhz[row]) // CLOCK_STEP_MHZ * CLOCK_STEP_MHZ, cluster.device.clock.idle)
    if clock >= cluster.device.clock.max:
        return None
    told.append(f"{_place(cluster, row)} is held at {mhz[row]:.0f} MHz")
    return clock


def _limit(cluster: Cluster, snapshot: Snapshot, told: list[str]) -> float | None:
    watts = load.column(cluster, snapshot, "power_limit_w")
    allowed = cluster.device.power_limit_w
    if np.isnan(watts).all():
        return None
    row = int(np.nanargmin(watts))
    limit = float(np.clip(watts[row], allowed.min, allowed.max))
    if limit > allowed.default - LEAST_W:
        return None
    told.append(f"{_place(cluster, row)} is limited to {limit:.0f} W")
    return limit


def _warmer(cluster: Cluster, snapshot: Snapshot, settled_c: Floats, told: list[str]) -> dict[str, float]:
    watts = load.column(cluster, snapshot, "power_w")
    expected = thermal.steady(thermal.chassis_of(cluster), np.nan_to_num(watts)).junction_c
    off, out, first = settled_c - expected, {}, 0
    for node in cluster.nodes:
        rows = off[first : first + cluster.type_of(node).gpus]
        first += len(rows)
        if not np.isnan(rows).all():
            out[node.name] = float(np.round(np.nanmax(rows) / LEAST_K) * LEAST_K)
    worst = max(out, key=lambda name: out[name], default=None)
    if worst is not None and out[worst] > LEAST_K:
        told.append(f"{worst} is {out[worst]:.0f} K warmer than its power and place explain")
    return out


def _fabric(links: LinkTable, told: list[str]) -> float:
    """Of the worst GPU's NVLinks the share that is up, a degraded one by its rate over the fastest."""
    kind = np.array(links.kind)
    rows = np.flatnonzero(kind == "nvlink")
    if not len(rows):
        return 1.0
    owner = [f"{links.node[r]} GPU {links.gpu[r]}" for r in rows]
    peak = links["peak_gb_s"][rows]
    best = np.nanmax(peak) if not np.isnan(peak).all() else 1.0
    up = np.array([links.state[r] != "inactive" for r in rows])
    share = np.where(up, np.where(np.isnan(peak), best, peak) / best, 0.0)
    return _worst(owner, share, "NVLinks' bandwidth", told)


def _ports(links: LinkTable, told: list[str]) -> float:
    rows = [r for r, kind in enumerate(links.kind) if kind == "nic"]
    if not rows:
        return 1.0
    share = np.array([links.state[r] != "inactive" for r in rows], float)
    return _worst([links.node[r] for r in rows], share, "network ports", told)


def _worst(owner: list[str], share: Floats, what: str, told: list[str]) -> float:
    names, of = np.unique(owner, return_inverse=True)
    mean = np.bincount(of, weights=share) / np.bincount(of)
    worst = int(mean.argmin())
    if mean[worst] >= 1 or mean[worst] <= 0:  # a node without any is not one that the plan could use at all
        return 1.0
    told.append(f"{names[worst]} has {mean[worst]:.0%} of its {what}")
    return float(mean[worst])
