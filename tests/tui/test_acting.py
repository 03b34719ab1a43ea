"""`rackside act` and `undo` as processes, on a node behind OpenSSH with the real probe and a training job."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.control.target import cells_of
from engine.profile import ProfileError, catalog
from tests.parts.jobs import training
from tests.parts.nvml import FakeNvml
from tests.parts.waiting import until
from tui.cli import main

LIGHT = {"steps": 100000, "step_s": 0.02}


@pytest.fixture(autouse=True)
def own_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "rackside" / "audit.jsonl"


async def rackside(*words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tui.cli", *words, stdin=asyncio.subprocess.DEVNULL, stdout=-1, stderr=-1
    )


async def said(process: asyncio.subprocess.Process) -> tuple[int, Any, str]:
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, json.loads(out) if out.startswith(b"{") else out.decode(), err.decode()


async def test_a_throttle_holds_until_the_command_is_killed(inventory: Path, nvml: FakeNvml) -> None:
    """SIGKILL of the command that holds it: the node gives the limit back by itself."""
    process = await rackside("act", "--cluster", str(inventory), "throttle", "n1:0-1", "500", "--yes", "--json")
    await until(lambda: nvml.limits() == {0: 500000, 1: 500000}, 30)
    assert process.returncode is None, "it stays to renew the lease"
    os.kill(process.pid, signal.SIGKILL)
    await process.wait()
    await until(lambda: nvml.limits() == {0: 700000, 1: 700000}, 15)


async def test_a_permanent_limit_is_undone_from_the_log(inventory: Path, nvml: FakeNvml) -> None:
    where = ("--cluster", str(inventory))
    code, told, _ = await said(
        await rackside("act", *where, "throttle", "n1", "-100", "--permanent", "--yes", "--json")
    )
    assert (code, told["stage"]) == (0, "done")
    assert nvml.limits() == dict.fromkeys(range(8), 600000)
    code, told, _ = await said(await rackside("undo", told["id"][:8], *where, "--yes", "--json"))
    assert (code, told["stage"]) == (0, "done")
    assert nvml.limits() == dict.fromkeys(range(8), 700000)
    code, _, err = await said(await rackside("undo", *where, "--yes"))
    assert (code, "no action on" in err) == (2, True)


async def test_a_job_is_changed_paused_resumed_and_changed_back(inventory: Path, hooks: Path) -> None:
    where = ("--cluster", str(inventory), "--yes", "--json")
    async with training("train_light", hooks, **LIGHT):
        code, halved, _ = await said(await rackside("act", "microbatch", "job", "halve", *where))
        assert (code, halved["stage"], halved["asked"]["microbatch"]) == (0, "done", 2)
        code, back, _ = await said(await rackside("undo", *where))
        assert (code, back["asked"]["microbatch"]) == (0, 4)
        code, paused, _ = await said(await rackside("act", "pause", "-", "120", *where))
        assert (code, paused["stage"]) == (0, "done")
        code, resumed, _ = await said(await rackside("act", "resume", "job", *where))
        assert (code, resumed["stage"]) == (0, "done")


async def test_a_jobs_gpus_are_a_target(inventory: Path, hooks: Path, nvml: FakeNvml) -> None:
    where = ("--cluster", str(inventory), "--yes", "--json", "--permanent")
    async with training("train_light", hooks, **LIGHT):
        code, told, err = await said(await rackside("act", "throttle", "job:job", "500", *where))
        assert (code, told["stage"]) == (0, "done"), err
    assert nvml.limits() == {0: 500000, 1: 500000}, "where its two ranks run"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("throttle", "n9", "500"), "There is no node 'n9'"),
        (("throttle", "n1:9", "500"), "names no GPU of n1: they are 0 to 7"),
        (("throttle", "rack:x", "500"), "There is no rack 'x'"),
        (("throttle", "n1", "much"), "throttle wants a limit such as 600"),
        (("microbatch", "ghost", "2"), "There is no job 'ghost'"),
    ],
)
def test_what_names_nothing_is_a_sentence(
    words: tuple[str, ...], says: str, inventory: Path, nvml: FakeNvml, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["act", "--cluster", str(inventory), *words, "--yes"]) == 2
    assert says in capsys.readouterr().err
    assert nvml.limits() == {}


def test_a_dry_run_and_a_missing_terminal_do_nothing(
    inventory: Path, nvml: FakeNvml, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    assert main(["act", "--cluster", str(inventory), "throttle", "all", "1200MHz", "--dry-run"]) == 0
    assert "SM clock of all at most 1200 MHz" in capsys.readouterr().out
    assert main(["act", "--cluster", str(inventory), "throttle", "all", "500"]) == 2
    assert "There is no terminal to ask on" in capsys.readouterr().err
    assert (nvml.limits(), nvml.limits("lock")) == ({}, {})


def test_targets() -> None:
    cluster = catalog.cluster("h100x64")
    name = cluster.nodes[0].name
    assert cells_of(cluster, f"{name}:0-1,{name}:1")[1] == [(0, 0), (0, 1)]
    assert len(cells_of(cluster, "all")[1]) == 64
    assert len(cells_of(cluster, f"rack:{cluster.nodes[0].rack}")[1]) >= 8
    with pytest.raises(ProfileError, match="names no GPU"):
        cells_of(cluster, f"{name}:3-2")
