"""Jobs from a real Slurm: its JSON, its text, and what is said when it does not answer."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.control import slurm as asked
from engine.control.discover import from_slurm
from engine.control.slurm import Ran, here, jobs
from engine.profile import catalog
from engine.telemetry.store import Store
from engine.telemetry.tools.slurm import Job
from tests.parts.slurm import Slurm

CLUSTER = "name: here\nslurm: true\nnodes:\n- {name: gpu-node-1, type: hgx-h100, local: true}\n"


async def older(words: Sequence[str]) -> Ran | str:
    """A Slurm whose squeue does not know --json."""
    if "--json" in words:
        words = [*words[:-1], "--jsonx"]
    return await here()(words)


async def all_jobs(run: asked.Run) -> dict[str, Job]:
    found = await jobs(run)
    assert not isinstance(found, str), found
    return {job.id: job for job in found}


@pytest.mark.parametrize("run", [here(), older], ids=["json", "text"])
async def test_running_suspended_and_pending(slurm: Slurm, run: asked.Run) -> None:
    first = slurm.submit("--gres=gpu:2", "--job-name=pre|#train")
    second = slurm.submit("--gres=gpu:1", "--job-name=b")
    slurm.until_state(first, "RUNNING")
    slurm.until_state(second, "RUNNING")
    waits = slurm.submit("--gres=gpu:4", "--hold")
    slurm.command("scontrol", "suspend", second)
    found = await all_jobs(run)
    assert [found[job].state for job in (first, second, waits)] == ["RUNNING", "SUSPENDED", "PENDING"]
    assert (found[first].gpu_index, found[first].gpus) == ({"gpu-node-1": (0, 1)}, 2)
    assert (found[second].gpu_index, found[second].name) == ({"gpu-node-1": (2,)}, "b")
    assert (found[waits].gpus, found[waits].hosts, found[waits].run_s) == (4, (), None)
    assert found[first].run_s is not None
    assert found[first].name.replace("#", "") == "pre|train"
    slurm.command("scontrol", "resume", second)
    assert (await all_jobs(run))[second].state == "RUNNING"


async def test_its_gpus_are_slots_of_our_nodes(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.submit("--gres=gpu:3")
    slurm.until_state(job, "RUNNING")
    (tmp_path / "c.yaml").write_text(CLUSTER)
    cluster = catalog.cluster(str(tmp_path / "c.yaml"))
    assert cluster.slurm
    snapshot = Store([("gpu-node-1", 8)]).publish(1.0)
    found = {f.id: f for f in from_slurm((await all_jobs(here())).values(), cluster, snapshot)}[job]
    assert [(at.node, at.slot, at.rank) for at in found.ranks] == [("gpu-node-1", slot, None) for slot in range(3)]


async def test_a_controller_that_is_silent_or_gone_is_a_sentence(slurm: Slurm) -> None:
    began = time.monotonic()
    slurm.freeze_controller()
    silent = await jobs(here(0.5))
    slurm.freeze_controller(False)
    assert silent == "squeue did not end within 0.5 s: does slurmctld answer?"
    slurm.stop_controller()
    try:
        by_json, by_text = await jobs(here()), await jobs(older)
    finally:
        slurm.start_controller()
    assert isinstance(by_json, str)
    assert by_json.startswith("Slurm does not tell its jobs: ")
    assert isinstance(by_text, str)
    assert "Unable to contact slurm controller" in by_text
    assert time.monotonic() - began < 20


async def test_no_squeue_and_one_that_never_stops_printing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "squeue is not on this machine's PATH" in str(await jobs(here()))
    fake = tmp_path / "squeue"
    fake.write_text(f"#!{sys.executable}\nwhile True: print('x' * 65536)\n")
    fake.chmod(0o755)
    monkeypatch.setattr(asked, "LARGEST", 1 << 20)
    assert await jobs(here(8.0)) == "squeue printed more than 1 MiB; nothing of it is used"
