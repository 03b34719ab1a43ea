"""Limits that this console holds, and those of them that no longer read back: a reset, or somebody else's hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from engine.act.action import NodeAction, Stage, Throttle, Ticket
from engine.act.alarm import Priority, Raised
from engine.telemetry.snapshot import NodeState, Snapshot

SETTLED_S = 15.0
"""Seconds from a command to a reading that must show it."""
TOLERANCE_W = 1.0
KEPT = 100
"""Actions that a console remembers, and shows; the log has all."""


def leased(tickets: Iterable[Ticket]) -> set[tuple[str, int]]:
    """Each (node, GPU index) that gets its limit or clock back when this console ends."""
    return {
        (node, index)
        for ticket in _in_force(tickets)
        if isinstance(action := ticket.proposal.action, NodeAction) and not action.permanent
        for node, of_node in action.values.items()
        for index in of_node
    }


def limits(tickets: Iterable[Ticket]) -> dict[tuple[str, int], tuple[float, float]]:
    """(watts, since when) of each (node, GPU index) whose limit was set here; `tickets` oldest first."""
    return {
        (node, index): (watts, ticket.time)
        for ticket in _in_force(tickets)
        if isinstance(action := ticket.proposal.action, Throttle)
        for node, of_node in action.limits_w.items()
        for index, watts in of_node.items()
    }


def kept(tickets: Sequence[Ticket]) -> tuple[Ticket, ...]:
    """The newest, `tickets` oldest first; of older ones those on their way or that hold what no later one has set."""
    if len(tickets) <= KEPT:
        return tuple(tickets)
    in_force, later, out = {t.id for t in _in_force(tickets)}, set[tuple[type, str, int]](), []
    for place, ticket in enumerate(reversed(tickets)):
        action, holds = ticket.proposal.action, set[tuple[type, str, int]]()
        if isinstance(action, NodeAction) and ticket.id in in_force:
            holds = {(type(action), node, index) for node, of_node in action.values.items() for index in of_node}
        if place < KEPT or not ticket.stage.ended or holds - later:
            out.append(ticket)
        later |= holds
    return tuple(reversed(out))


def _in_force(tickets: Iterable[Ticket]) -> list[Ticket]:
    """What is done and neither undone nor itself an undoing."""
    done = [t for t in tickets if t.stage is Stage.DONE]
    undone = {t.proposal.undoes for t in done}
    return [t for t in done if not t.proposal.undoes and t.id not in undone]


def drifted(snapshot: Snapshot, tickets: Iterable[Ticket]) -> list[Raised]:
    """An alarm for each node where a limit set here reads otherwise."""
    held, gpus, out = limits(tickets), snapshot.gpus, []
    for node in snapshot.nodes if held else ():
        if node.state is not NodeState.LIVE:
            continue
        off = []
        for row in node.rows:
            watts, since = held.get((node.name, gpus.index[row]), (float("nan"), snapshot.time))
            reads = float(gpus["power_limit_w"][row])
            if snapshot.time - since > SETTLED_S and not np.isnan(reads) and abs(reads - watts) > TOLERANCE_W:
                off.append(f"GPU {gpus.index[row]} reads {reads:.0f} W, not {watts:.0f}")
        if off:
            more = f" and {len(off) - 1} more" if len(off) > 1 else ""
            text = (
                f"{node.name}: a limit set here is gone: {off[0]}{more}. Somebody else changed it, or a GPU was reset"
            )
            out.append(Raised(f"limit:{node.name}", Priority.WARNING, text, node.name))
    return out
