"""`rackside bench hook`: what the job hook costs a job, and how long a key takes to be in force. What is measured:

- idle_us_per_step: time inside `hook.step()`, microseconds, one process, nobody attached, steps of 2 ms.
- idle_us_per_step_group: the same with two ranks and the process group's store (PyTorch's TCPStore where it is
  installed, else the light example's), of the rank that takes longer. No collective is added by anybody.
  idle_us_per_step_apart: the same where the other rank cannot see rank 0's memory and asks the store in each step.
- attached_fraction: with a console attached that reads everything, time inside `hook.step()` plus all processor time of
  the thread that serves it, as a share of a step of 50 ms; one process. attached_fraction_group: two ranks.
- command_ms: from the confirmed key in a Control (its log entry on the disk comes first) over SSH on loopback and the
  hook's socket until the command is in the job; plus, from the moment when the last of two ranks calls `step` at the
  boundary, until it is in force on both. The wait for that boundary in between is the job's step and left out.

How ranks spend a step, and what a figure is a mean of: engine.job.bench_hook. The SSH server and the node behind it are
the simulator's, in a process of their own; the ranks are processes, too. No log of the user is written.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from engine.act.audit import Audit
from engine.control import bench_hook
from engine.control.connect import sources
from engine.control.control import Control
from engine.job.bench_hook import commanded, cost, store_kind
from engine.profile import Cluster, catalog
from engine.sim.cluster import simulated
from tui.output import progress

CLUSTER, MODEL, PLAN = "h200x32-400g", "llama3-8b", "data-parallel"
IDLE_STEP_S, STEP_S, COMMAND_STEP_S = 0.002, 0.05, 0.02
START_S = 60.0


def measured(seconds: float) -> dict[str, Any]:
    """All of it in about `seconds` and what starting takes."""
    progress("hook alone")
    alone = cost(1, IDLE_STEP_S, 0.15 * seconds, attached=False)
    progress("hook in a group")
    group = cost(2, IDLE_STEP_S, 0.15 * seconds, attached=False)
    apart = cost(2, IDLE_STEP_S, 0.1 * seconds, attached=False, apart=True)
    progress("hook with a console")
    heard = cost(1, STEP_S, 0.2 * seconds, attached=True)
    heard_group = cost(2, STEP_S, 0.15 * seconds, attached=True)
    commands = _commands(0.25 * seconds)
    progress()
    return {
        "idle_us_per_step": alone.mean_us,
        "idle_us_p99": alone.p99_us,
        "idle_us_per_step_group": group.mean_us,
        "idle_us_group_p99": group.p99_us,
        "idle_us_per_step_apart": apart.mean_us,
        "idle_us_apart_p99": apart.p99_us,
        "attached_fraction": heard.mean_us / 1e6 / STEP_S,
        "attached_fraction_group": heard_group.mean_us / 1e6 / STEP_S,
        "command_ms": commands,
        "store": store_kind(),
        "steps": {"idle": len(alone.us), "group": len(group.us), "attached": len(heard.us)},
    }


def _commands(seconds: float) -> dict[str, Any]:
    with _node() as cluster, tempfile.TemporaryDirectory(prefix="rackside-") as log:
        hooks = Path(cluster.ssh.identity or "").parent / cluster.nodes[0].name
        with commanded(str(hooks), 2, COMMAND_STEP_S) as job:
            audit = Audit(Path(log) / "audit.jsonl")
            control = Control(cluster, sources(cluster), catalog.thermal_policy("margin"), audit, "bench")
            pressed = asyncio.run(bench_hook.press(control, seconds, progress))
            return bench_hook.command_ms(pressed, *job.end())


@contextmanager
def _node() -> Iterator[Cluster]:
    """A simulated cluster in a process of its own; the inventory that leads to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_simulate, args=(theirs,), daemon=True)
    process.start()
    try:
        if not ours.poll(START_S):
            raise TimeoutError(f"the simulated node did not start within {START_S:.0f} s")
        yield ours.recv()
    finally:
        ours.send("end")
        process.join(10)
        process.kill()


def _simulate(pipe: Connection) -> None:
    async def run() -> None:
        async with simulated(catalog.cluster(CLUSTER), catalog.model(MODEL), catalog.plan(PLAN)) as cluster:
            pipe.send(cluster)
            await asyncio.to_thread(pipe.recv)

    asyncio.run(run())


def text(found: dict[str, Any]) -> str:
    """To read."""
    command = found["command_ms"]
    return "\n".join(
        [
            f"idle, one process       {found['idle_us_per_step']:8.1f} us a step   (99 %: {found['idle_us_p99']:.1f})",
            f"idle, two ranks         {found['idle_us_per_step_group']:8.1f} us a step   "
            f"(99 %: {found['idle_us_group_p99']:.1f}; {found['store']})",
            f"the same, two machines  {found['idle_us_per_step_apart']:8.1f} us a step   "
            f"(99 %: {found['idle_us_apart_p99']:.1f}; over loopback)",
            f"console attached        {found['attached_fraction']:8.3%} of a step of {STEP_S * 1e3:.0f} ms",
            f"the same, two ranks     {found['attached_fraction_group']:8.3%}",
            f"from key to job         {command['p50']:8.1f} ms median, {command['p99']:.1f} ms 99th percentile of "
            f"{command['commands']} commands, without the wait for the step's end",
        ]
    )
