"""`rackside demo`: a simulated cluster, and the same console or a summary on it. The only place that starts one."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

from engine.control.control import Control
from engine.model.predict import PlanError
from engine.profile import Cluster, Model, Plan, ProfileError, catalog
from engine.sim.cluster import simulated
from engine.telemetry.snapshot import NodeState
from tui.start import control_of, show

START_S = 30.0


def demo(given: Any) -> int:
    """Simulate, then show or summarise."""
    cluster, model, plan = catalog.cluster(given.cluster), catalog.model(given.model), catalog.plan(given.plan)
    try:
        if given.headless:
            summary = asyncio.run(_headless(cluster, model, plan, given))
            print(json.dumps(summary) if given.json else _text(summary))
            return 1 if summary["errors"] else 0
        return _on_screen(cluster, model, plan, given)
    except PlanError as error:
        raise ProfileError(f"{plan.name} does not run on {cluster.name}: {error}") from None


async def _headless(cluster: Cluster, model: Model, plan: Plan, given: Any) -> dict[str, Any]:
    async with simulated(cluster, model, plan) as reachable:
        control = control_of(reachable, given.policy, read_only=True, alarms=_alarms(reachable))
        async with control.running():
            await asyncio.sleep(given.seconds)
            return _summary(control)


def _alarms(simulated: Cluster) -> Path:
    """Beside its keys, gone with it: a demo is a new rack, and what stood on the last one or stands on a real one of
    that name is none of its own."""
    return Path(simulated.ssh.known_hosts).with_name("alarms.jsonl")


def _summary(control: Control) -> dict[str, Any]:
    snapshot, job = control.snapshot, control.jobs.current
    celsius = snapshot.gpus["temperature_c"]
    known = celsius[~(celsius != celsius)]
    errors = [f"{n.name}: {n.state.value}: {n.reason}" for n in snapshot.nodes if n.state is not NodeState.LIVE]
    if job is None:
        errors.append("no job was found")
    return {
        "nodes": len(snapshot.nodes),
        "gpus": len(known),
        "samples": sum(n.samples for n in snapshot.nodes),
        "max_temperature_c": float(known.max()) if len(known) else None,
        "job": None
        if job is None
        else {
            "step": job.step,
            "step_time_s": job.step_s,
            "tokens_per_s": job.tokens_per_s,
            "microbatch": job.microbatch,
        },
        "errors": errors,
    }


def _text(summary: dict[str, Any]) -> str:
    job, celsius = summary["job"], summary["max_temperature_c"]
    hottest = "no temperature yet" if celsius is None else f"hottest {celsius:.0f} C"
    lines = [f"{summary['nodes']} nodes, {summary['gpus']} GPUs, {summary['samples']} samples, {hottest}"]
    if job is not None and not (job["step_time_s"] and job["tokens_per_s"]):
        lines.append("the job has told no step yet")
    elif job is not None:
        lines.append(
            f"job at step {job['step']}, {job['step_time_s']:.2f} s a step, "
            f"{job['tokens_per_s']:,.0f} tokens/s, microbatch {job['microbatch']}"
        )
    return "\n".join([*lines, *summary["errors"]])


def _on_screen(cluster: Cluster, model: Model, plan: Plan, given: Any) -> int:
    """The simulation on a thread and loop of its own, the console on the main one: apart, as in a real rack."""
    ready, leave = threading.Event(), threading.Event()
    found: list[Cluster | BaseException] = []

    async def simulate() -> None:
        async with simulated(cluster, model, plan) as reachable:
            found.append(reachable)
            ready.set()
            await asyncio.to_thread(leave.wait)

    def run() -> None:
        try:
            asyncio.run(simulate())
        except BaseException as error:
            found.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=run, name="simulation", daemon=True)
    thread.start()
    ready.wait(START_S)
    try:
        if not found:
            raise ProfileError(f"The simulated cluster did not start within {START_S:.0f} s.")
        if isinstance(found[0], BaseException):
            raise found[0]
        return show(control_of(found[0], given.policy, given.read_only, alarms=_alarms(found[0])), given)
    finally:
        leave.set()
        thread.join(5)
