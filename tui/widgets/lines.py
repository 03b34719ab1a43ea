"""The lines that are always there: the site, the job, the alarms, the last actions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.text import Text

from engine.act.action import Stage, Ticket
from engine.act.alarm import Alarm, Priority, State
from engine.job.status import JobStatus
from engine.telemetry.snapshot import NodeState, Snapshot
from tui.metrics import Metric
from tui.ramp import LEVELS, style_of
from tui.widgets.figures import DASH, age, large, number

STAGE_STYLE = {
    Stage.PENDING: "yellow",
    Stage.ACKNOWLEDGED: "yellow",
    Stage.DONE: "green",
    Stage.FAILED: "bold red",
    Stage.UNKNOWN: "bold magenta",
    Stage.UNDONE: "dim",
}
ALARM_STYLE = {Priority.CRITICAL: "bold red", Priority.WARNING: "yellow", Priority.NOTICE: "cyan"}


def site(name: str, snapshot: Snapshot, armed_s: float, read_only: bool, narrow: bool) -> Text:
    """Whether keys may act, cluster, nodes live, GPUs, hottest, power; a narrow screen has the least of it."""
    text = Text(no_wrap=True, overflow="ellipsis")
    if armed_s > 0:
        text.append(f"ARMED {armed_s:.0f} s ", "bold reverse red")
    else:
        text.append("RO " if narrow else "READ-ONLY ", "bold green")
    if read_only and not narrow:
        text.append("(fixed) ", "dim")
    if not narrow:
        text.append(f" {name}  ", "bold")
    live = sum(n.state is NodeState.LIVE for n in snapshot.nodes)
    nodes = f"{live}/{len(snapshot.nodes)}{'' if narrow else ' nodes'}"
    text.append(nodes, "" if live == len(snapshot.nodes) else "bold red")
    celsius, watts = snapshot.gpus["temperature_c"], snapshot.gpus["power_w"]
    hottest = float(np.nanmax(celsius)) if np.any(~np.isnan(celsius)) else None
    total = float(np.nansum(watts)) / 1000 if np.any(~np.isnan(watts)) else None
    if narrow:
        text.append(f" {number(hottest, 0, 'C')} {number(total, 1, 'kW')} {name}")
    else:
        text.append(
            f"  {int((~np.isnan(celsius)).sum())} GPUs  max {number(hottest, 0, 'C')}  {number(total, 1, 'kW')}"
        )
    return text


def legend(metric: Metric) -> Text:
    """The metric that colours the racks, and its span from low to high."""
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{metric.title} ", "bold")
    text.append(f"{metric.cell(metric.low).strip()} ")
    for level in range(1, LEVELS, 4):
        text.append(" ", style_of(level, False, False))
    text.append(f" {metric.cell(metric.high).strip()} {metric.unit}")
    return text


def job(status: JobStatus | None, others: int, now: float) -> Text:
    """Name, step, step time, tokens/s, loss, microbatch and split of the job that the keys act on."""
    text = Text(no_wrap=True, overflow="ellipsis")
    if status is None:
        text.append(
            "No job: a trainer that uses rackside_hook on one of these nodes appears here (rackside hook).", "dim"
        )
        return text
    text.append(status.name, "bold")
    if others:
        text.append(f" (+{others}, s)", "dim")
    if not status.attached:
        text.append(f" gone: {status.reason}", "bold red")
        return text
    if status.paused_until is not None:
        text.append(f"  paused, goes on in {age(max(0.0, status.paused_until - now))}", "bold yellow")
    uneven = len(set(status.microbatches)) > 1
    split = f"{min(status.microbatches)}-{max(status.microbatches)}" if uneven else str(status.microbatches[0])
    text.append(
        f"  step {status.step}  {number(status.step_s, 2, 's')}  {large(status.tokens_per_s)} tok/s"
        f"  loss {number(status.loss, 3)}  microbatch {status.microbatch} x {split}"
    )
    if (
        status.paused_until is None
        and status.last_step is not None
        and status.step_s
        and now - status.last_step > max(10.0, 5 * status.step_s)
    ):
        text.append(f"  no step for {age(now - status.last_step)}", "bold red")
    return text


def top_alarm(alarms: Sequence[Alarm], now: float, here: str = "") -> Text:
    """The most urgent alarm and how many more, new ones before those that were seen; without any, `here`: what the
    cursor is on, for a screen that has no other room for it."""
    text = Text(no_wrap=True, overflow="ellipsis")
    if not alarms:
        text.append(f"{here}  " if here else "")
        text.append("No alarms.", "dim")
        return text
    first, new = alarms[0], sum(a.state is not State.ACKNOWLEDGED for a in alarms)
    more = f"  (+{max(0, new - 1)} new, {len(alarms) - new} seen, key 4)" if len(alarms) > 1 else ""
    seen = first.state is State.ACKNOWLEDGED
    text.append(
        f"{first.priority.name}{' seen' if seen else ''} {first.text}", "dim" if seen else ALARM_STYLE[first.priority]
    )
    text.append(f"  {age(max(0.0, now - first.since))}{more}", "dim")
    return text


def last_action(tickets: Sequence[Ticket]) -> Text:
    """The newest action and where it stands."""
    text = Text(no_wrap=True, overflow="ellipsis")
    if tickets:
        text.append(f"{tickets[-1].line}", STAGE_STYLE[tickets[-1].stage])
    else:
        text.append(DASH, "dim")
    return text
