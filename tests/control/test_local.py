"""This very machine as a node: the same probe as a subprocess, the hook's socket without SSH."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from pathlib import Path

import pytest

from engine.act.action import Stage
from engine.telemetry.child import Child
from engine.telemetry.snapshot import NodeState
from tests.parts.console import console
from tests.parts.jobs import training
from tests.parts.nvml import FakeNvml
from tests.parts.waiting import until

pytestmark = pytest.mark.usefixtures("quick_retries")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    path = tmp_path / "here.yaml"
    path.write_text("name: here\nnodes:\n  - {name: me, type: hgx-h100, local: true}\npoll_interval_s: 0.2\n")
    return path


async def test_the_whole_loop_on_this_machine(
    here: Path, hooks: Path, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.write(8)
    for name, value in {**nvml.environment, "RACKSIDE_HOOK_DIR": str(hooks)}.items():
        monkeypatch.setenv(name, value)
    async with training("train_light", hooks, steps=100000, step_s=0.02), console(here) as c:
        await c.live()
        await until(lambda: c.control.snapshot.gpus["temperature_c"][7] == 61)
        assert (await c.does(c.control.propose_throttle("me", [(0, 3)], 100.0))).stage is Stage.DONE
        assert nvml.limits() == {3: 600000}
        job = await c.job()
        assert (await c.does(c.control.propose_microbatch(job, 2))).stage is Stage.DONE
        await c.job(lambda j: j.microbatches == (8, 8))
    await until(lambda: nvml.limits() == {3: 700000}, what="the limit given back when the console ends")


def test_a_reader_that_is_stuck_is_left_to_end_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """It outlives the loop, is not killed, and nothing is raised when it ends at last."""
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)

    async def stuck() -> int:
        script = "import sys; print('up', flush=True); sys.stdin.read()"
        child = await Child.start(sys.executable, "-c", script, environment=os.environ)
        assert await child.output.readline() == b"up\n"
        pid = child._process.pid
        os.kill(pid, signal.SIGSTOP)
        await child.end(0.05)
        return pid

    pid = asyncio.run(stuck())
    gc.collect()
    assert raised == []
    assert Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    os.kill(pid, signal.SIGCONT)
    asyncio.run(until(lambda: not Path(f"/proc/{pid}").exists(), what="its end, and nothing left of it"))
    gc.collect()
    assert raised == []


async def test_a_machine_without_a_driver_says_so(here: Path) -> None:
    async with console(here) as c:
        node = lambda: c.control.snapshot.nodes[0]  # noqa: E731
        await until(lambda: node().state is NodeState.ERROR, what="an error")
        assert "no NVIDIA driver is loaded on this node" in node().reason
        await until(lambda: node().samples > 1, what="samples of the host all the same")
