"""The real probe with the real pynvml on a fake driver: readings, refusals, leases."""

from __future__ import annotations

import ast
import asyncio
import fcntl
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pynvml
import pytest

from engine.telemetry.loader import PROBE
from tests.parts.nvml import FakeNvml
from tests.parts.probe import probe


def test_the_probe_runs_on_old_pythons() -> None:
    """The syntax of the probe and of the pynvml that is sent along is Python 3.6's."""
    for path in (*PROBE, Path(pynvml.__file__)):
        ast.parse(path.read_text(), feature_version=(3, 6))


async def test_a_healthy_node(nvml: FakeNvml) -> None:
    async with probe(nvml) as running:
        hello = await running.record("hello")
        assert hello["driver"] == "580.00.fake"
        first = hello["gpus"][0]
        assert first["name"] == "NVIDIA H100 80GB HBM3"
        assert (first["power_limit_min_w"], first["power_limit_max_w"]) == (200, 700)
        assert (first["slowdown_c"], first["shutdown_c"]) == (89, 95)
        assert first["bus_id"] == "00000000:11:00.0"
        tick = await running.record("tick")
        gpus = tick["gpus"]
        assert gpus["temperature_c"] == [61, 61]
        assert gpus["memory_temperature_c"] == [66, 66]
        assert gpus["power_w"] == [512.34, 512.34]
        assert gpus["power_limit_w"] == [700, 700]
        assert gpus["sm_clock_mhz"] == [1755, 1755]
        assert gpus["memory_used_mib"] == [71234, 71234]
        assert gpus["throttle"] == [4, 4]
        assert gpus["energy_j"] == [123456.79, 123456.79]
        link = {"gpu": 0, "kind": "nvlink", "name": "NVLink 1", "state": "active", "gb_s": 26.562, "to": None}
        assert tick["links"][1] == link
        assert tick["rx_mb_s"][1] is None, "one count is no rate yet"


async def test_rates_come_from_counters_that_grew(nvml: FakeNvml) -> None:
    """Field 138 counts KiB: the rate is its growth over the probe's own time; a counter that fell tells nothing."""
    async with probe(nvml) as running:
        await running.record("tick")
        count, rates = 1_000_000, []
        for _ in range(4):
            count += 1_000_000
            nvml.write(field138=count)
            rates += [(await running.record("tick"))["tx_mb_s"][0]]
        assert max(r for r in rates if r is not None) > 100
        nvml.write(field138=5)
        while (await running.record("tick"))["tx_mb_s"][0] is not None:
            pass


async def test_power_is_read_ten_times_a_second_and_its_peak_is_kept(nvml: FakeNvml) -> None:
    nvml.write(field186=512_340)
    async with probe(nvml, interval_s=1.0) as running:
        await running.record("tick")
        nvml.write(field186=512_340, gpu1_field186=900_000)
        while (tick := await running.record("tick"))["gpus"]["power_max_w"][1] < 900:
            pass
        nvml.write(field186=512_340, gpu1_field186=300_000)
        later = await running.record("tick")
        assert later["gpus"]["power_max_w"][1] >= later["gpus"]["power_w"][1] >= 300
        assert tick["gpus"]["power_w"][0] == 512.34


async def test_held_shares_come_from_the_drivers_time_counters(nvml: FakeNvml) -> None:
    """Fields 74 and 75 count nanoseconds; without them the reasons are sampled."""
    nvml.write(field74=0, field75=0)
    async with probe(nvml) as running:
        await running.record("tick")
        for at in range(1, 40):
            nvml.write(field74=at * 10**12, field75=0)
            gpus = (await running.record("tick"))["gpus"]
            if gpus["held_by_power"][0] == 1.0:
                break
        assert gpus["held_by_power"] == [1.0, 1.0]
        assert gpus["held_by_heat"] == [0.0, 0.0]
    nvml.write(throttle=0x20)
    async with probe(nvml, interval_s=0.3) as running:
        while (gpus := (await running.record("tick"))["gpus"])["held_by_heat"][0] != 1.0:
            pass
        assert gpus["held_by_power"] == [0.0, 0.0]


async def test_health_is_told_at_first_and_when_it_changes(nvml: FakeNvml) -> None:
    nvml.write(field3=7, field4=0, field94=12, field142=1, field143=2, field144=1, field145=0)
    async with probe(nvml) as running:
        gpus = (await running.record("tick"))["gpus"]
        assert (gpus["ecc_corrected"], gpus["ecc_uncorrected"]) == ([7, 7], [0, 0])
        assert (gpus["pcie_replays"], gpus["rows_remapped"], gpus["remap_pending"]) == ([12, 12], [3, 3], [1, 1])
        assert "ecc_corrected" not in (await running.record("tick"))["gpus"]
        nvml.write(field3=8)
        while "ecc_corrected" not in (gpus := (await running.record("tick"))["gpus"]):
            pass
        assert gpus["ecc_corrected"] == [8, 8]


async def test_one_probe_for_a_console_and_the_later_one_stays(nvml: FakeNvml, tmp_path: Path) -> None:
    """A console that comes back replaces its own probe, which may not have noticed that its connection is gone."""
    async with probe(nvml) as first:
        await first.record("tick")
        async with probe(nvml) as second:
            await second.record("tick")
            assert await asyncio.wait_for(first.process.wait(), 10) == 0
            await second.record("tick")


async def test_what_is_not_there_is_never_zero(nvml: FakeNvml) -> None:
    """In MIG mode utilisation is not supported; one broken call takes nothing else with it."""
    nvml.write(gpu0_utilization="!3", gpu0_power="!999", gpu0_energy="!3", gpu1_field82="!3")
    async with probe(nvml) as running:
        gpus = (await running.record("tick"))["gpus"]
        assert gpus["utilization_pct"] == ["unsupported", 97]
        assert gpus["power_w"] == ["error", 512.34]
        assert gpus["energy_j"] == ["unsupported", 123456.79]
        assert gpus["temperature_c"] == [61, 61]
        assert gpus["memory_temperature_c"] == [66, "unsupported"]


async def test_a_lost_gpu_is_named_and_the_others_go_on(nvml: FakeNvml) -> None:
    async with probe(nvml) as running:
        await running.record("tick")
        nvml.write(gpu1_temperature="!15", gpu1_power="!15")
        while not (tick := await running.record("tick"))["lost"]:
            pass
        assert tick["lost"] == ["00000000:21:00.0"]
        assert tick["gpus"]["power_w"] == [512.34, "lost"]
        assert tick["gpus"]["temperature_c"] == [61, "lost"]


async def test_no_driver_is_a_sentence_and_the_node_still_reports(nvml: FakeNvml) -> None:
    async with probe(None) as running:
        hello = await running.record("hello")
        assert "NVML does not start" in hello["trouble"] or "no NVIDIA driver" in hello["trouble"]
        assert not any((await running.record("tick"))["gpus"].values())
    nvml.write(init="!18")
    async with probe(nvml) as running:
        assert "version mismatch" in (await running.record("hello"))["trouble"]


def test_a_lock_that_another_probe_tries_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    """A probe that starts tries every lock there is, and clears away those that nobody holds."""
    module = _host_module()
    path = tmp_path / "probe-x.lock"
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        def clear() -> None:
            path.unlink()
            fcntl.flock(other, fcntl.LOCK_UN)

        timer = threading.Timer(0.2, clear)
        timer.start()
        with module.Host(None)._lock(str(path)) as held:
            assert os.fstat(held.fileno()).st_ino == path.stat().st_ino, "not the one that was cleared away"
        timer.join()
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="the lock is held"):
            module.Host(None)._lock(str(path))


def test_nothing_is_started_beside_a_probe_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a place of its own: at the node's, it would refuse the probes of all other tests as well."""
    module = _host_module()
    host = module.Host(None)
    monkeypatch.setattr(host, "_own_directory", lambda: str(tmp_path))
    path = tmp_path / "probe-hung.lock"
    with path.open("w") as hung:
        fcntl.flock(hung, fcntl.LOCK_EX)
        assert host.claim("x") == "", "one that has shown a sign of life lately is well"
        os.utime(path, (1.0, 1.0))
        said = host.claim("another")
        assert "an earlier probe (probe-hung.lock) hangs in the driver" in said
        assert "none is started beside it" in said
    assert host.claim("another") == ""
    assert not path.exists(), "what is left of a probe that ended is cleared away"


@pytest.mark.parametrize("console", ["x", "another"])
@pytest.mark.parametrize("inside", ["nothing", "a bystander"])
def test_a_lock_held_for_a_moment_stops_no_probe_and_ends_no_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, console: str, inside: str
) -> None:
    """Whoever gives back for a probe that died holds its lock and leaves no name in it; the number in it may have
    become another process's since. Both may be old."""
    module = _host_module()
    host = module.Host(None)
    monkeypatch.setattr(host, "_own_directory", lambda: str(tmp_path))
    bystander = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    path = tmp_path / "probe-x.lock"
    path.write_text("" if inside == "nothing" else f"{bystander.pid}\n")
    os.utime(path, (1.0, 1.0))
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        monkeypatch.setattr(module.time, "sleep", lambda _: fcntl.flock(other, fcntl.LOCK_UN))
        assert host.claim(console) == ""
    bystander.kill()
    assert bystander.wait() == -signal.SIGKILL, "nobody else ended it"


def _host_module() -> Any:
    spec = importlib.util.spec_from_file_location("rackside_host", PROBE[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
