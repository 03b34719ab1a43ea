"""The simulated rack: power, clocks and temperatures of every GPU, advanced by the thermal and power model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from engine.model import limiter, thermal
from engine.profile import Cluster, Device

Floats = npt.NDArray[np.float64]

SPREAD = 0.06
"""Standard deviation of the heatsinks' resistance from board to board, a share of the profile's value."""
DUSTY = 1.8
"""Resistance of the one clogged heatsink that every simulated rack has, a share of the profile's value."""


@dataclass(frozen=True)
class Demand(limiter.Demand):
    """What the job asks of each GPU, with its bytes/s on each link class."""

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
    boards: limiter.Boards = field(init=False)
    state: limiter.State = field(init=False)
    limit_w: Floats = field(init=False)
    lock_mhz: Floats = field(init=False)
    energy_j: Floats = field(init=False)
    nvlink_b: Floats = field(init=False)
    network_b: Floats = field(init=False)
    demand: Demand = field(init=False)

    def __post_init__(self) -> None:
        nodes = self.cluster.nodes
        self.devices = tuple(self.cluster.device_of(n) for n in nodes for _ in range(self.cluster.type_of(n).gpus))
        count = len(self.devices)
        chance = np.random.default_rng(self.seed)
        factor = np.clip(1 + SPREAD * chance.standard_normal(count), 0.85, 1.15)
        factor[count - 3] = DUSTY  # a rear slot of the top node
        ideal = thermal.chassis_of(self.cluster)
        self.boards = limiter.boards_of(self.cluster, replace(ideal, r_sink=ideal.r_sink * factor))
        self.state = limiter.resting(self.boards)
        self.limit_w = np.array([d.power_limit_w.default for d in self.devices])
        self.lock_mhz = np.full(count, np.inf)
        self.demand = Demand.idle(count)
        self.energy_j = np.zeros(count)
        self.nvlink_b = np.zeros(count)
        self.network_b = np.zeros(count)

    @property
    def temperature_c(self) -> Floats:
        return self.state.heat.junction_c

    @property
    def clock_mhz(self) -> Floats:
        return self.state.clock_mhz

    @property
    def power_w(self) -> Floats:
        return self.state.power_w

    @property
    def capped(self) -> npt.NDArray[np.bool_]:
        return self.state.capped

    @property
    def thermally_slowed(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.state.heat_cap_mhz < self.boards.clock_max_mhz)

    def advance(self, seconds: float) -> None:
        """Move the rack on by `seconds`: clocks first, then power, heat and counters."""
        self.state = limiter.advance(self.boards, self.state, self.demand, self.limit_w, seconds, self.lock_mhz)
        self.energy_j += self.state.power_w * seconds
        self.nvlink_b += self.demand.nvlink_b_s * seconds
        self.network_b += self.demand.network_b_s * seconds
