"""The simulated job is held by its hooks as a real one is: a pause stops it, cools its GPUs, and freezes nobody."""

from __future__ import annotations

import time
from pathlib import Path

from engine.act.audit import Audit
from engine.control.connect import sources
from engine.control.control import Control
from engine.profile import catalog
from engine.sim.cluster import simulated
from engine.telemetry.snapshot import NodeState
from tests.parts.waiting import until


async def test_a_paused_job_draws_little_and_goes_on_when_resumed(tmp_path: Path) -> None:
    names = (catalog.cluster("h200x32-400g"), catalog.model("llama3-8b"), catalog.plan("data-parallel"))
    async with simulated(*names) as cluster:
        audit = Audit(tmp_path / "audit.jsonl")
        control = Control(cluster, sources(cluster), catalog.thermal_policy("margin"), audit, "ops@test")
        async with control.running():
            await until(lambda: control.jobs.current is not None and control.jobs.current.step_s, 60)
            job = control.jobs.current
            assert job is not None
            control.arming.arm()
            control.confirm(control.propose_pause(job, 300.0))
            await until(lambda: control.jobs.statuses[job.key].paused_until is not None, 30)
            await until(lambda: control.snapshot.gpus["power_w"].sum() < 32 * 250, 30)
            assert {n.state for n in control.snapshot.nodes} == {NodeState.LIVE}, "nobody is frozen"
            step = control.jobs.statuses[job.key].step
            control.confirm(control.propose_resume(control.jobs.statuses[job.key]))
            await until(lambda: control.jobs.statuses[job.key].step > step + 1, 30)
            control.confirm(control.propose_pause(control.jobs.statuses[job.key], 300.0))
            await until(lambda: control.jobs.statuses[job.key].paused_until is not None, 30)
        ends = time.monotonic()
    assert time.monotonic() - ends < 20, "a simulation that ends does not wait for its pause"
