"""From the command line to a running console: profiles read, sources made, the screen opened."""

from __future__ import annotations

import gc
import getpass
import os
import socket
from pathlib import Path
from typing import Any

import msgspec

from engine.act.audit import Audit, default_path
from engine.control.connect import sources
from engine.control.control import Control
from engine.control.recording import Recording
from engine.profile import Cluster, ProfileError, catalog
from engine.record.schema import RecordError


def this_operator() -> str:
    """Who acts, for the audit log: user@host."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):
        name = "unknown"
    return f"{name}@{socket.gethostname()}"


def control_of(
    cluster: Cluster, policy: str, read_only: bool, operator: str = "", alarms: Path | None = None
) -> Control:
    """The engine for a cluster; `operator` acts, by default this user, and `alarms` is a log apart from that of the
    user's other racks. ProfileError where the inventory leads nowhere to."""
    return Control(
        cluster,
        sources(cluster),
        catalog.thermal_policy(policy),
        Audit(default_path()),
        operator or this_operator(),
        read_only=read_only,
        alarms=alarms,
    )


def console(given: Any) -> int:
    """`rackside console`."""
    control = control_of(catalog.cluster(given.cluster), given.policy, given.read_only)
    return show(control, given)


def begin_recording(control: Control, path: Path) -> Recording:
    """Record a control from now on; ProfileError with a sentence when the file cannot be."""
    try:
        return Recording(control, path)
    except RecordError as error:
        raise ProfileError(str(error)) from None


def show(control: Control, given: Any) -> int:
    """Open the screen on a control and stay until it is closed."""
    from tui import looks
    from tui.app import RacksideApp
    from tui.keymap import load_keys

    spare_the_collector()
    for fixed in ("COLUMNS", "LINES"):  # exported by some shells and by readline; they would hide every later resize
        os.environ.pop(fixed, None)
    if getattr(given, "record", None):
        begin_recording(control, Path(given.record).expanduser())
    look = looks.load(looks.default_path())
    if given.theme:
        look = msgspec.structs.replace(look, theme=looks.THEMES[given.theme])
    app = RacksideApp(control, given.ascii, load_keys(given.keys), look, given.reduced_motion)
    app.run()
    looks.keep(looks.default_path(), app.look)
    return app.return_code or 0


def spare_the_collector() -> None:
    """A screen makes many short-lived objects and hardly a cycle. Python's own thresholds have the collector look
    through all that lives every few refreshes, which takes longer than a refresh; very high ones have it pause a key
    for as long as it takes to look through all that is new. Small and frequent looks at the young are neither."""
    gc.freeze()
    gc.set_threshold(4_000, 5, 100)
