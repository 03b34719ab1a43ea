"""The fake NVML library, compiled once, and the file that says what it answers."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.parts.missing import program

MIB = 1 << 20
H100 = {
    "name": "NVIDIA H100 80GB HBM3",
    "temperature": 61,
    "power": 512340,
    "limit": 700000,
    "limit_default": 700000,
    "limit_min": 200000,
    "limit_max": 700000,
    "sm_clock": 1755,
    "memory_clock": 2619,
    "sm_clock_max": 1980,
    "utilization": 97,
    "memory_total": 81559 * MIB,
    "memory_used": 71234 * MIB,
    "throttle": 4,
    "energy": 123456789,
    "slowdown": 89,
    "shutdown": 95,
    "margin": 26,
    "pcie_gen": 5,
    "pcie_width": 16,
    "nvlinks": 2,
    "field82": 66,
    "field90": 26562,
    "field138": 1000000,
    "field139": 2000000,
}


@dataclass
class FakeNvml:
    """`library` is the folder to put on LD_LIBRARY_PATH, `path` the file of readings."""

    library: Path
    path: Path

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(self.library), "RACKSIDE_FAKE_NVML": str(self.path)}

    def write(self, count: int = 2, **readings: object) -> None:
        """`count` H100s; readings such as gpu1_temperature="!15" override."""
        lines = [f"count {count}", *(f"{k} {v}" for k, v in H100.items())]
        lines += [f"{k.replace('_', '.', 1) if k.startswith('gpu') else k} {v}" for k, v in readings.items()]
        fresh = self.path.with_suffix(".new")
        fresh.write_text("\n".join(lines) + "\n")
        fresh.replace(self.path)

    def limits(self, what: str = "limit") -> dict[int, int]:
        """What was set by GPU, the last one counts: limits in mW, or (`lock`) clock locks in MHz, 0 for none."""
        written = Path(f"{self.path}.set")
        found: dict[int, int] = {}
        for line in written.read_text().splitlines() if written.exists() else []:
            key, value = line.split()
            if key.endswith(f".{what}"):
                found[int(key[3:].split(".")[0])] = int(value)
        return found

    def overrule(self, gpu: int, milliwatts: int) -> None:
        """Somebody else sets a limit."""
        with Path(f"{self.path}.set").open("a") as written:
            written.write(f"gpu{gpu}.limit {milliwatts}\n")


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = program("gcc", "cc")
    folder = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).with_name("fake_nvml.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(folder / "libnvidia-ml.so.1"), str(source)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return folder


@pytest.fixture
def nvml(nvml_library: Path, tmp_path: Path) -> FakeNvml:
    """Two H100s that answer well."""
    fake = FakeNvml(nvml_library, tmp_path / "readings")
    fake.write()
    return fake
