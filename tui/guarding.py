"""`rackside guard`: the policy at work without a screen, for a terminal, a log or systemd."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from engine.act.alarm import Alarm, Priority
from engine.act.audit import default_path
from engine.control.control import Control
from engine.control.events import Published
from engine.control.guarding import Guarding, Note
from engine.profile import ProfileError, catalog
from tui.output import line_of
from tui.start import control_of
from tui.widgets.figures import change, clock


def guard(given: Any) -> int:
    """Guard until a signal ends it; limits are given back then."""
    cluster = catalog.cluster(given.cluster)
    control = control_of(cluster, given.policy, read_only=given.dry_run, operator=f"guard@{socket.gethostname()}")
    with _alone(cluster.name, given.dry_run):
        asyncio.run(_run(control, given))
    return 0


async def _run(control: Control, given: Any) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    say = _json if given.json else _text
    say(_opening(control, given.dry_run))
    async with control.running():
        guarding = Guarding(control, say, advise=given.dry_run)
        watching = asyncio.create_task(_watch(control, guarding, say))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({watching, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        _tell_systemd("STOPPING=1")
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=not watching.done())
        await guarding.close()
        given_back = control.leased_gpus
    if given_back:
        say(_note("restored", f"{given_back} GPUs have their own limits and clocks back."))


async def _watch(control: Control, guarding: Guarding, say: Any) -> None:
    before: dict[str, Alarm] = {}
    async for event in control.events():
        if not isinstance(event, Published):
            continue
        guarding.look()
        now = {a.key: a for a in control.alarms if a.priority < Priority.NOTICE and a.stands}
        for key in now.keys() - before.keys():
            say(_note("alarm", now[key].text, now[key].node))
        for key in before.keys() - now.keys():
            say(_note("cleared", before[key].text, before[key].node))
        before = now
        _tell_systemd("READY=1\nWATCHDOG=1")


def _opening(control: Control, dry_run: bool) -> Note:
    policy, cluster = control.policy, control.cluster
    acts = [r.name for r in policy.rules if r.automatic and not dry_run]
    says = [r.name for r in policy.rules if r.name not in acts]
    text = f"Guards {cluster.gpus} GPUs on {len(cluster.nodes)} nodes of {cluster.name} by the policy {policy.name}"
    text += f"; acts by itself on {', '.join(acts)}" if acts else "; only advises"
    text += f"; advises on {', '.join(says)}" if acts and says else ""
    return _note("begins", text)


def _note(what: str, text: str, node: str = "") -> Note:
    return Note(time.time(), what, node, "", text)


def _text(note: Note) -> None:
    effect = ""
    if note.proposal is not None and note.what in ("advice", "done"):
        before, after = note.proposal.before, note.proposal.after
        effect = f" (predicted: step {change(before.step_s, after.step_s, 2, 's')}, "
        effect += f"hottest {change(before.peak_c, after.peak_c, 0, 'C')})"
    rule = f"[{note.rule}] " if note.rule else ""
    print(f"{clock(note.time)}  {note.what:<9} {rule}{note.text}{effect}", flush=True)


def _json(note: Note) -> None:
    told: dict[str, Any] = {name: getattr(note, name) for name in ("time", "what", "node", "rule", "text", "ticket")}
    if note.proposal is not None:
        sides = (("before", note.proposal.before), ("after", note.proposal.after))
        told["predicted"] = {name: asdict(replace(outlook, gpu_w=None)) for name, outlook in sides}
    print(line_of(told), flush=True)


@contextmanager
def _alone(cluster: str, dry_run: bool) -> Iterator[None]:
    """One guard a cluster and user on this machine: two would answer the same heat twice. One that only looks may
    always run."""
    if dry_run:
        yield
        return
    path = default_path().with_name(f"guard-{cluster.replace('/', '_')}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ProfileError(f"{path}: cannot be written: {error.strerror}.") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        who = Path(path).read_text().strip() or "unknown"
        os.close(lock)
        raise ProfileError(f"A guard of {cluster} runs here already (process {who}); --dry-run only looks.") from None
    try:
        os.ftruncate(lock, 0)
        os.write(lock, str(os.getpid()).encode())
        yield
    finally:
        os.close(lock)


def _tell_systemd(state: str) -> None:
    """The notification protocol of sd_notify(3): a datagram to the socket that the unit named, if there is one."""
    path = os.environ.get("NOTIFY_SOCKET")
    if path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
            try:
                out.sendto(state.encode(), "\0" + path[1:] if path.startswith("@") else path)
            except OSError:
                pass  # systemd will find out by itself
