"""NVML of a simulated node: the functions that the probe calls, answered from the simulated rack."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from engine.profile import Device
from engine.sim.rack import Rack

UNSUPPORTED, INVALID, NO_SUCH_LINK = 3, 2, 2
SW_POWER_CAP, HW_SLOWDOWN, SW_THERMAL, IDLE = 0x4, 0x8, 0x20, 0x1
MEMORY_TEMP, NVLINK_SPEED, NVLINK_TX, NVLINK_RX, PCIE_TX, PCIE_RX = 82, 90, 138, 139, 197, 198
MIB = 1 << 20


class NVMLError(Exception):
    """As pynvml's: carries NVML's number."""

    def __init__(self, value: int) -> None:
        super().__init__(f"simulated NVML error {value}")
        self.value = value


def _whole(value: float) -> int:
    """NVML gives whole numbers; numpy's own floats would not pass for ints."""
    return round(float(value))


def bus_number(slot: int) -> int:
    """The PCI bus of a slot's GPU."""
    return 0x11 + 0x10 * slot


@dataclass
class SimNvml:
    """One node's GPUs: rows `first` to `first + count` of the rack. Handles are row numbers."""

    rack: Rack
    first: int
    count: int
    memory_used_gib: float

    NVMLError = NVMLError

    def _device(self, handle: int) -> Device:
        return self.rack.devices[handle]

    def nvmlInit(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> str:
        return "simulated"

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise NVMLError(INVALID)
        return self.first + index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self._device(handle).product

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-5171a7ed-0000-0000-0000-{handle:012x}"

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{bus_number(handle - self.first):02X}:00.0")

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        total = int(self._device(handle).memory_gib * 1024) * MIB
        busy = self.rack.demand.busy[handle] > 0
        return SimpleNamespace(total=total, used=int((self.memory_used_gib if busy else 0.6) * 1024) * MIB)

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: int) -> tuple[int, int]:
        limit = self._device(handle).power_limit_w
        return int(limit.min * 1000), int(limit.max * 1000)

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: int) -> int:
        return int(self._device(handle).power_limit_w.default * 1000)

    def nvmlDeviceGetPowerManagementLimit(self, handle: int) -> int:
        return _whole(self.rack.limit_w[handle] * 1000)

    def nvmlDeviceSetPowerManagementLimit(self, handle: int, milliwatts: int) -> None:
        low, high = self.nvmlDeviceGetPowerManagementLimitConstraints(handle)
        if not low <= milliwatts <= high:
            raise NVMLError(INVALID)
        self.rack.limit_w[handle] = milliwatts / 1000

    def nvmlDeviceSetGpuLockedClocks(self, handle: int, low_mhz: int, high_mhz: int) -> None:
        if not low_mhz <= high_mhz:
            raise NVMLError(INVALID)
        self.rack.lock_mhz[handle] = high_mhz

    def nvmlDeviceResetGpuLockedClocks(self, handle: int) -> None:
        self.rack.lock_mhz[handle] = float("inf")

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return self._device(handle).pcie.gen

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        return self._device(handle).pcie.width

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        return int(self._device(handle).clock.max)

    def nvmlDeviceGetTemperatureThreshold(self, handle: int, kind: int) -> int:
        points = self._device(handle).temperature_c
        return int((points.shutdown, points.slowdown)[kind])

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:
        return _whole(self.rack.temperature_c[handle])

    def nvmlDeviceGetMarginTemperature(self, handle: int) -> int:
        return _whole(self._device(handle).temperature_c.operating - self.rack.temperature_c[handle])

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return _whole(self.rack.power_w[handle] * 1000)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        return _whole(self.rack.energy_j[handle] * 1000)

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        if kind == 1:
            return int(self.rack.clock_mhz[handle])
        raise NVMLError(UNSUPPORTED)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=_whole(100 * min(1.0, self.rack.demand.busy[handle])), memory=0)

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        if self.rack.demand.busy[handle] <= 0:
            return IDLE
        hot = SW_THERMAL if self.rack.thermally_slowed[handle] else 0
        slowdown = self._device(handle).temperature_c.slowdown
        hard = HW_SLOWDOWN if self.rack.temperature_c[handle] >= slowdown else 0
        return int((SW_POWER_CAP if self.rack.capped[handle] else 0) | hot | hard)

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= self._device(handle).fabric.links:
            raise NVMLError(NO_SUCH_LINK)
        return 1

    def nvmlDeviceGetFieldValues(self, handle: int, wanted: list[Any]) -> list[Any]:
        return [self._field(handle, w[0] if isinstance(w, tuple) else w) for w in wanted]

    def _field(self, handle: int, field: int) -> Any:
        device = self._device(handle)
        share = self.rack.nvlink_b[handle] / device.fabric.links
        values = {
            MEMORY_TEMP: _whole(self.rack.temperature_c[handle] + 4),
            NVLINK_SPEED: round(device.fabric.gb_s_per_link * 1000),
            NVLINK_TX: int(share / 1024),
            NVLINK_RX: int(share / 1024),
            PCIE_TX: int(self.rack.network_b[handle]),
            PCIE_RX: int(self.rack.network_b[handle]),
        }
        if field not in values:
            return SimpleNamespace(nvmlReturn=UNSUPPORTED, valueType=3, value=None)
        return SimpleNamespace(nvmlReturn=0, valueType=3, value=SimpleNamespace(ullVal=values[field]))

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: int) -> list[Any]:
        if self.rack.demand.busy[handle] <= 0:
            return []
        return [SimpleNamespace(pid=4000 + handle - self.first, usedGpuMemory=int(self.memory_used_gib * 1024) * MIB)]
