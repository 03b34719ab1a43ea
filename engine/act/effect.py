"""The predicted effect of an action: today's measured rack, moved by the model's ratios. Arrays over GPUs.

Measured power, clock and temperature give each GPU's activity; a new limit gives a new clock; clocks and shares give
the step; power gives the temperature. What was measured stays the anchor, so that a biased model cancels out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from engine.act.action import Outlook
from engine.model import pace, power, thermal
from engine.model.limiter import HYSTERESIS_K
from engine.model.pace import Pace
from engine.profile import Cluster, Device

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Rack:
    """One row a GPU, as measured now; NaN where not available. `devices` are rows of one device each; `settled_c` is
    where each temperature is headed under the present load."""

    devices: tuple[tuple[Device, Ints], ...]
    chassis: thermal.Chassis
    temperature_c: Floats
    settled_c: Floats
    power_w: Floats
    limit_w: Floats
    clock_mhz: Floats


@dataclass(frozen=True)
class Load:
    """The job on the rack: `replica` of each GPU (-1: none), microbatches of each replica, and the measured step.

    `assumes` says, as a sentence for the operator, what the pace rests on where the cost model does not know the job.
    """

    pace: Pace
    replica: Ints
    microbatches: Ints
    step_s: float
    tokens: float | None
    memory_gib: float | None = None
    assumes: str = ""


@dataclass(frozen=True)
class Change:
    """What an action alters: limits or highest clocks (inf: not locked) of every GPU, or the job's load (with the pace
    of its new microbatch)."""

    limit_w: Floats | None = None
    lock_mhz: Floats | None = None
    load: Load | None = None


def rack_of(
    cluster: Cluster,
    chassis: thermal.Chassis,
    temperature_c: Floats,
    settled_c: Floats,
    power_w: Floats,
    limit_w: Floats,
    clock_mhz: Floats,
) -> Rack:
    """Pair the cluster's rows, in its order of nodes, with this moment's readings and the chassis as it is known."""
    names = [cluster.device_of(node).name for node in cluster.nodes for _ in range(cluster.type_of(node).gpus)]
    rows = np.asarray(names)
    devices = tuple((d, np.flatnonzero(rows == d.name)) for d in cluster.devices.values())
    return Rack(devices, chassis, temperature_c, settled_c, power_w, limit_w, clock_mhz)


def now(rack: Rack, load: Load | None) -> Outlook:
    """The measured state as an outlook; its peak is where the hottest GPU is headed under the present load."""
    return Outlook(
        step_s=load.step_s if load else None,
        tokens_per_s=load.tokens / load.step_s if load and load.tokens and load.step_s > 0 else None,
        peak_c=_peak(rack.settled_c),
        power_w=_total(rack.power_w),
        memory_gib=load.memory_gib if load else None,
    )


def after(rack: Rack, load: Load | None, change: Change) -> Outlook:
    """Where the rack settles once the change is in force."""
    return settle(rack, load, change)[0]


def settle(rack: Rack, load: Load | None, change: Change) -> tuple[Outlook, Floats]:
    """The outlook after a change, and every GPU's settled temperature in C."""
    limit = rack.limit_w if change.limit_w is None else change.limit_w
    new = load if change.load is None else change.load
    activity_now = activity(rack)
    celsius, clock, watts = rack.settled_c, rack.clock_mhz, rack.power_w
    read = ~np.isnan(rack.power_w)
    was_w = np.where(read, rack.power_w, 0.0)
    step_s = load.step_s if load else None
    held, wait = held_by_heat(rack, activity_now), power.ACTIVITY["wait"]
    freed = held.copy()
    for _ in range(3):  # temperature changes leakage, leakage changes the clock: the last rounds settle it
        clock = _clocks(rack, activity_now, limit, celsius, held, freed)
        if change.lock_mhz is not None:
            clock = np.fmin(clock, change.lock_mhz)
        busy = np.ones_like(activity_now)
        if load and new:
            step_s, busy = step_at(rack, load, new, clock)
        # A rank that has less to do waits more, and waiting draws something, too.
        watts = _powers(rack, wait + (activity_now - wait) * busy, clock, celsius)
        celsius = rack.settled_c + thermal.temperature_change(rack.chassis, was_w, np.where(read, watts, 0.0))
        freed &= ~(celsius >= _operating_c(rack))
    outlook = Outlook(
        step_s=step_s,
        tokens_per_s=new.tokens / step_s if new and new.tokens and step_s else None,
        peak_c=_peak(celsius),
        power_w=_total(watts),
        memory_gib=new.memory_gib if new else None,
        gpu_w=watts,
    )
    return outlook, celsius


def waiting(rack: Rack) -> Outlook:
    """The rack while its job waits at a step boundary: resident, drawing what waiting draws."""
    idle = np.where(np.isnan(rack.power_w), np.nan, power.ACTIVITY["wait"])
    watts = _powers(rack, idle, rack.clock_mhz, rack.settled_c)
    read = ~np.isnan(watts)
    was_w, will_w = np.where(read, rack.power_w, 0.0), np.where(read, watts, 0.0)
    celsius = rack.settled_c + thermal.temperature_change(rack.chassis, was_w, will_w)
    return Outlook(step_s=None, tokens_per_s=0.0, peak_c=_peak(celsius), power_w=_total(watts), gpu_w=watts)


def activity(rack: Rack) -> Floats:
    """The activity that explains each GPU's measured power; NaN where none is read."""
    out = np.full_like(rack.power_w, np.nan)
    for device, rows in rack.devices:
        out[rows] = power.activity_of(device, rack.power_w[rows], rack.clock_mhz[rows], rack.temperature_c[rows])
    out[np.isnan(rack.power_w)] = np.nan
    return out


def with_microbatches(load: Load, microbatches: tuple[int, ...]) -> Load:
    """The same load split differently."""
    return replace(load, microbatches=np.asarray(microbatches, np.int64))


def held_by_heat(rack: Rack, activity: Floats) -> Bools:
    """GPUs that run below what their limit allows and are about as hot as their own protection lets them be: it holds
    their clock, and will let it go once they have cooled."""
    allowed = np.full_like(rack.clock_mhz, np.nan)
    for device, rows in rack.devices:
        allowed[rows] = power.clock_under_limit(device, activity[rows], rack.limit_w[rows], rack.temperature_c[rows])
        allowed[rows] -= 1.5 * device.clock.step
    return (rack.clock_mhz < allowed) & (rack.temperature_c > _operating_c(rack) - HYSTERESIS_K - 1.5)


def _operating_c(rack: Rack) -> Floats:
    out = np.full_like(rack.power_w, np.inf)
    for device, rows in rack.devices:
        out[rows] = device.temperature_c.operating
    return out


def _clocks(rack: Rack, activity: Floats, limit: Floats, celsius: Floats, held: Bools, freed: Bools) -> Floats:
    """Clock under the new limit. Where the limit holds it now, as a change of the measured clock: the model's ratio,
    not its absolute. What something else holds keeps its clock, unless the new limit is lower still; what heat `held`
    and holds no longer (`freed`) goes as high as the limit allows."""
    out = rack.clock_mhz.copy()
    for device, rows in rack.devices:
        was = power.clock_under_limit(device, activity[rows], rack.limit_w[rows], rack.settled_c[rows])
        will = power.clock_under_limit(device, activity[rows], limit[rows], celsius[rows])
        limited = (was < device.clock.max) & ~held[rows]
        moved = np.minimum(rack.clock_mhz[rows] * will / was, device.clock.max)
        kept = np.where(limited, moved, np.minimum(rack.clock_mhz[rows], will))
        out[rows] = np.where(freed[rows], will, kept)
    return out


def _powers(rack: Rack, activity: Floats, clock: Floats, celsius: Floats) -> Floats:
    out = np.full_like(rack.power_w, np.nan)
    for device, rows in rack.devices:
        out[rows] = power.power_w(device, activity[rows], clock[rows], celsius[rows])
    return out


def step_at(rack: Rack, load: Load, new: Load, clock: Floats) -> tuple[float, Floats]:
    """Seconds of the new step, and each GPU's busy share over its busy share now (1 where no replica runs).

    Both steps are paced by clocks as a share of the job's fastest one now: a GPU that is slowed already sets the pace
    before the change, and no longer once its rank has less to do than the others.
    """
    runs = load.replica >= 0
    fastest = np.nanmax(rack.clock_mhz, where=runs, initial=1.0)

    def slowest(clocks: Floats) -> Floats:
        share = np.where(runs, clocks / fastest, np.nan)
        return np.nan_to_num(pace.slowest(share, load.replica, len(load.microbatches)), nan=1.0)

    before = pace.replica_s(load.pace, load.microbatches, slowest(rack.clock_mhz))
    later = pace.replica_s(new.pace, new.microbatches, slowest(clock))
    step_s = load.step_s * float(later.max() / before.max())
    ratio = (later / later.max()) / np.maximum(before / before.max(), 1e-6)
    busy = np.where(load.replica < 0, 1.0, ratio[load.replica])
    return step_s, busy


def _peak(celsius: Floats) -> float | None:
    known = celsius[~np.isnan(celsius)]
    return float(known.max()) if len(known) else None


def _total(watts: Floats) -> float | None:
    known = watts[~np.isnan(watts)]
    return float(known.sum()) if len(known) else None
