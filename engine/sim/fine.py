"""A rack that is finer than the twin which watches it: more thermal nodes, shorter steps, constants that nobody knows.

Each GPU has a die, a lid, a memory stack, a base plate and fins; its neighbours in the tray share a little heat; air
takes its time along the chassis; fans follow the load late. The twin has two nodes and the profile's constants.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from engine.model import limiter, power, thermal
from engine.model.limiter import Boards, Demand
from engine.model.thermal import FLOW_EXPONENT, Chassis
from engine.profile import Cluster, Device

Floats = npt.NDArray[np.float64]

STEP_S = 0.05
CLOCK_S = 0.25
"""How often the boards set their clocks."""
SENSOR_K = 1.0
POWER_NOISE = 0.01
DIE, LID, STACK, BASE, FINS = range(5)
CAPACITY_J_K = np.array([18.0, 60.0, 40.0, 0.45, 0.55])
"""Of die, lid and memory stacks in J/K; of base and fins as shares of the sink's."""
MEMORY_SHARE = 0.15
"""Of the board's power that the memory turns into heat."""
TRAY_K_W = 1.5
"""Resistance between neighbours in the tray, K/W."""
AIR_S = 3.0
"""Seconds that air takes from front to rear, as a lag."""


@dataclass
class FineRack:
    """Several clusters' worth of GPUs at once; `spread` is how far every constant may be from the profile."""

    cluster: Cluster
    chance: np.random.Generator
    spread: float = 0.25
    boards: Boards = field(init=False)
    now_c: Floats = field(init=False)
    air_c: Floats = field(init=False)
    flow: Floats = field(init=False)
    clock_mhz: Floats = field(init=False)
    heat_cap_mhz: Floats = field(init=False)
    power_w: Floats = field(init=False)
    demand: Demand = field(init=False)
    limit_w: Floats = field(init=False)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        ideal = limiter.boards_of(self.cluster)
        n = len(ideal.operating_c)
        self.boards = replace(ideal, chassis=self._unlike(ideal.chassis))
        c = self.boards.chassis
        self._resistance = {
            "die-lid": 0.6 * c.r_die * self._near(n, 0.1),
            "lid-base": 0.4 * c.r_die,
            "stack-base": 0.04 * self._near(n),
            "base-fins": 0.3 * c.r_sink,
            "fins-air": 0.7 * c.r_sink,
        }
        sink = c.c_sink
        self._capacity = np.stack(
            [
                CAPACITY_J_K[DIE] * self._near(n),
                CAPACITY_J_K[LID] * self._near(n),
                CAPACITY_J_K[STACK] * self._near(n),
                CAPACITY_J_K[BASE] * sink,
                CAPACITY_J_K[FINS] * sink,
            ]
        )
        self._core, self._leakage = self._near(n, 0.1), self._near(n)
        self.limit_w = np.concatenate([np.full(len(rows), d.power_limit_w.default) for d, rows in ideal.devices])
        self.demand = Demand(np.zeros(n), np.zeros(n))
        self.clock_mhz, self.heat_cap_mhz = ideal.clock_idle_mhz.copy(), ideal.clock_max_mhz.copy()
        self.flow, self.air_c = c.least_flow.copy(), c.inlet_c.copy()
        self.now_c = np.repeat(c.inlet_c[None] + 5.0, 5, axis=0)
        self.power_w = self._powers()

    def _near(self, n: int, spread: float | None = None) -> Floats:
        width = self.spread if spread is None else spread
        return self.chance.uniform(1 - width, 1 + width, n)

    def _unlike(self, ideal: Chassis) -> Chassis:
        """The profile's chassis with every constant off; air and fans are a node's, not a GPU's."""
        n, nodes = len(ideal.inlet_c), int(ideal.node.max()) + 1
        rise = self.chance.uniform(-1, 1, nodes)[ideal.node] * self.spread * 10.0
        return replace(
            ideal,
            inlet_c=ideal.inlet_c + rise,
            r_die=ideal.r_die * self._near(n),
            r_sink=ideal.r_sink * self._near(n),
            c_sink=ideal.c_sink * self._near(n),
            preheat_k_w=ideal.preheat_k_w * self._near(nodes)[ideal.node],
            least_flow=np.clip(ideal.least_flow * self._near(nodes)[ideal.node], 0.2, 1.0),
            full_w=ideal.full_w * self._near(nodes)[ideal.node],
        )

    @property
    def throttled(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.heat_cap_mhz < self.boards.clock_max_mhz)

    def read(self) -> tuple[Floats, Floats]:
        """What the sensors say: whole degrees with noise of 1 K, watts with 1 %."""
        celsius = np.round(self.now_c[DIE] + SENSOR_K * self.chance.standard_normal(len(self.power_w)))
        return celsius, self.power_w * (1 + POWER_NOISE * self.chance.standard_normal(len(self.power_w)))

    def advance(self, seconds: float) -> None:
        """Move on by `seconds` in small steps."""
        for _ in range(round(seconds / CLOCK_S)):
            self._clock()
            for _ in range(round(CLOCK_S / STEP_S)):
                self._step()
            self.seconds += CLOCK_S

    def _clock(self) -> None:
        celsius, running = self.now_c[DIE], self.demand.busy > 0
        self.heat_cap_mhz = limiter.heat_cap(self.boards, self.heat_cap_mhz, celsius, CLOCK_S)
        allowed = np.empty_like(self.clock_mhz)
        for device, rows in self.boards.devices:
            own = self.demand.activity[rows] * self._core[rows]
            allowed[rows] = power.clock_under_limit(device, own, self.limit_w[rows], celsius[rows])
        clock = np.where(running, np.minimum(allowed, self.heat_cap_mhz), self.boards.clock_idle_mhz)
        self.clock_mhz = clock
        self.power_w = self._powers()

    def _powers(self) -> Floats:
        out = np.empty_like(self.clock_mhz)
        running = self.demand.busy > 0
        burst = 1.0 + 0.08 * np.sin(2 * np.pi * self.seconds / 2.7)  # microbatches come and go within a step
        mean = self.demand.activity * self.demand.busy * burst * self._core + 0.12 * running * (1 - self.demand.busy)
        for device, rows in self.boards.devices:
            out[rows] = self._power(device, mean[rows], rows)
        return out

    def _power(self, device: Device, activity: Floats, rows: npt.NDArray[np.int64]) -> Floats:
        celsius, mhz = self.now_c[DIE][rows], self.clock_mhz[rows]
        plain = power.power_w(device, activity, mhz, celsius)
        return np.asarray(plain + (self._leakage[rows] - 1) * power.leakage_w(device, celsius))

    def _step(self) -> None:
        c, r, t, watts = self.boards.chassis, self._resistance, self.now_c, self.power_w
        self.flow += (thermal.flow_for(c, watts) - self.flow) * STEP_S / 12.0
        self.air_c += (thermal.air_c(c, watts, self.flow) - self.air_c) * STEP_S / AIR_S
        up = (t[DIE] - t[LID]) / r["die-lid"]
        on = (t[LID] - t[BASE]) / r["lid-base"]
        side = (t[STACK] - t[BASE]) / r["stack-base"]
        out = (t[BASE] - t[FINS]) / r["base-fins"]
        away = (t[FINS] - self.air_c) / (r["fins-air"] * self.flow**-FLOW_EXPONENT)
        tray = np.zeros_like(away)
        same = c.node[1:] == c.node[:-1]
        between = np.where(same, (t[BASE][1:] - t[BASE][:-1]) / TRAY_K_W, 0.0)
        tray[1:] -= between
        tray[:-1] += between
        gained = np.stack(
            [watts * (1 - MEMORY_SHARE) - up, up - on, watts * MEMORY_SHARE - side, on + side + tray - out, out - away]
        )
        self.now_c = t + gained * STEP_S / self._capacity
