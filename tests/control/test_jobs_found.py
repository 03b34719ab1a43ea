"""`rackside jobs` on real parts: a process with a rank and a training job with a hook, on a node behind OpenSSH."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parts.jobs import training
from tests.parts.nvml import FakeNvml
from tests.parts.waiting import until
from tui.cli import main

RANK = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "SLURM_JOB_ID": "77"}


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """A process with the environment of a rank, that waits."""
    wait = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    process = subprocess.Popen(wait, stdin=subprocess.PIPE, env={**os.environ, **RANK})
    yield process
    process.kill()
    process.wait()


async def test_a_job_by_its_processes_and_another_by_its_hook(
    inventory: Path,
    nvml: FakeNvml,
    hooks: Path,
    worker: subprocess.Popen[bytes],
    capsys: pytest.CaptureFixture[str],
) -> None:
    nvml.write(8, gpu3_pid=worker.pid, gpu3_pid_memory=40 << 30)
    async with training("train_light", hooks, name="pretrain", steps=100000, step_s=0.05) as job:
        await until(job.socket.exists)
        status = await asyncio.to_thread(main, ["jobs", "--cluster", str(inventory), "--json"])
        told = {found["id"]: found for found in json.loads(capsys.readouterr().out)}
        text = await asyncio.to_thread(main, ["jobs", "--cluster", str(inventory)])
    assert (status, text) == (0, 0)
    assert told["77"]["ranks"] == [{"rank": 3, "node": "n1", "slot": 3, "pid": worker.pid}]
    assert told["77"]["world_size"] == 8
    assert any("pretrain" in (found["id"], found["name"]) and "hook" in found["source"] for found in told.values())
    assert "1 of 8" in capsys.readouterr().out
