"""The simulated rack: power, clocks and temperatures of every GPU, advanced by the thermal and power model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from engine.model import power, thermal
from engine.profile import Cluster, Device

Floats = npt.NDArray[np.float64]

SPREAD = 0.06
"""Standard deviation of the heatsinks' resistance from board to board, a share of the profile's value."""
DUSTY = 1.8
"""Resistance of the one clogged heatsink that every simulated rack has, a share of the profile's value."""
THERMAL_HYSTERESIS_K = 3.0
THERMAL_STEPS_PER_S = 4
"""How fast the board lowers or raises its clock, in clock steps a second, when temperature limits it."""


@dataclass(frozen=True)
class Demand:
    """What the job asks of each GPU: activity while it runs, share of the time it runs, bytes/s on each link class."""

    activity: Floats
    busy: Floats
    nvlink_b_s: Floats
    network_b_s: Floats

    @staticmethod
    def idle(gpus: int) -> Demand:
        zero = np.zeros(gpus)
        return Demand(zero, zero, zero, zero)


@dataclass
class Rack:
    """State of all GPUs, one row each in the cluster's order of nodes. `advance` is the only thing that moves it."""

    cluster: Cluster
    seed: int = 1
    devices: tuple[Device, ...] = field(init=False)
    chassis: thermal.Chassis = field(init=False)
    heat: thermal.Heat = field(init=False)
    limit_w: Floats = field(init=False)
    clock_mhz: Floats = field(init=False)
    power_w: Floats = field(init=False)
    energy_j: Floats = field(init=False)
    nvlink_b: Floats = field(init=False)
    network_b: Floats = field(init=False)
    capped: npt.NDArray[np.bool_] = field(init=False)
    demand: Demand = field(init=False)

    def __post_init__(self) -> None:
        nodes = self.cluster.nodes
        self.devices = tuple(self.cluster.device_of(n) for n in nodes for _ in range(self.cluster.type_of(n).gpus))
        count = len(self.devices)
        chance = np.random.default_rng(self.seed)
        factor = np.clip(1 + SPREAD * chance.standard_normal(count), 0.85, 1.15)
        factor[count - 3] = DUSTY  # a rear slot of the top node
        ideal = thermal.chassis_of(self.cluster)
        self.chassis = replace(ideal, r_sink=ideal.r_sink * factor)
        self.limit_w = np.array([d.power_limit_w.default for d in self.devices])
        self.clock_mhz = np.array([d.clock.idle for d in self.devices], float)
        self._thermal_cap = np.array([d.clock.max for d in self.devices], float)
        self._of = {d.name: np.array([x.name == d.name for x in self.devices]) for d in self.devices}
        self.demand = Demand.idle(count)
        self.power_w = self._powers(np.full(count, 30.0))
        self.heat = thermal.steady(self.chassis, self.power_w)
        self.energy_j = np.zeros(count)
        self.nvlink_b = np.zeros(count)
        self.network_b = np.zeros(count)
        self.capped = np.zeros(count, bool)

    @property
    def temperature_c(self) -> Floats:
        return self.heat.junction_c

    @property
    def thermally_slowed(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self._thermal_cap < np.array([d.clock.max for d in self.devices]))

    def advance(self, seconds: float) -> None:
        """Move the rack on by `seconds`: clocks first, then power, heat and counters."""
        celsius, demand = self.heat.junction_c, self.demand
        self._limit_by_heat(celsius, seconds)
        for device in {d.name: d for d in self.devices}.values():
            rows = self._of[device.name]
            allowed = power.clock_under_limit(device, demand.activity[rows], self.limit_w[rows], celsius[rows])
            self.capped[rows] = (allowed < self._thermal_cap[rows]) & (demand.busy[rows] > 0)
            clock = np.minimum(allowed, self._thermal_cap[rows])
            self.clock_mhz[rows] = np.where(demand.busy[rows] > 0, clock, device.clock.idle)
        self.power_w = self._powers(celsius)
        self.heat = thermal.step(self.chassis, self.heat, self.power_w, seconds)
        self.energy_j += self.power_w * seconds
        self.nvlink_b += demand.nvlink_b_s * seconds
        self.network_b += demand.network_b_s * seconds

    def _limit_by_heat(self, celsius: Floats, seconds: float) -> None:
        """The board's own protection: step the clock down at its operating limit, halve it at its slowdown point."""
        for device in {d.name: d for d in self.devices}.values():
            rows = self._of[device.name]
            cap, hot = self._thermal_cap[rows], celsius[rows]
            step = device.clock.step * THERMAL_STEPS_PER_S * seconds
            cap = np.where(hot > device.temperature_c.operating, cap - step, cap)
            cap = np.where(hot < device.temperature_c.operating - THERMAL_HYSTERESIS_K, cap + step, cap)
            cap = np.where(hot >= device.temperature_c.slowdown, np.minimum(cap, device.clock.max / 2), cap)
            self._thermal_cap[rows] = np.clip(cap, device.clock.idle, device.clock.max)

    def _powers(self, celsius: Floats) -> Floats:
        out = np.zeros(len(self.devices))
        mean = self.demand.activity * self.demand.busy + power.ACTIVITY["wait"] * (
            (self.demand.busy > 0) * (1 - self.demand.busy)
        )
        for device in {d.name: d for d in self.devices}.values():
            rows = self._of[device.name]
            out[rows] = power.power_w(device, mean[rows], self.clock_mhz[rows], celsius[rows])
        return out
