"""The real probe with the real pynvml on a fake driver: readings, refusals, leases."""

from __future__ import annotations

import ast
import asyncio
import fcntl
import importlib.util
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

import pynvml
import pytest

from engine.telemetry.loader import BOOTSTRAP, PROBE, probe_payload
from engine.telemetry.reading import FRAME
from tests.parts.nvml import FakeNvml
from tests.parts.waiting import until


class Running:
    """A probe as a process: `record` waits for the next record that has a key, `send` writes a command."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def record(self, key: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(15):
            while line := await self.process.stdout.readline():
                if line.startswith(FRAME):
                    record: dict[str, Any] = json.loads(line[1:])
                    if key in record:
                        return record
        raise AssertionError(f"the probe ended before a record with '{key}'")

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")


@asynccontextmanager
async def probe(nvml: FakeNvml | None, interval_s: float = 0.1, node: str = "n") -> AsyncIterator[Running]:
    environment = {**os.environ, **(nvml.environment if nvml else {})}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-u",
        "-c",
        BOOTSTRAP,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
        limit=1 << 22,
    )
    assert process.stdin is not None
    process.stdin.write(probe_payload(interval_s, node))
    try:
        yield Running(process)
    finally:
        if process.returncode is None:
            process.stdin.close()
            await asyncio.wait_for(process.wait(), 10)


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


def _locks() -> list[str]:
    return [str(path) for path in Path(f"/tmp/rackside-{os.getuid()}").iterdir()]


def _own_lock(name: str) -> IO[str]:
    place = Path(f"/tmp/rackside-{os.getuid()}")
    place.mkdir(mode=0o700, exist_ok=True)
    return (place / name).open("w")


async def test_nothing_is_started_beside_a_probe_that_hangs(nvml: FakeNvml) -> None:
    lock = _own_lock("probe-hung.lock")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(lock.name, (1, 1))
        async with probe(nvml) as refused:
            assert await asyncio.wait_for(refused.process.wait(), 15) == 1
    async with probe(nvml) as running:
        await running.record("tick")
        assert lock.name not in _locks(), "what is left of a probe that ended is cleared away"


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


async def test_a_limit_is_set_read_back_and_answered_once(nvml: FakeNvml) -> None:
    async with probe(nvml) as running:
        running.send(id="one", do="power_limit", gpus={"0": 500, "1": 450}, lease_s=60)
        result = await running.record("result")
        assert result["state"] == "done"
        assert result["gpus"]["1"] == {"before_w": 700, "asked_w": 450, "now_w": 450}
        assert nvml.limits() == {0: 500000, 1: 450000}
        nvml.overrule(0, 600000)
        running.send(id="one", do="power_limit", gpus={"0": 500, "1": 450}, lease_s=60)
        assert (await running.record("result"))["state"] == "done"
        assert nvml.limits()[0] == 600000, "a repeated id must not act again"


@pytest.mark.parametrize(
    ("readings", "limits", "says"),
    [
        ({}, {"0": 900}, "outside the 200 to 700 W"),
        ({}, {"0": 500, "7": 500}, "there is no such GPU"),
        ({"gpu1_limit_set": "!17"}, {"0": 500, "1": 500}, "the driver refused 500 W"),
        ({"gpu1_limit_set": "ignored"}, {"0": 500, "1": 500}, "the driver took 500 W and kept 700.0 W"),
        ({"gpu0_limit_set": "!4"}, {"0": 500}, "sudoers line"),
        ({}, {"zero": 500}, "malformed"),
        ({}, {"0": "much"}, "malformed"),
    ],
)
async def test_all_or_nothing(nvml: FakeNvml, readings: dict[str, str], limits: dict[str, Any], says: str) -> None:
    nvml.write(**readings)
    async with probe(nvml) as running:
        running.send(id="x", do="power_limit", gpus=limits, lease_s=60)
        result = await running.record("result")
        assert result["state"] == "failed"
        assert says in result["reason"]
    assert set(nvml.limits().values()) <= {700000}


async def test_a_lease_that_is_not_renewed_gives_back_what_was_before(nvml: FakeNvml) -> None:
    nvml.overrule(0, 650000)
    async with probe(nvml) as running:
        running.send(id="a", do="power_limit", gpus={"0": 500}, lease_s=60)
        await running.record("result")
        running.send(id="b", do="power_limit", gpus={"0": 400}, lease_s=0.4)
        await running.record("result")
        released = await running.record("released")
        assert (released["released"], released["value"], released["reason"]) == (0, 650, "the lease ran out")
    assert nvml.limits()[0] == 650000, "the limit before the first command, not the default and not the one between"


async def test_the_end_of_input_gives_back_but_not_what_others_set_since(nvml: FakeNvml) -> None:
    async with probe(nvml) as running:
        running.send(id="a", do="power_limit", gpus={"0": 500, "1": 500}, lease_s=60)
        await running.record("result")
        nvml.overrule(1, 300000)
    assert nvml.limits() == {0: 700000, 1: 300000}


async def test_a_permanent_limit_stays(nvml: FakeNvml) -> None:
    async with probe(nvml) as running:
        running.send(id="a", do="power_limit", gpus={"0": 500}, lease_s=None)
        await running.record("result")
    assert nvml.limits() == {0: 500000}


async def test_restore_gives_back_at_once(nvml: FakeNvml) -> None:
    async with probe(nvml) as running:
        running.send(id="a", do="power_limit", gpus={"0": 500}, lease_s=60)
        await running.record("result")
        running.send(id="b", do="restore", gpus=[0])
        assert (await running.record("result"))["state"] == "done"
        assert nvml.limits()[0] == 700000
        running.send(id="c", do="restore", gpus=[1])
        assert "holds nothing" in (await running.record("result"))["reason"]
        running.send(do="nonsense", id="d")
        assert "cannot do 'nonsense'" in (await running.record("result"))["reason"]


async def test_a_clock_is_locked_seen_to_come_down_and_let_go(nvml: FakeNvml) -> None:
    async with probe(nvml) as running:
        running.send(id="a", do="clock_lock", gpus={"0": 1200}, lease_s=60)
        result = await running.record("result")
        assert result["gpus"]["0"] == {"before_mhz": None, "asked_mhz": 1200, "now_mhz": 1200}
        assert nvml.limits("lock") == {0: 1200}
        running.send(id="b", do="restore", what="clock", gpus=[0])
        assert (await running.record("result"))["state"] == "done"
        assert nvml.limits("lock") == {0: 0}
        running.send(id="c", do="clock_lock", gpus={"1": 1300}, lease_s=0.3)
        await running.record("result")
        assert (await running.record("released"))["what"] == "clock"
    assert nvml.limits("lock") == {0: 0, 1: 0}


@pytest.mark.parametrize(
    ("readings", "mhz", "says"),
    [
        ({}, 2500, "2500 MHz is outside the 1 to 1980 MHz"),
        ({"gpu0_clock_set": "!3"}, 1200, "cannot lock its clock"),
        ({"gpu0_clock_set": "!4"}, 1200, "nvidia-smi -i * -lgc *"),
        ({"gpu0_clock_set": "ignored"}, 1200, "took a lock at 1200 MHz and the clock still is 1755 MHz"),
    ],
)
async def test_a_clock_that_is_not_locked_is_told(
    nvml: FakeNvml, readings: dict[str, str], mhz: int, says: str
) -> None:
    nvml.write(**readings)
    async with probe(nvml) as running:
        running.send(id="x", do="clock_lock", gpus={"0": mhz}, lease_s=60)
        result = await running.record("result")
        assert result["state"] == "failed"
        assert says in result["reason"]


@pytest.mark.parametrize("heir", [True, False])
async def test_a_probe_that_is_killed_gives_back_all_the_same(nvml: FakeNvml, heir: bool) -> None:
    """SIGKILL cannot be caught: its heir puts the limit back, or, when that died too, the next probe does."""
    nvml.overrule(0, 650000)
    async with probe(nvml) as running:
        running.send(id="a", do="power_limit", gpus={"0": 500}, lease_s=600)
        running.send(id="b", do="clock_lock", gpus={"1": 1200}, lease_s=600)
        await running.record("result")
        await running.record("result")
        children = _children(running.process.pid)
        assert len(children) == 1
        if not heir:
            os.kill(int(children[0]), signal.SIGKILL)
        running.process.kill()
        await running.process.wait()
        if not heir:
            assert nvml.limits()[0] == 500000
            async with probe(nvml, node="another") as later:
                await later.record("tick")
        await until(lambda: (nvml.limits()[0], nvml.limits("lock")[1]) == (650000, 0))


async def test_what_a_killed_probe_had_set_is_not_what_was_before(nvml: FakeNvml) -> None:
    """Two consoles, one of which is killed with all that would give back for it: the other sets the same GPU, and what
    comes back at its end is what was there before both. A lock that it sets stays, too, whoever gives back late."""
    async with probe(nvml, node="first") as first, probe(nvml, node="second") as second:
        for do, value in (("power_limit", 600), ("clock_lock", 1200)):
            first.send(id=do, do=do, gpus={"0": value}, lease_s=600)
            assert (await first.record("result"))["state"] == "done"
        (heir,) = _children(first.process.pid)
        os.kill(int(heir), signal.SIGSTOP)  # late
        first.process.kill()
        await first.process.wait()
        for do, value in (("power_limit", 600), ("clock_lock", 1300)):
            second.send(id=do, do=do, gpus={"0": value}, lease_s=600)
            assert (await second.record("result"))["state"] == "done"
        os.kill(int(heir), signal.SIGCONT)
        await until(lambda: not Path(f"/proc/{heir}").exists() or _state(int(heir)) == "Z")
        assert (nvml.limits()[0], nvml.limits("lock")[0]) == (600000, 1300), "the late heir takes nothing from others"
    await until(lambda: (nvml.limits()[0], nvml.limits("lock")[0]) == (700000, 0))


async def test_a_console_that_comes_back_gives_back_what_its_killed_probe_held(nvml: FakeNvml) -> None:
    async with probe(nvml, node="same") as running:
        running.send(id="a", do="power_limit", gpus={"0": 500}, lease_s=600)
        await running.record("result")
        (heir,) = _children(running.process.pid)
        os.kill(int(heir), signal.SIGKILL)
        running.process.kill()
        await running.process.wait()
        async with probe(nvml, node="same") as later:
            await later.record("tick")
            assert nvml.limits()[0] == 700000
            later.send(id="b", do="power_limit", gpus={"0": 600}, lease_s=600)
            assert (await later.record("result"))["state"] == "done"
            later.send(id="c", do="power_limit", gpus={"1": 600}, lease_s=600)
            assert (await later.record("result"))["state"] == "done"
            assert (nvml.limits()[0], nvml.limits()[1]) == (600000, 600000), "its own note is no dead one's"
    await until(lambda: (nvml.limits()[0], nvml.limits()[1]) == (700000, 700000))


async def test_what_another_console_holds_is_left_to_it(nvml: FakeNvml) -> None:
    async with probe(nvml, node="first") as first, probe(nvml, node="second") as second:
        first.send(id="a", do="power_limit", gpus={"0": 500}, lease_s=60, operator="ann@desk")
        await first.record("result")
        second.send(id="b", do="power_limit", gpus={"0": 400, "1": 400}, lease_s=60, operator="guard@head")
        refused = await second.record("result")
        assert (refused["state"], refused["reason"]) == (
            "failed",
            "GPU 0 is held by ann@desk; it is to be undone there first",
        )
        first.send(id="c", do="restore", gpus=[0])
        await first.record("result")
        second.send(id="d", do="power_limit", gpus={"0": 400}, lease_s=60)
        assert (await second.record("result"))["state"] == "done"


async def test_a_stopped_process_goes_on_when_the_lease_ends(nvml: FakeNvml) -> None:
    """Only processes on this node's GPUs; whoever stopped them may die."""
    trainer = await asyncio.create_subprocess_exec(sys.executable, "-c", "import sys; sys.stdin.read()", stdin=-1)
    try:
        nvml.write(pid=trainer.pid, pid_memory=1 << 30)
        async with probe(nvml) as running:
            await running.record("processes")
            running.send(id="a", do="stop", pids=[trainer.pid], lease_s=60)
            assert (await running.record("result"))["state"] == "done"
            assert _state(trainer.pid) == "T"
            running.send(id="b", do="stop", pids=[os.getpid()], lease_s=60)
            assert "is not on a GPU of this node" in (await running.record("result"))["reason"]
            running.send(id="c", do="stop", pids=[trainer.pid])
            assert "for a time only" in (await running.record("result"))["reason"]
            running.process.kill()
            await running.process.wait()
        await until(lambda: _state(trainer.pid) == "S")
    finally:
        trainer.kill()
        await trainer.wait()


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_lock_that_another_probe_tries_for_a_moment_is_waited_for(tmp_path: Path) -> None:
    """A probe that starts tries every lock there is, and clears away those that nobody holds."""
    spec = importlib.util.spec_from_file_location("rackside_host", PROBE[0])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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


async def test_each_undo_is_one_step_back(nvml: FakeNvml) -> None:
    async with probe(nvml) as running:
        for number, watts in enumerate((650, 600, 500)):
            running.send(id=f"s{number}", do="power_limit", gpus={"0": watts}, lease_s=60)
            await running.record("result")
        for number, expected in enumerate((600, 650, 700)):
            running.send(id=f"u{number}", do="restore", gpus=[0])
            assert (await running.record("result"))["state"] == "done"
            assert nvml.limits()[0] == 1000 * expected
        running.send(id="none", do="restore", gpus=[0])
        assert "holds nothing" in (await running.record("result"))["reason"]


async def test_what_is_leased_is_not_made_permanent_over_it(nvml: FakeNvml) -> None:
    """It would lose what was before the lease."""
    async with probe(nvml) as running:
        running.send(id="a", do="power_limit", gpus={"0": 500}, lease_s=60)
        await running.record("result")
        running.send(id="b", do="power_limit", gpus={"0": 600})
        assert "undo that before it is made permanent" in (await running.record("result"))["reason"]
    assert nvml.limits() == {0: 700000}


async def test_a_probe_killed_while_it_sets_gives_back_what_it_had_set(nvml: FakeNvml) -> None:
    nvml.write(gpu1_clock_set="ignored")  # it is looked at for a second
    async with probe(nvml) as running:
        await running.record("tick")
        running.send(id="a", do="clock_lock", gpus={"0": 1200, "1": 1200}, lease_s=600)
        await until(lambda: nvml.limits("lock") == {0: 1200})
        running.process.kill()
        await running.process.wait()
        await until(lambda: nvml.limits("lock")[0] == 0)


async def test_a_board_is_known_by_its_uuid_whatever_its_index(nvml_library: Path, tmp_path: Path) -> None:
    """Programs of one node may see different GPUs, as containers do: index 0 of one is not index 0 of the other."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = FakeNvml(nvml_library, tmp_path / "a/r"), FakeNvml(nvml_library, tmp_path / "b/r")
    one.write()
    other.write()
    async with probe(one, node="one") as first, probe(other, node="other") as second:
        for running in (first, second):
            running.send(id="a", do="power_limit", gpus={"0": 500}, lease_s=600)
            assert (await running.record("result"))["state"] == "done"
        os.kill(int(_children(first.process.pid)[0]), signal.SIGKILL)
        first.process.kill()
        await first.process.wait()
    async with probe(other, node="third") as third:
        await third.record("tick")
        assert one.limits() == {0: 500000}, "not this one's to give back"
    async with probe(one, node="fourth") as fourth:
        await fourth.record("tick")
    assert (one.limits(), other.limits()) == ({0: 700000}, {0: 700000})
