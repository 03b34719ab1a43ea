"""Board power against clock, activity and temperature, and the clock that a power limit allows. Arrays over GPUs.

P = leakage e^(k (T - 60)) + memory + core a f V(f)^2: dynamic CMOS power with temperature-dependent leakage; the
constants and their source stand in the device profile.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.profile import Device

Floats = npt.NDArray[np.float64]

# Activity of a phase: share of the core's switching at full matrix load. Bounds from published shares of TDP:
# compute-bound 0.92-1.0, memory-bound 0.63-0.69, waiting with a resident process 0.25.
ACTIVITY = {"matmul": 1.0, "attention": 0.9, "memory": 0.55, "communication": 0.3, "wait": 0.12}


def voltage(device: Device, clock_mhz: Floats | float) -> Floats:
    """Core voltage at a clock, V: flat up to the knee, then with the square of the clock above it."""
    p = device.power
    rise = np.clip((np.asarray(clock_mhz, float) - p.knee_mhz) / (device.clock.max - p.knee_mhz), 0.0, 1.0)
    return np.asarray(p.v_min + (p.v_max - p.v_min) * rise**2)


def power_w(
    device: Device, activity: Floats | float, clock_mhz: Floats | float, temperature_c: Floats | float
) -> Floats:
    """Board power, W. `activity` 0 (idle) to 1 (matrix products without a pause)."""
    core = device.power.core_w_per_mhz_v2 * np.asarray(activity, float) * clock_mhz * voltage(device, clock_mhz) ** 2
    return np.asarray(leakage_w(device, temperature_c) + memory_w(device, activity, clock_mhz) + core)


def leakage_w(device: Device, temperature_c: Floats | float) -> Floats:
    """What the board draws whether it works or not, W; it grows with temperature."""
    p = device.power
    return np.asarray(p.leakage_w * np.exp(p.leakage_per_k * (np.asarray(temperature_c, float) - 60.0)))


def memory_w(device: Device, activity: Floats | float, clock_mhz: Floats | float) -> Floats:
    """The memory's part of the board power, W: a core that works asks for data as fast as its clock allows."""
    p, busy = device.power, np.minimum(np.asarray(activity, float) / ACTIVITY["memory"], 1.0)
    clocked = p.memory_clocked_w * np.asarray(clock_mhz, float) / device.clock.max
    return np.asarray(p.memory_idle_w + busy * (p.memory_active_w + clocked))


def parts_w(device: Device, activity: float, clock_mhz: float, temperature_c: float) -> dict[str, float]:
    """Board power by what draws it, W: leakage, memory, and the core's switching."""
    leakage, memory = float(leakage_w(device, temperature_c)), float(memory_w(device, activity, clock_mhz))
    whole = float(power_w(device, activity, clock_mhz, temperature_c))
    return {"leakage": leakage, "memory": memory, "core": whole - leakage - memory}


def clock_under_limit(
    device: Device, activity: Floats | float, limit_w: Floats | float, temperature_c: Floats | float
) -> Floats:
    """The highest clock (MHz, whole steps, not below idle) at which power stays within the limit.

    Power grows with the clock at any activity, so each row's clock is found by halving the range of steps.
    """
    a, limit, t = np.broadcast_arrays(
        np.asarray(activity, float), np.asarray(limit_w, float), np.asarray(temperature_c, float)
    )
    steps = int((device.clock.max - device.clock.idle) / device.clock.step + 1e-9)
    low, high = np.zeros(a.shape, np.int64), np.full(a.shape, steps)  # steps below the highest clock
    free = power_w(device, a, device.clock.max, t) <= limit
    if free.all():
        return np.full(a.shape, device.clock.max)
    for _ in range(steps.bit_length()):
        middle = (low + high) // 2
        fits = power_w(device, a, device.clock.max - middle * device.clock.step, t) <= limit
        low, high = np.where(fits, low, np.minimum(middle + 1, steps)), np.where(fits, middle, high)
    return np.asarray(device.clock.max - np.where(free, 0, high) * device.clock.step)


def activity_of(
    device: Device, measured_w: Floats | float, clock_mhz: Floats | float, temperature_c: Floats | float
) -> Floats:
    """The activity that explains a measured power: power_w solved for a by bisection, within 0 to 1.3."""
    low = np.zeros(np.shape(measured_w))
    high = np.full(np.shape(measured_w), 1.3)
    for _ in range(30):
        middle = (low + high) / 2
        over = power_w(device, middle, clock_mhz, temperature_c) > measured_w
        low, high = np.where(over, low, middle), np.where(over, middle, high)
    return np.asarray((low + high) / 2)
