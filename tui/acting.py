"""`rackside act` and `rackside undo`: one action without a screen, predicted, confirmed, carried out, told."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from engine.act import restored
from engine.act.action import Proposal, Stage, Ticket
from engine.act.audit import Audit, AuditError, default_path, record
from engine.control.control import Control, Refused
from engine.control.target import cells_of, job_of
from engine.profile import Cluster, ProfileError, catalog
from engine.telemetry.snapshot import NodeState
from tui.output import printed
from tui.start import control_of
from tui.widgets.figures import effect_rows

HOLD = "Held: the limits stay as long as this command runs; ctrl-c gives them back. --permanent leaves them."


def act(given: Any) -> int:
    """Propose, show, confirm, carry out; 0 when it is in force."""
    return asyncio.run(_run(given, lambda control: _proposed(control, given)))


def undo(given: Any) -> int:
    """Put back what an action in the log changed."""
    cluster = catalog.cluster(given.cluster)
    entry = restored.last_in_force(Audit(default_path()).read(), cluster.name, given.id)
    return asyncio.run(_run(given, lambda control: restored.proposal(entry, control.rack_and_load())))


async def _run(given: Any, proposed: Callable[[Control], Proposal]) -> int:
    cluster = catalog.cluster(given.cluster)
    control = control_of(cluster, "margin", read_only=False)
    async with control.running():
        await settled(control, cluster, given.wait)
        proposal = proposed(control)
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
        if last.stage is Stage.DONE and control.leased_gpus and not given.json:
            print(HOLD, file=sys.stderr)
        if last.stage is Stage.DONE and control.leased_gpus:
            await _until_stopped()
        return 0 if last.stage is Stage.DONE else 1


async def settled(control: Control, cluster: Cluster, wait_s: float) -> None:
    """Until every node has told enough, or cannot, and a job has told a step."""
    until = time.monotonic() + wait_s
    while time.monotonic() < until:
        nodes = control.snapshot.nodes
        told = all(n.state in (NodeState.DOWN, NodeState.ERROR) or n.samples >= 3 for n in nodes)
        job = control.jobs.current
        hooks = any(n.hook_sockets for n in nodes)
        heard = job is not None and (not job.attached or job.step_s or job.paused_until)
        if told and (not hooks or heard):
            return
        await asyncio.sleep(cluster.poll_interval_s / 4)


def _proposed(control: Control, given: Any) -> Proposal:
    what, value = given.what, given.value
    if what == "throttle":
        label, cells = cells_of(control.cluster, given.target)
        amount, unit = _throttle_value(value)
        if unit == "MHz":
            return control.propose_clock(label, cells, to_mhz=amount, permanent=given.permanent)
        if unit == "-":
            return control.propose_throttle(label, cells, step_w=amount, permanent=given.permanent)
        return control.propose_throttle(label, cells, to_w=amount, permanent=given.permanent)
    job = job_of(control.jobs.statuses.values(), given.target)
    if what == "microbatch":
        words = {"halve": job.microbatch // 2, "double": job.microbatch * 2}
        return control.propose_microbatch(job, words.get(str(value)) or _whole(value, what))
    if what == "rebalance":
        return control.propose_rebalance(job, 1 if value is None else _whole(value, what))
    if what == "pause":
        return control.propose_pause(job, 60.0 if value is None else float(_whole(value, what)))
    return control.propose_resume(job)


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


async def _until_stopped() -> None:
    """Hold on, renewing, until ctrl-c."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
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
