"""Jobs without a hook, stopped for a time: real ranks by their node, real Slurm jobs by Slurm."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from engine.act.action import Stage
from tests.parts.jobs import TrainingJob, saved, training
from tests.parts.nvml import FakeNvml
from tests.parts.opened import opened
from tests.parts.slurm import Slurm
from tests.parts.waiting import until

SLURM = "name: here\nslurm: true\nnodes:\n- {name: gpu-node-1, type: hgx-h100, local: true}\npoll_interval_s: 0.2\n"


@pytest.fixture(autouse=True)
def own_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "rackside" / "audit.jsonl"


async def act(*words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tui.cli", "act", *words, "--yes", "--json", stdout=-1, stderr=-1
    )


async def said(process: asyncio.subprocess.Process) -> tuple[int, Any, str]:
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, json.loads(out) if out.startswith(b"{") else None, err.decode()


def ranks(job: TrainingJob) -> list[int]:
    path = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]


def states(pids: list[int]) -> set[str]:
    return {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in pids}


async def shown(nvml: FakeNvml, job: TrainingJob) -> list[int]:
    """Its two ranks, once they are on GPUs 0 and 1."""
    await until(lambda: len(ranks(job)) == 2)
    pids = ranks(job)
    more = {f"gpu{i}_pid": pid for i, pid in enumerate(pids)} | {f"gpu{i}_pid_memory": 1 << 33 for i in (0, 1)}
    nvml.write(8, **more)
    return pids


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun would have started them."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("launched")
async def test_ranks_stand_still_and_go_on_at_their_time(inventory: Path, nvml: FakeNvml, tmp_path: Path) -> None:
    """Though the command that stopped them lives and renews what it holds."""
    out = tmp_path / "out"
    async with training("train_light", tmp_path / "unseen", steps=600, step_s=0.02, save=str(out)) as job:
        pids = await shown(nvml, job)
        process = await act("--cluster", str(inventory), "pause", "-", "3")
        await until(lambda: states(pids) == {"T"}, 30, "both ranks are stopped")
        stopped = time.monotonic()
        await until(lambda: "T" not in states(pids), 20, "both ranks go on")
        assert 1 < time.monotonic() - stopped < 10
        code, told, err = await said(process)
        assert (code, told["stage"], told["action"]) == (0, "done", "freeze"), err
        await job.finished()
    assert len(saved(out, 0)["log"]) == 600


@pytest.mark.usefixtures("launched")
async def test_ranks_go_on_when_the_command_is_killed(inventory: Path, nvml: FakeNvml, tmp_path: Path) -> None:
    async with training("train_light", tmp_path / "unseen", steps=100000, step_s=0.02) as job:
        pids = await shown(nvml, job)
        process = await act("--cluster", str(inventory), "pause", "-", "120")
        await until(lambda: states(pids) == {"T"}, 30)
        process.kill()
        await until(lambda: "T" not in states(pids), 15)
        await process.wait()


@pytest.mark.usefixtures("launched")
async def test_what_only_a_hook_can_do_is_not_faked(inventory: Path, nvml: FakeNvml, tmp_path: Path) -> None:
    async with training("train_light", tmp_path / "unseen", steps=100000, step_s=0.02) as job:
        await shown(nvml, job)
        code, _, err = await said(await act("--cluster", str(inventory), "microbatch", "-", "halve"))
        assert (code, "has no hook: microbatch is not available" in err) == (2, True), err
        code, told, err = await said(await act("--cluster", str(inventory), "pause", "-", "3600"))
        assert code == 1
        assert "at most 300 s" in told["refusal"]


@pytest.fixture
def here(tmp_path: Path) -> str:
    (tmp_path / "here.yaml").write_text(SLURM)
    return str(tmp_path / "here.yaml")


async def test_slurm_suspends_and_resumes_though_the_command_is_gone(slurm: Slurm, here: str) -> None:
    job = slurm.submit("--job-name=pretrain")
    slurm.until_state(job, "RUNNING")
    code, told, err = await said(await act("--cluster", here, "pause", job, "5", "--wait", "5"))
    assert (code, told["stage"], told["action"]) == (0, "done", "suspend"), err
    assert slurm.state(job) == "SUSPENDED"
    await until(lambda: slurm.state(job) == "RUNNING", 20, "it is resumed by itself")


async def test_slurm_resumes_at_once_by_hand_and_by_undo(slurm: Slurm, here: str) -> None:
    job = slurm.submit("--job-name=pretrain")
    slurm.until_state(job, "RUNNING")
    await said(await act("--cluster", here, "pause", "pretrain", "300", "--wait", "5"))
    assert slurm.state(job) == "SUSPENDED"
    code, told, err = await said(await act("--cluster", here, "resume", "pretrain", "--wait", "5"))
    assert (code, told["stage"]) == (0, "done"), err
    assert slurm.state(job) == "RUNNING"
    code, told, err = await said(await act("--cluster", here, "resume", "pretrain", "--wait", "5"))
    assert (code, "is running, not suspended" in told["refusal"]) == (1, True)


async def test_slurm_requeues_with_the_words_of_another_plan(slurm: Slurm, here: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    script = f"echo $(cat rackside-$SLURM_JOB_ID.plan 2>/dev/null || echo first plan) >> {out}; exec sleep 600"
    job = slurm.submit(f"--chdir={tmp_path}", "--requeue", script=script)
    slurm.until_state(job, "RUNNING")
    await until(lambda: out.exists() and out.read_text() == "first plan\n")
    code, told, err = await said(await act("--cluster", here, "requeue", job, "data-parallel", "--wait", "5"))
    assert (code, told["stage"], told["action"]) == (0, "done", "requeue"), err
    await until(lambda: len(out.read_text().splitlines()) == 2, 60, "it runs again")
    assert "--tensor-model-parallel-size 1" in out.read_text()
    assert "\\" not in out.read_text()


async def test_a_script_that_reads_no_plan_is_not_requeued(slurm: Slurm, here: str) -> None:
    job = slurm.submit()
    slurm.until_state(job, "RUNNING")
    code, told, _ = await said(await act("--cluster", here, "requeue", job, "data-parallel", "--wait", "5"))
    assert (code, "does not read" in told["refusal"]) == (1, True)
    assert slurm.state(job) == "RUNNING"


async def test_slurm_refusing_is_a_sentence_and_nothing_is_left_behind(slurm: Slurm, here: str, tmp_path: Path) -> None:
    script = "cat rackside-$SLURM_JOB_ID.plan; exec sleep 600"
    job = slurm.submit(f"--chdir={tmp_path}", "--no-requeue", script=script)
    slurm.until_state(job, "RUNNING")
    code, told, _ = await said(await act("--cluster", here, "requeue", job, "data-parallel", "--wait", "5"))
    assert (code, told["stage"]) == (1, "failed")
    assert told["reason"].startswith("Slurm refuses: ")
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".plan")]


@pytest.mark.usefixtures("launched", "quick_retries")
async def test_p_stops_a_job_without_a_hook_and_lets_it_go_on(inventory: Path, nvml: FakeNvml, tmp_path: Path) -> None:
    trains = training("train_light", tmp_path / "unseen", steps=100000, step_s=0.02)
    async with trains as job, opened(inventory) as c:
        await c.live()
        await c.press("p")
        assert "No job is seen here" in c.said()
        pids = await shown(nvml, job)
        await until(lambda: c.app.control.found_jobs, 30)
        await c.acts("p", "Stop a job that has no hook")
        await until(lambda: states(pids) == {"T"})
        await c.press("p")
        await c.shows("Let the job go on", "#panel-body")
        await c.press("enter")
        await c.ended(Stage.DONE)
        assert "T" not in states(pids)


@pytest.mark.usefixtures("quick_retries")
async def test_t_locks_a_clock(inventory: Path, nvml: FakeNvml) -> None:
    async with opened(inventory) as c:
        await c.live()
        await c.press("a", "t", *["right"] * 8)
        await c.shows("SM clock of n1 GPU 0", "#panel-body")
        await c.press("enter")
        await c.ended(Stage.DONE)
        assert nvml.limits("lock")[0] == 1410, "0.8 of 1755 MHz, in the board's steps of 15"
