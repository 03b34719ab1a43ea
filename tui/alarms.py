"""`rackside alarms`: what stands on a cluster, and what an operator decides about it, without a screen."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

from engine.act.alarm import Alarm, State
from engine.act.alarmlog import AlarmLog
from engine.act.audit import default_path
from engine.control.alarming import Alarming
from engine.profile import Cluster, ProfileError, catalog
from tui.acting import settled
from tui.output import line_of, printed
from tui.start import control_of, this_operator
from tui.widgets.figures import age

LASTING_S = 3.0
"""Heat must last before it is an alarm: so long the nodes are watched once they have told something."""


def alarms(given: Any) -> int:
    """1 when something stands that nobody has seen; a decision only writes the log and asks no node."""
    cluster = catalog.cluster(given.cluster)
    if given.log:
        return _story(cluster, given.json)
    if given.acknowledge or given.shelve or given.unshelve:
        return _decide(cluster, given)
    found = asyncio.run(_looked(cluster, given.wait))
    if given.json:
        print(printed(_told(found)))
    else:
        _show(found)
    return int(any(a.state is not State.ACKNOWLEDGED for a in found.standing))


async def _looked(cluster: Cluster, wait_s: float) -> Alarming:
    control = control_of(cluster, "margin", read_only=True)
    async with control.running():
        await settled(control, cluster, wait_s)
        await asyncio.sleep(LASTING_S)
    return control.alarming


def _decide(cluster: Cluster, given: Any) -> int:
    panel = Alarming(cluster, AlarmLog(default_path().with_name("alarms.jsonl"), cluster.name), this_operator())
    panel.begin()
    if given.acknowledge:
        keys = [a.key for a in panel.standing] if given.acknowledge == "all" else [_one(panel, given.acknowledge).key]
        panel.acknowledge(keys)
    if given.shelve:
        refused = panel.shelve(_one(panel, given.shelve).key, given.minutes * 60.0, given.reason or "")
        if refused:
            raise ProfileError(f"Not shelved: {refused} Give --reason TEXT and --minutes N.")
    if given.unshelve:
        keys = [s.key for s in panel.shelved if s.key.startswith(given.unshelve)]
        if len(keys) != 1:
            there = ", ".join(s.key for s in panel.shelved) or "none"
            raise ProfileError(f"'{given.unshelve}' is not one shelved alarm; there is {there}.")
        panel.unshelve(keys[0])
    if panel.trouble:
        raise ProfileError(panel.trouble)
    return 0


def _one(panel: Alarming, key: str) -> Alarm:
    """The alarm whose key is this, or begins so."""
    exact = [a for a in panel.standing if a.key == key]
    found = exact or [a for a in panel.standing if a.key.startswith(key)]
    if len(found) != 1:
        there = ", ".join(a.key for a in (found or panel.standing)[:8]) or "none that a console has seen"
        raise ProfileError(f"'{key}' is {'no alarm' if not found else 'several alarms'} of the log; there is {there}.")
    return found[0]


def _told(found: Alarming) -> dict[str, Any]:
    standing = [{**asdict(a), "priority": a.priority.name.lower(), "state": a.state.value} for a in found.standing]
    for alarm in standing:
        del alarm["row"]
    return {"alarms": standing, "shelved": [asdict(s) for s in found.shelved]}


def _show(found: Alarming) -> None:
    now = time.time()
    for alarm in found.standing:
        seen = f" (seen by {alarm.by})" if alarm.by else ""
        print(
            f"{alarm.state.value:<13}{alarm.priority.name:<9}{age(max(0.0, now - alarm.since)):>7}  {alarm.text}{seen}"
        )
        print(f"{'':>31}{alarm.key}")
    for shelf in found.shelved:
        print(f"{'shelved':<22}{age(max(0.0, shelf.until - now)):>7}  {shelf.text} ({shelf.by}: {shelf.reason})")
    if not found.standing and not found.shelved:
        print("No alarms.")


def _story(cluster: Cluster, as_json: bool) -> int:
    for event in AlarmLog(default_path().with_name("alarms.jsonl"), cluster.name).read():
        if as_json:
            print(line_of({**asdict(event), "what": event.what.value, "priority": event.priority.name.lower()}))
        else:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
            who = f" by {event.by}" if event.by else ""
            why = f": {event.reason}" if event.reason else ""
            print(f"{when}  {event.what.value:<13}{event.text or event.key}{who}{why}")
    return 0
