"""`rackside guard` as a process: a node behind OpenSSH, the real probe on a driver stand-in, a training job."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.parts.console import console
from tests.parts.jobs import saved, training
from tests.parts.nvml import FakeNvml
from tests.parts.waiting import until

POLICY = """
name: quick
dwell_s: 0.5
every_s: 2
restore_after_s: 1.5
rules:
  - name: hot
    when: {temperature_above_c: 85}
    do: [MEASURES]
    automatic: true
"""
LIGHT = {"steps": 100000, "step_s": 0.02}


@pytest.fixture(autouse=True)
def own_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "rackside" / "audit.jsonl"


class Guard:
    """The process and the notes that it printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.notes: list[dict[str, Any]] = []

    def said(self, what: str) -> list[str]:
        return [n["text"] for n in self.notes if n["what"] == what]

    async def says(self, what: str, timeout_s: float = 30) -> str:
        await until(lambda: self.said(what), timeout_s, f"the guard says {what}")
        return self.said(what)[0]

    async def listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.notes.append(json.loads(line))


@asynccontextmanager
async def guard(inventory: Path, measures: str, *words: str, **environment: str) -> AsyncIterator[Guard]:
    policy = inventory.with_name("quick.yaml")
    policy.write_text(POLICY.replace("MEASURES", measures))
    where = ("guard", "--cluster", str(inventory), "--policy", str(policy), "--json", *words)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tui.cli", *where, stdout=-1, env={**os.environ, **environment}
    )
    found = Guard(process)
    listening = asyncio.create_task(found.listen())
    try:
        yield found
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(asyncio.gather(process.wait(), listening), 30)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        listening.cancel()


def log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_heat_is_answered_logged_and_taken_back_when_it_is_gone(
    inventory: Path, nvml: FakeNvml, own_log: Path
) -> None:
    nvml.write(8, gpu3_temperature=88)
    async with guard(inventory, "{power_limit_share: 0.8}") as g:
        assert "acts by itself on hot" in await g.says("begins")
        await until(lambda: nvml.limits() == {3: 560000}, 30)
        assert "at 88 C" in await g.says("done")
        done = next(e for e in log(own_log) if e["stage"] == "done")
        assert done["operator"] == f"guard@{socket.gethostname()}"
        assert done["title"].endswith("(guard rule hot)")
        assert done["predicted"]["after"]["power_w"] is not None
        nvml.write(8, gpu3_temperature=50)
        await g.says("restored")
        await until(lambda: nvml.limits() == {3: 700000})
        assert {e["stage"] for e in log(own_log) if e["id"] == done["id"]} == {"pending", "done", "undone"}


async def test_a_spike_does_nothing_and_what_is_too_hot_still_stays(inventory: Path, nvml: FakeNvml) -> None:
    """Not cool by `hysteresis_k` (5 K): it stays, and is made harder after `every_s` if it is still too hot."""
    nvml.write(8, gpu3_temperature=88)
    async with guard(inventory, "{power_limit_share: 0.8}") as g:
        await until(lambda: nvml.limits() == {3: 560000}, 30)
        await until(lambda: nvml.limits() == {3: 448000}, 30, "0.8 of 0.8 of 700 W")
        nvml.write(8, gpu3_temperature=82)
        await until(lambda: len(g.said("done")) == 2)
        seen = len(g.notes)
        await asyncio.sleep(4)  # longer than every_s and restore_after_s: nothing is to happen
        assert [n["what"] for n in g.notes[seen:] if n["what"] not in ("alarm", "cleared")] == []
        assert nvml.limits() == {3: 448000}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_stopping_it_gives_the_limits_back(inventory: Path, nvml: FakeNvml, number: signal.Signals) -> None:
    nvml.write(8, gpu3_temperature=88)
    async with guard(inventory, "{power_limit_share: 0.8}") as g:
        await until(lambda: nvml.limits() == {3: 560000}, 30)
        g.process.send_signal(number)
        await g.process.wait()
        await until(lambda: nvml.limits() == {3: 700000})
        assert g.process.returncode == 0
    assert g.said("restored") == ["1 GPUs have their own limits and clocks back."]


async def test_killing_it_gives_the_limits_back_within_the_lease(inventory: Path, nvml: FakeNvml) -> None:
    nvml.write(8, gpu3_temperature=88)
    async with guard(inventory, "{power_limit_share: 0.8}") as g:
        await until(lambda: nvml.limits() == {3: 560000}, 30)
        g.process.kill()
        await until(lambda: nvml.limits() == {3: 700000}, 15)


async def test_a_job_is_changed_and_what_stays_is_said(inventory: Path, hooks: Path, nvml: FakeNvml) -> None:
    """Rank 0's GPU is hot: its work is moved away; the job keeps that when the guard goes."""
    nvml.write(8, gpu0_temperature=88, gpu1_temperature=50)
    async with training("train_light", hooks, **LIGHT), guard(inventory, "{rebalance: 1}") as g:
        assert "rank" in await g.says("done", 60)
        g.process.send_signal(signal.SIGTERM)
        await g.process.wait()
    (left,) = g.said("left")
    assert "stays in force" in left


async def test_a_pause_ends_by_itself_and_loses_no_step(inventory: Path, hooks: Path, nvml: FakeNvml) -> None:
    nvml.write(8, gpu0_temperature=88)
    out = hooks.with_name("out")
    options = {"steps": 600, "step_s": 0.02, "save": str(out)}
    async with training("train_light", hooks, **options) as job, guard(inventory, "{pause_s: 2}") as g:
        await g.says("done", 60)
        nvml.write(8, gpu0_temperature=50)
        await job.finished()
        assert g.said("restored") == [], "there is nothing to take back"
    assert len(saved(out, 0)["log"]) == 600


async def test_a_job_that_somebody_holds_is_left_alone(inventory: Path, hooks: Path, nvml: FakeNvml) -> None:
    async with training("train_light", hooks, **LIGHT), console(inventory) as c:
        await c.live()
        await c.does(c.control.propose_microbatch(await c.job(lambda j: j.step_s and j.ranks), 2))
        nvml.write(8, gpu0_temperature=88)
        async with guard(inventory, "{power_limit_share: 0.8}, {microbatch: halve}") as g:
            assert "ops@test holds job" in await g.says("refused", 60)
            assert nvml.limits() == {}


async def test_looking_only_says_what_it_would_do(inventory: Path, nvml: FakeNvml, own_log: Path) -> None:
    nvml.write(8, gpu3_temperature=88)
    async with guard(inventory, "{power_limit_share: 0.8}, {drain: true}", "--dry-run") as g:
        await until(lambda: len(g.said("advice")) >= 2, 30)
        first, second = g.said("advice")[:2]
        assert first.endswith("power limit to 80% of the default")
        assert second.endswith("drain the node: this is for a person to do")
        told = next(n for n in g.notes if n["what"] == "advice")
        assert told["predicted"]["after"]["peak_c"] is not None
    assert nvml.limits() == {}
    assert list(own_log.parent.glob("audit*")) == []


async def test_one_guard_a_cluster(inventory: Path) -> None:
    async with guard(inventory, "{drain: true}") as first:
        await first.says("begins")
        second = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tui.cli", "guard", "--cluster", str(inventory), stderr=-1
        )
        _, err = await second.communicate()
        assert second.returncode == 2
        assert f"runs here already (process {first.process.pid})" in err.decode()


async def test_systemd_hears_that_it_is_ready_alive_and_stopping(inventory: Path, tmp_path: Path) -> None:
    heard: list[bytes] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "notify"))
        server.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(server, lambda: heard.append(server.recv(4096)))
        async with guard(inventory, "{drain: true}", NOTIFY_SOCKET=str(tmp_path / "notify")):
            await until(lambda: heard.count(b"READY=1\nWATCHDOG=1") >= 3)
        await until(lambda: heard[-1] == b"STOPPING=1")
        loop.remove_reader(server)
