"""What a log line of an earlier console allows to put back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from engine.act import effect
from engine.act.action import (
    Action,
    ClockLock,
    Microbatch,
    Outlook,
    Pause,
    Proposal,
    Rebalance,
    Resume,
    Throttle,
    Unsuspend,
)
from engine.act.effect import Load, Rack
from engine.profile import ProfileError

KINDS: dict[str, type[Action]] = {
    kind.__name__.lower(): kind for kind in (Throttle, ClockLock, Microbatch, Rebalance, Pause, Resume, Unsuspend)
}


def last_in_force(entries: Iterable[dict[str, Any]], cluster: str, wanted: str | None) -> dict[str, Any]:
    """The newest entry of a cluster that is done and not undone, or the one whose id begins as `wanted` does.
    ProfileError when there is none, or it cannot be put back."""
    last: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if entry.get("cluster") == cluster and isinstance(entry.get("id"), str):
            last[entry["id"]] = entry
    named = [e for e in last.values() if wanted is None or e["id"].startswith(wanted)]
    undone = {e.get("undoes") for e in last.values() if e.get("stage") == "done"}
    done = [e for e in named if e.get("stage") == "done" and not e.get("undoes") and e["id"] not in undone]
    if wanted is not None and len(named) > 1:
        raise ProfileError(f"Several actions have an id that begins with {wanted}; give more of it.")
    if not done:
        if named and wanted is not None:
            raise ProfileError(f"'{named[0].get('title')}' is {named[0].get('stage')}: there is nothing to undo.")
        which = f" whose id begins with {wanted}" if wanted else ""
        raise ProfileError(f"The log has no action on {cluster} that is in force{which}.")
    found = done[-1]
    back = found.get("puts_back")
    if not isinstance(back, dict):
        raise ProfileError(f"'{found.get('title')}' does not say what was before it; it cannot be undone from here.")
    if back.get("restore"):
        raise ProfileError(
            f"'{found.get('title')}' was leased: the console that set it gives it back when it ends, or undo it there."
        )
    return found


def proposal(entry: dict[str, Any], now: tuple[Rack, Load | None]) -> Proposal:
    """Put back what a log line says was before."""
    back = dict(entry["puts_back"])
    kind = KINDS.get(back.pop("action", ""))
    try:
        action = msgspec.convert(back, kind, strict=False)
    except (msgspec.ValidationError, TypeError):
        raise ProfileError(f"The log's line of '{entry.get('title')}' cannot be read; undo it by hand.") from None
    return Proposal(
        title=f"Undo: {entry.get('title')}",
        action=action,
        before=effect.now(*now),
        after=_before(entry),
        scope=str(entry.get("operator", "")) + " did it",
        notes=("Predicted as it was before the action.",),
        undoes=entry["id"],
    )


def _before(entry: dict[str, Any]) -> Outlook:
    told = entry.get("predicted", {}).get("before") or {}

    def number(name: str) -> float | None:
        value = told.get(name)
        return float(value) if isinstance(value, int | float) else None

    return Outlook(number("step_s"), number("tokens_per_s"), number("peak_c"), number("power_w"), number("memory_gib"))
