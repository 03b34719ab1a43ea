"""`rackside bench hook`: what the job hook costs a job, and how long a key takes to be in force. What is measured:

- idle_us_per_step: time inside `hook.step()`, microseconds, one process, nobody attached, steps of 2 ms.
- idle_us_per_step_group: the same with two ranks and the process group's store (PyTorch's TCPStore where it is
  installed, else the light example's), of the rank that takes longer. No collective is added by anybody.
  *_apart, here and below: the same where the other rank does not see rank 0's memory, as on another machine, though
  over loopback; a thread of it then waits for the store's word.
- attached_fraction: with a console attached that reads everything, time inside `hook.step()` plus all processor time of
  the thread that serves it, as a share of a step of 50 ms; one process. attached_fraction_group: two ranks.
- command_ms: from the confirmed key in a Control (its log entry on the disk comes first) over SSH on loopback and the
  hook's socket until the command is in the job and, apart, announced to the other machine; plus, from the moment when
  the last of two ranks calls `step` at the boundary, until it is in force on both. The wait for that boundary in
  between is the job's step and left out.

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
    heard = cost(1, STEP_S, 0.15 * seconds, attached=True)
    heard_group = cost(2, STEP_S, 0.1 * seconds, attached=True)
    heard_apart = cost(2, STEP_S, 0.1 * seconds, attached=True, apart=True)
    commands = _commands(0.15 * seconds, apart=False)
    commands_apart = _commands(0.1 * seconds, apart=True)
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
        "attached_fraction_apart": heard_apart.mean_us / 1e6 / STEP_S,
        "command_ms": commands,
        "command_ms_apart": commands_apart,
        "store": store_kind(),
        "steps": {"idle": len(alone.us), "group": len(group.us), "attached": len(heard.us)},
    }


def _commands(seconds: float, apart: bool) -> dict[str, Any]:
    with _node() as cluster, tempfile.TemporaryDirectory(prefix="rackside-") as log:
        hooks = Path(cluster.ssh.identity or "").parent / cluster.nodes[0].name
        with commanded(str(hooks), 2, COMMAND_STEP_S, apart) as job:
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
    idle = (
        ("idle, one process", "idle_us_per_step", "idle_us_p99", ""),
        ("idle, two ranks", "idle_us_per_step_group", "idle_us_group_p99", f"; {found['store']}"),
        ("the same, two machines", "idle_us_per_step_apart", "idle_us_apart_p99", "; over loopback"),
    )
    heard = (
        ("console attached", "attached_fraction"),
        ("the same, two ranks", "attached_fraction_group"),
        ("the same, two machines", "attached_fraction_apart"),
    )
    keys = (("from key to job", "command_ms"), ("the same, two machines", "command_ms_apart"))
    lines = [
        f"{name:<23}{found[mean]:8.1f} us a step   (99 %: {found[p99]:.1f}{more})" for name, mean, p99, more in idle
    ]
    lines += [f"{name:<23}{found[key]:8.3%} of a step of {STEP_S * 1e3:.0f} ms" for name, key in heard]
    lines += [
        f"{name:<23}{found[key]['p50']:8.1f} ms median, {found[key]['p99']:.1f} ms 99th percentile of "
        f"{found[key]['commands']} commands, without the wait for the step's end"
        for name, key in keys
    ]
    return "\n".join(lines)
