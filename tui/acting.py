"""`rackside act` and `rackside undo`: one action without a screen, predicted, confirmed, carried out, told."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any

import msgspec

from engine.act import restored
from engine.act.action import Freeze, Proposal, Stage, Ticket
from engine.act.audit import Audit, AuditError, default_path, record
from engine.control.control import Control, Refused
from engine.control.discover import FoundJob
from engine.control.hookless import of_slurm
from engine.control.target import cells_of, hooked, job_of
from engine.job.status import JobStatus
from engine.plan.export import FORMATS
from engine.profile import Cluster, ProfileError, catalog
from engine.telemetry.snapshot import NodeState
from tui.output import printed
from tui.start import control_of
from tui.widgets.figures import change, effect_rows

HOLD = "Held: the limits stay as long as this command runs; ctrl-c gives them back. --permanent leaves them."

HOLD_STILL = "Held: the processes go on when the time is up or this command ends; ctrl-c ends it."


def act(given: Any) -> int:
    """Propose, show, confirm, carry out; 0 when it is in force."""
    if given.what == "rebalance" and given.value == "restart":
        return asyncio.run(_restart(given))
    return asyncio.run(_run(given, lambda control: _proposed(control, given)))


def undo(given: Any) -> int:
    """Put back what an action in the log changed."""
    cluster = catalog.cluster(given.cluster)
    entry = restored.last_in_force(Audit(default_path()).read(), cluster.name, given.id)

    async def proposed(control: Control) -> Proposal:
        return restored.proposal(entry, control.rack_and_load())

    return asyncio.run(_run(given, proposed))


async def _run(given: Any, proposed: Callable[[Control], Awaitable[Proposal]]) -> int:
    cluster = catalog.cluster(given.cluster)
    control = control_of(cluster, "margin", read_only=False)
    async with control.running():
        await settled(control, cluster, given.wait)
        proposal = await proposed(control)
        reached = control.nodes_reached(proposal.action)
        if given.dry_run or proposal.refusal:
            _show(proposal, None, given.json)
            return 1 if proposal.refusal else 0
        if not given.json:
            _show(proposal, None, False)
        if not given.yes and not await _sure(reached):
            print("Nothing was done.", file=sys.stderr)
            return 1
        control.arming.arm()
        try:
            ticket = control.confirm(proposal, given.steal or "")
        except (Refused, AuditError) as error:
            raise ProfileError(f"Not done: {error}") from None
        last = await control.ended(ticket)
        _show(proposal, last, given.json)
        frozen = proposal.action if isinstance(proposal.action, Freeze) and not proposal.action.restore else None
        if last.stage is Stage.DONE and (control.leased_gpus or frozen):
            if not given.json:
                print(HOLD_STILL if frozen else HOLD, file=sys.stderr)
            await _until_stopped(frozen.seconds if frozen else None)
        return 0 if last.stage is Stage.DONE else 1


async def _restart(given: Any) -> int:
    """Nothing is sent: what the next start would be, with its command."""
    cluster = catalog.cluster(given.cluster)
    control = control_of(cluster, "margin", read_only=True)
    async with control.running():
        await settled(control, cluster, given.wait)
        job = hooked(job_of(control.jobs.statuses.values(), control.found_jobs, given.target), "a restart")
        found = control.restart(job)
    words, lost = FORMATS[given.to](found.plan)
    hosts = found.placement.hosts
    if given.json:
        told = {"now_s": found.now_s, "then_s": found.then_s, "hosts": hosts, "says": found.says, "words": words}
        print(printed(told | {"plan": msgspec.to_builtins(found.plan), "lost": lost}))
        return 0
    print(f"{job.name}, started anew: a step of {change(found.now_s, found.then_s, 2, 's')}")
    for line in found.says or ("Nothing would be better than the plan that runs.",):
        print(f"  {line}")
    print(f"Hosts in rank order (SLURM_HOSTFILE with srun -m arbitrary, or torchrun --node-rank):\n{' '.join(hosts)}")
    print(words.rstrip())
    for line in lost:
        print(f"# {line}")
    return 0


async def settled(control: Control, cluster: Cluster, wait_s: float) -> None:
    """Until every node has told enough, or cannot, and a job has told a step."""
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        nodes = control.snapshot.nodes
        told = all(n.state in (NodeState.DOWN, NodeState.ERROR) or n.samples >= 3 for n in nodes)
        job = control.jobs.current
        hooks = any(n.hook_sockets for n in nodes)
        heard = job is not None and (not job.attached or job.step_s or job.paused_until)
        if told and (not hooks or heard) and control.hookless.asked.is_set():
            return
        await asyncio.sleep(cluster.poll_interval_s / 4)


async def _proposed(control: Control, given: Any) -> Proposal:
    what, value = given.what, given.value
    if what == "throttle":
        label, cells = _cells(control, given.target)
        amount, unit = _throttle_value(value)
        if unit == "MHz":
            return control.propose_clock(label, cells, to_mhz=amount, permanent=given.permanent)
        if unit == "-":
            return control.propose_throttle(label, cells, step_w=amount, permanent=given.permanent)
        return control.propose_throttle(label, cells, to_w=amount, permanent=given.permanent)
    job = job_of(control.jobs.statuses.values(), control.found_jobs, given.target)
    if what in ("pause", "resume"):
        return _standstill(
            control, job, what == "pause", 60.0 if value is None else float(_whole(value, what)), given.by
        )
    if what == "requeue":
        return await _requeued(control, given)
    hook = hooked(job, what)
    if what == "microbatch":
        words = {"halve": hook.microbatch // 2, "double": hook.microbatch * 2}
        return control.propose_microbatch(hook, words.get(str(value)) or _whole(value, what))
    return control.propose_rebalance(hook, 1 if value is None else _whole(value, what))


def _cells(control: Control, target: str) -> tuple[str, list[tuple[int, int]]]:
    """As `cells_of`; `job:NAME` is where a job runs."""
    kind, _, name = target.partition(":")
    if kind != "job" or any(n.name == "job" for n in control.cluster.nodes):
        return cells_of(control.cluster, target)
    job = job_of(control.jobs.statuses.values(), control.found_jobs, name)
    cells = control.cells_of_job(job)
    if not cells:
        raise ProfileError(f"Where {name} runs is not known: neither its ranks nor its processes tell their GPUs.")
    return f"job {job.name}", cells


def _standstill(control: Control, job: JobStatus | FoundJob, stop: bool, seconds: float, by: str) -> Proposal:
    """By the hook, if the job has one and nothing else is asked for; else by Slurm or on the nodes."""
    if isinstance(job, JobStatus):
        if by in ("", "hook"):
            return control.propose_pause(job, seconds) if stop else control.propose_resume(job)
        its = [f for f in control.found_jobs if "hook" in f.source and job.name in (f.name, f.id)]
        if not its:
            raise ProfileError(f"Neither Slurm nor processes tell of {job.name}: only its hook can pause it.")
        job = its[0]
    elif by == "hook":
        hooked(job, "a pause by the hook")
    return control.propose_standstill(job, seconds, by) if stop else control.propose_go_on(job)


async def _requeued(control: Control, given: Any) -> Proposal:
    if given.value is None:
        raise ProfileError("requeue wants the plan to start with: a built-in one, or a file.")
    its = [f for f in control.found_jobs if of_slurm(f) and given.target in (f.id, f.name)]
    if len(its) != 1:
        there = ", ".join(f.id for f in control.found_jobs if of_slurm(f)) or "none"
        raise ProfileError(f"'{given.target}' is not one job of Slurm's; there is {there}. The file needs slurm: true.")
    return await control.propose_requeue(its[0], catalog.plan(given.value), given.to)


def _throttle_value(text: str | None) -> tuple[float, str]:
    """Watts (600 or 600W), watts less (-100), or a clock (1400MHz)."""
    words = (text or "").strip()
    unit = "MHz" if words.lower().endswith("mhz") else "-" if words.startswith(("-", "+")) else "W"
    number = words.lower().removesuffix("mhz").removesuffix("w")
    try:
        found = float(number)
    except ValueError:
        raise ProfileError(
            f"throttle wants a limit such as 600 (W), a change such as -100, or a clock such as 1400MHz; not '{words}'."
        ) from None
    return (-found if unit == "-" else found), unit


def _whole(value: str | None, what: str) -> int:
    if value is None or not value.isdigit() or not 0 < int(value) < 10**6:
        raise ProfileError(f"{what} wants a whole number above 0, not '{value or 'nothing'}'.")
    return int(value)


async def _sure(nodes: int) -> bool:
    """One yes; for what touches more than one node, its number of nodes typed out."""
    if not sys.stdin.isatty():
        raise ProfileError("There is no terminal to ask on: add --yes to confirm, or --dry-run to look only.")
    asked = f"This touches {nodes} nodes. Type {nodes} to do it: " if nodes > 1 else "Do it? [y/N] "
    print(asked, end="", file=sys.stderr, flush=True)
    said = (await asyncio.to_thread(sys.stdin.readline)).strip().lower()
    return said == str(nodes) if nodes > 1 else said in ("y", "yes")


async def _until_stopped(seconds: float | None) -> None:
    """Hold on, renewing, until ctrl-c or for so long."""
    try:
        await asyncio.wait_for(asyncio.Event().wait(), seconds)
    except (asyncio.CancelledError, TimeoutError):
        pass


def _show(proposal: Proposal, ticket: Ticket | None, as_json: bool) -> None:
    if as_json:
        told: dict[str, Any] = {"title": proposal.title, "scope": proposal.scope, "refusal": proposal.refusal}
        if ticket is not None:
            told |= record("", ticket)
        else:
            before, after = (asdict(replace(o, gpu_w=None)) for o in (proposal.before, proposal.after))
            told |= {"predicted": {"before": before, "after": after}, "notes": list(proposal.notes)}
        print(printed(told), flush=True)
        return
    if ticket is not None:
        print(ticket.line, flush=True)
        return
    print(proposal.title)
    if proposal.refusal:
        print(proposal.refusal)
        return
    print(proposal.scope)
    for name, value in effect_rows(proposal):
        print(f"  {name:<15}{value}")
    for note in proposal.notes:
        print(note)
