"""The twin beside the sensors: an extended Kalman filter for every GPU that holds the RC network against measured
temperature and slowly learns its constants. Arrays over GPUs; nothing here knows a clock.

State of a GPU: heatsink temperature, air, and the logarithms of the sink's resistance and heat capacity, the die's
resistance and the preheating of a rear GPU's air. Measured power drives it, so that leakage is in it already.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from engine.model import thermal
from engine.model.thermal import FAN_S, FLOW_EXPONENT, Chassis

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SINK, INLET, R_SINK, C_SINK, R_DIE, PREHEAT = range(6)
SPREAD = np.array([3.0, 2.5, 0.14, 0.25, 0.15, 0.15])
"""How surely the profile is known before anything is seen: K, K, and logarithms. Boards of one kind differ by some 6 %;
heat capacities were published nowhere."""
DRIFT = np.array([0.05, 0.03, 2e-4, 2e-4, 2e-4, 2e-4])
"""How far each may wander in a second, as a standard deviation."""
SENSOR_K = 1.0
"""Standard deviation of a reading before its own scatter is known."""
ROUNDING_VAR = 1.0 / 12.0
GATE = 5.0
"""Readings further off than this many standard deviations are not believed at first."""
BELIEVED_AFTER = 6
"""So many in a row are: then it is the GPU that changed."""
PLAUSIBLE_C = (0.0, 125.0)
STUCK_S, DOUBT_K, STUCK_K = 10.0, 3.0, 6.0
"""A reading that stood still for so long while the network by itself moved by so much is doubted, and then stuck."""
POWER_JUMP = 0.05
"""A change of power beyond this share is a new load, and not averaged with the old one."""
POWER_S, SOON_S = 15.0, 3.0
"""Seconds over which power is averaged while the load is the same, and over which a new load is noticed."""

OK, STUCK, JUMP, RANGE = range(4)
WORDS = ("", "has not moved", "jumps", "is out of range")


@dataclass(frozen=True)
class Twin:
    """What is known of n GPUs: `x` (n, 6) with its covariance, flow of the fans, power as the die feels it and as it is
    on average, and what is wrong with each sensor. Rows that never had a reading are not `known`."""

    chassis: Chassis
    x: Floats
    covariance: Floats
    known: Bools
    flow: Floats
    die_w: Floats
    soon_w: Floats
    mean_w: Floats
    power_var: Floats
    sensor_var: Floats
    innovation_k: Floats
    refused: Ints
    last_c: Floats
    same_s: Floats
    alone_c: Floats
    fault: Ints
    fault_s: Floats


def begin(chassis: Chassis) -> Twin:
    """A twin that has seen nothing: the profile's constants."""
    n = len(chassis.inlet_c)
    zero, nan = np.zeros(n), np.full(n, np.nan)
    x = np.stack(
        [
            nan,
            chassis.inlet_c,
            np.log(chassis.r_sink),
            np.log(chassis.c_sink),
            np.log(chassis.r_die),
            np.log(np.maximum(chassis.preheat_k_w, 1e-4)),
        ],
        axis=1,
    )
    return Twin(
        chassis=chassis,
        x=x,
        covariance=np.repeat(np.diag(SPREAD**2)[None], n, axis=0),
        known=np.zeros(n, bool),
        flow=np.ones(n),
        die_w=zero,
        soon_w=zero,
        mean_w=zero,
        power_var=zero,
        sensor_var=np.full(n, SENSOR_K**2 + ROUNDING_VAR),
        innovation_k=zero,
        refused=np.zeros(n, np.int64),
        last_c=nan,
        same_s=zero,
        alone_c=nan,
        fault=np.zeros(n, np.int64),
        fault_s=zero,
    )


def learned(twin: Twin) -> Chassis:
    """The chassis as the twin knows it now."""
    x = twin.x
    return replace(
        twin.chassis,
        inlet_c=x[:, INLET],
        r_sink=np.exp(x[:, R_SINK]),
        c_sink=np.exp(x[:, C_SINK]),
        r_die=np.exp(x[:, R_DIE]),
        preheat_k_w=np.where(twin.chassis.front >= 0, np.exp(x[:, PREHEAT]), 0.0),
    )


def junction_c(twin: Twin) -> Floats:
    """Where the twin believes each junction is; NaN where nothing was read yet."""
    return np.where(twin.known, twin.x[:, SINK] + np.exp(twin.x[:, R_DIE]) * twin.die_w, np.nan)


def settled_c(twin: Twin) -> Floats:
    """Where each junction is headed under its present mean power."""
    settled = thermal.steady(learned(twin), twin.mean_w).junction_c
    return np.where(twin.known, settled, np.nan)


def advance(twin: Twin, temperature_c: Floats, power_w: Floats, seconds: float) -> Twin:
    """One reading of every GPU, `seconds` after the last; NaN where there is none."""
    begun = _started(twin, temperature_c, power_w)
    return _corrected(_moved(begun, power_w, seconds), temperature_c, seconds)


def _started(twin: Twin, celsius: Floats, power_w: Floats) -> Twin:
    """Rows that are read for the first time start where their sensors say they are."""
    low, high = PLAUSIBLE_C
    fresh = ~twin.known & (celsius > low) & (celsius < high) & ~np.isnan(power_w)
    if not fresh.any():
        return twin
    watts = np.where(fresh, power_w, twin.mean_w)
    flow = np.where(fresh, thermal.flow_for(twin.chassis, np.nan_to_num(watts)), twin.flow)
    x, covariance = twin.x.copy(), twin.covariance.copy()
    x[fresh, SINK] = celsius[fresh] - np.exp(x[fresh, R_DIE]) * power_w[fresh]
    # The air may be far from what the profile says; if the GPU has settled, it is what the reading leaves for it.
    with np.errstate(invalid="ignore"):
        off = np.where(fresh, celsius - thermal.steady(twin.chassis, np.nan_to_num(watts)).junction_c, 0.0)
    x[:, INLET] += off
    covariance[:, INLET, INLET] += (off / 2.0) ** 2
    return replace(
        twin,
        x=x,
        covariance=covariance,
        known=twin.known | fresh,
        flow=flow,
        die_w=np.where(fresh, power_w, twin.die_w),
        soon_w=watts,
        mean_w=watts,
        last_c=np.where(fresh, celsius, twin.last_c),
        alone_c=np.where(fresh, x[:, SINK], twin.alone_c),
    )


def _moved(twin: Twin, power_w: Floats, seconds: float) -> Twin:
    """Predict: the network relaxes under the power that was measured; what cannot be read stays as it was."""
    watts = np.where(np.isnan(power_w), twin.mean_w, power_w)
    chassis, x = twin.chassis, twin.x
    flow = thermal.flow_for(chassis, watts)
    flow += (twin.flow - flow) * np.exp(-seconds / FAN_S)
    sink, slope = _relaxed(chassis, x, watts, flow, seconds)
    alone_c = sink + (twin.alone_c - x[:, SINK]) * slope[:, SINK]
    x = x.copy()
    x[:, SINK] = np.where(twin.known, sink, np.nan)
    covariance = _carried(twin.covariance, slope)
    covariance[:, range(6), range(6)] += DRIFT**2 * seconds
    covariance = np.where(twin.known[:, None, None], covariance, twin.covariance)
    die_w = watts + (twin.die_w - watts) * np.exp(-seconds / (np.exp(x[:, R_DIE]) * chassis.c_die))
    twin = _averaged(twin, watts, seconds)
    return replace(twin, x=x, covariance=covariance, flow=flow, die_w=die_w, alone_c=alone_c)


def _averaged(twin: Twin, watts: Floats, seconds: float) -> Twin:
    """The mean power of the present load and its scatter: microbatches make it swing from reading to reading, and only
    where a short mean leaves the long one has the load changed."""
    soon = watts + (twin.soon_w - watts) * np.exp(-seconds / SOON_S)
    jump = np.abs(soon - twin.mean_w) > np.maximum(POWER_JUMP * np.maximum(twin.mean_w, 50.0), np.sqrt(twin.power_var))
    keep = np.exp(-seconds / POWER_S)
    mean_w = np.where(jump, watts, watts + (twin.mean_w - watts) * keep)
    power_var = np.where(jump, twin.power_var, twin.power_var * keep + (watts - mean_w) ** 2 * (1 - keep))
    return replace(twin, soon_w=np.where(jump, watts, soon), mean_w=mean_w, power_var=power_var)


def _relaxed(
    chassis: Chassis, x: Floats, watts: Floats, flow: Floats, seconds: Floats | float
) -> tuple[Floats, Floats]:
    """The sink after `seconds` under constant power, (n,), and its slope in the six states, (n, 6)."""
    r = np.exp(x[:, R_SINK]) * flow**-FLOW_EXPONENT
    lag = seconds / (r * np.exp(x[:, C_SINK]))
    left = np.exp(-lag)
    behind = chassis.front >= 0
    warmed = np.where(behind, np.exp(x[:, PREHEAT]) * watts[chassis.front] / flow, 0.0)
    target = x[:, INLET] + warmed + r * watts
    away = x[:, SINK] - target
    slope = np.stack(
        [
            left,
            1 - left,
            (1 - left) * r * watts + away * left * lag,
            away * left * lag,
            np.zeros_like(left),
            (1 - left) * warmed,
        ],
        axis=1,
    )
    return target + away * left, slope


def _carried(covariance: Floats, slope: Floats) -> Floats:
    """F C F^T where F is the identity but for its first row, the sink's slope."""
    row = np.einsum("nj,njk->nk", slope, covariance)
    out = covariance.copy()
    out[:, SINK, :] = row
    out[:, :, SINK] = row
    out[:, SINK, SINK] = np.einsum("nk,nk->n", row, slope)
    return out


def _corrected(twin: Twin, celsius: Floats, seconds: float) -> Twin:
    """Correct by what was read, after asking whether the reading can be believed."""
    x, die_k = twin.x, np.exp(twin.x[:, R_DIE]) * twin.die_w
    expected = x[:, SINK] + die_k
    carried = twin.covariance[:, :, SINK] + twin.covariance[:, :, R_DIE] * die_k[:, None]
    variance = carried[:, SINK] + carried[:, R_DIE] * die_k
    innovation = celsius - expected
    twin, believed = _judged(twin, celsius, expected, innovation**2 > GATE**2 * (variance + twin.sensor_var), seconds)
    x = twin.x
    step = np.where(believed, innovation, 0.0)
    gain = carried / (variance + twin.sensor_var)[:, None] * believed[:, None]
    moved = x + gain * step[:, None]
    covariance = twin.covariance - gain[:, :, None] * carried[:, None, :]
    # A reading that was refused and stayed there means that the GPU, not its sensor, changed: sink and air are open.
    changed = believed & (twin.refused >= BELIEVED_AFTER)
    for state in (SINK, INLET):
        covariance[changed, state, state] += SPREAD[state] ** 2
    slow = np.exp(-seconds / 60.0)
    scatter = np.clip(innovation**2 - variance, ROUNDING_VAR, 6.0)
    sensor_var = np.where(believed, twin.sensor_var * slow + scatter * (1 - slow), twin.sensor_var)
    return replace(
        twin,
        x=moved,
        covariance=covariance,
        sensor_var=np.maximum(sensor_var, 0.2),
        innovation_k=np.where(believed, twin.innovation_k * slow + step * (1 - slow), twin.innovation_k),
        refused=np.where(believed, 0, twin.refused),
    )


def _judged(twin: Twin, celsius: Floats, expected: Floats, far: Bools, seconds: float) -> tuple[Twin, Bools]:
    """Which readings are believed; of the others, what is wrong with them and since when."""
    read = twin.known & ~np.isnan(celsius)
    same = read & (celsius == twin.last_c)
    same_s = np.where(same, twin.same_s + seconds, 0.0)
    # A reading that stands still drags the twin along; what counts is where the network would be without it.
    alone = twin.alone_c + expected - twin.x[:, SINK]
    doubted = same & (same_s >= STUCK_S) & (np.abs(celsius - alone) >= DOUBT_K)
    stuck = doubted & ((np.abs(celsius - alone) >= STUCK_K) | (twin.fault == STUCK))
    low, high = PLAUSIBLE_C
    outside = read & ((celsius <= low) | (celsius >= high))
    refused = np.where(read & far, twin.refused + 1, np.where(read, 0, twin.refused))
    jumps = read & far & (refused < BELIEVED_AFTER)
    fault = np.where(outside, RANGE, np.where(stuck, STUCK, np.where(jumps, JUMP, OK)))
    fault = np.where(read, fault, twin.fault)
    fault_s = np.where((fault != OK) & (fault == twin.fault), twin.fault_s + seconds, 0.0)
    x = twin.x.copy()
    x[:, SINK] = np.where(doubted, twin.alone_c, x[:, SINK])
    told = replace(
        twin,
        x=x,
        refused=np.where(doubted, 0, refused),
        last_c=np.where(read, celsius, twin.last_c),
        same_s=same_s,
        alone_c=np.where(same, twin.alone_c, x[:, SINK]),
        fault=fault,
        fault_s=fault_s,
    )
    return told, read & (fault == OK) & ~doubted
