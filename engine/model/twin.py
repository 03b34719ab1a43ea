"""A thermal twin beside the sensors: told what power was measured, it says where each temperature is headed."""

from __future__ import annotations

import numpy as np

from engine.model import thermal
from engine.model.thermal import Chassis, Floats, Heat


class Twin:
    """State of the RC network for every GPU, driven by measured power and held against measured temperature."""

    def __init__(self, chassis: Chassis) -> None:
        self._chassis = chassis
        count = len(chassis.inlet_c)
        self._heat = Heat(np.full(count, np.nan), np.full(count, np.nan))
        self.settled_c: Floats = np.full(count, np.nan)

    def advance(self, temperature_c: Floats, power_w: Floats, seconds: float) -> None:
        """Take one sample, `seconds` after the last one. Rows without a reading are forgotten and begin anew.

        A row begins with the measured junction and the sink that its power implies; afterwards the difference between
        sensor and twin is the row's own offset (inlet, paste, dust), which its settled temperature keeps.
        """
        known = ~(np.isnan(temperature_c) | np.isnan(power_w))
        watts = np.where(known, power_w, 0.0)
        begun = ~np.isnan(self._heat.junction_c)
        sink = np.where(begun, self._heat.sink_c, temperature_c - watts * self._chassis.r_die)
        heat = Heat(np.where(begun, self._heat.junction_c, temperature_c), sink)
        heat = thermal.step(self._chassis, heat, watts, seconds)
        self._heat = Heat(np.where(known, heat.junction_c, np.nan), np.where(known, heat.sink_c, np.nan))
        offset = temperature_c - heat.junction_c
        self.settled_c = np.where(known, thermal.steady(self._chassis, watts).junction_c + offset, np.nan)
