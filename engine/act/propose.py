"""From a wish to a proposal: what exactly would be sent, to whom, with which effect, or why it cannot be done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

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
)
from engine.act.effect import Change, Load, Rack

LEASED = "Leased: restored when this console ends or loses the node."
PERMANENT = "PERMANENT: it stays when this console ends, until it is undone or the driver is loaded anew."
LEAST_CLOCK, CLOCK_GRID_MHZ = 0.2, 15.0
"""Lowest lock as a share of a board's highest clock; clocks come in steps."""
HOT_MARGIN_K = 6.0
"""A rank counts as hot when its hottest GPU is, or is headed, this close to where it slows itself."""
COLD_MARGIN_K = 5.0
"""A GPU may take work when it is this much below the threshold above which GPUs give work away."""


@dataclass(frozen=True)
class Target:
    """GPU rows of a selection, with what is needed to address them, and what their boards allow."""

    label: str
    rows: tuple[int, ...]
    node: tuple[str, ...]
    index: tuple[int, ...]
    min_w: tuple[float, ...]
    max_w: tuple[float, ...]
    default_w: tuple[float, ...]
    max_mhz: tuple[float, ...]
    reachable: tuple[bool, ...]


@dataclass(frozen=True)
class JobView:
    """What a proposal needs to know of a job: its settings as the hook reports them, and its load on the rack."""

    name: str
    global_batch: int
    microbatch: int
    microbatches: tuple[int, ...]
    can: frozenset[str]
    load: Load | None
    max_pause_s: float = 0.0
    paused: bool = False
    reload: Callable[[int], Load | str] | None = None
    """The load with another microbatch from the cost model, or a sentence why not."""


def throttle(
    rack: Rack,
    load: Load | None,
    target: Target,
    step_w: float = 0.0,
    to_w: float | None = None,
    permanent: bool = False,
    share: float | None = None,
) -> Proposal:
    """Lower (or with a negative step raise) each target's limit by `step_w`, or set it to `to_w` or to a share of its
    default, within what its board allows."""
    limits: dict[str, dict[int, float]] = {}
    wanted = rack.limit_w.copy()
    blind = clamped = 0
    for row, node, index, low, high, usual, reachable in zip(
        target.rows,
        target.node,
        target.index,
        target.min_w,
        target.max_w,
        target.default_w,
        target.reachable,
        strict=True,
    ):
        now_w = float(rack.limit_w[row])
        if not reachable or np.isnan(now_w) or np.isnan(low) or np.isnan(high):
            blind += 1
            continue
        asked = round(share * usual) if share is not None else now_w - step_w if to_w is None else to_w
        value = min(max(asked, low), high)
        clamped += value != asked
        if value != now_w:
            limits.setdefault(node, {})[index] = value
            wanted[row] = value
    count = sum(map(len, limits.values()))
    values = sorted({w for of_node in limits.values() for w in of_node.values()})
    span = f"{values[0]:.0f}" if len(values) == 1 else f"{values[0]:.0f}-{values[-1]:.0f}" if values else "?"
    notes = _notes(
        (clamped, f"{clamped} of {len(target.rows)} GPUs stop at the limit their board allows."),
        (blind, f"{blind} of {len(target.rows)} GPUs are left out: no reading of their limit now."),
    )
    refusal = ""
    if not count:
        refusal = (
            f"None of {target.label} can be read now; wait until its node is live."
            if blind
            else f"The limit of {target.label} is {to_w:.0f} W already."
            if to_w is not None
            else f"The limit of {target.label} is already as {'low' if step_w > 0 else 'high'} as the board allows."
        )
    return Proposal(
        title=f"Power limit of {target.label} to {span} W",
        action=Throttle(limits, permanent=permanent),
        before=effect.now(rack, load),
        after=effect.after(rack, load, Change(limit_w=wanted)),
        scope=f"{count} GPU{'s' * (count != 1)} on {len(limits)} node{'s' * (len(limits) != 1)}",
        refusal=refusal,
        notes=(
            *notes,
            *_notes((bool(load and load.assumes), load.assumes if load else "")),
            PERMANENT if permanent else LEASED,
        ),
    )


def clock_lock(
    rack: Rack,
    load: Load | None,
    target: Target,
    share: float = 1.0,
    to_mhz: float | None = None,
    permanent: bool = False,
) -> Proposal:
    """Lock each target's highest SM clock at a share of what it runs at now, or at `to_mhz`, within what its board
    allows."""
    clocks: dict[str, dict[int, float | None]] = {}
    lock = np.full_like(rack.clock_mhz, np.inf)
    for row, node, index, most, reachable in zip(
        target.rows, target.node, target.index, target.max_mhz, target.reachable, strict=True
    ):
        now_mhz = float(rack.clock_mhz[row])
        if not reachable or np.isnan(now_mhz):
            continue
        asked = share * now_mhz if to_mhz is None else to_mhz
        lock[row] = round(min(max(asked, LEAST_CLOCK * most), most) / CLOCK_GRID_MHZ) * CLOCK_GRID_MHZ
        clocks.setdefault(node, {})[index] = float(lock[row])
    count = sum(map(len, clocks.values()))
    values = sorted({mhz for of_node in clocks.values() for mhz in of_node.values() if mhz is not None})
    span = f"{values[0]:.0f}" if len(values) == 1 else f"{values[0]:.0f}-{values[-1]:.0f}" if values else "?"
    left_out = len(target.rows) - count
    return Proposal(
        title=f"SM clock of {target.label} at most {span} MHz",
        action=ClockLock(clocks, permanent=permanent),
        before=effect.now(rack, load),
        after=effect.after(rack, load, Change(lock_mhz=lock)),
        scope=f"{count} GPU{'s' * (count != 1)} on {len(clocks)} node{'s' * (len(clocks) != 1)}",
        refusal="" if count else f"None of {target.label} can be read now; wait until its node is live.",
        notes=(
            *_notes((left_out, f"{left_out} of {len(target.rows)} GPUs are left out: no reading of their clock now.")),
            *_notes((bool(load and load.assumes), load.assumes if load else "")),
            "A lock that somebody else set before cannot be read: undoing resets the clock.",
            PERMANENT if permanent else LEASED,
        ),
    )


def pause(rack: Rack, job: JobView, seconds: float) -> Proposal:
    """Let the job wait at its next step boundary; it goes on by itself."""
    refusal = _unable(job, "pause")
    if not refusal and job.paused:
        refusal = f"{job.name} is paused already."
    if not refusal and not 0 < seconds <= job.max_pause_s:
        refusal = f"{job.name} takes pauses of at most {job.max_pause_s:.0f} s."
    before = effect.now(rack, job.load)
    lost = before.tokens_per_s * seconds if before.tokens_per_s else None
    return Proposal(
        title=f"Pause {job.name} for {seconds:.0f} s",
        action=Pause(job.name, seconds),
        before=before,
        after=replace(effect.waiting(rack), memory_gib=before.memory_gib),
        scope=f"{len(job.microbatches)} ranks at one step",
        refusal=refusal,
        notes=(
            *_notes((lost is not None, f"Some {(lost or 0) / 1e6:,.1f} M tokens are trained later.")),
            "It goes on by itself when the time is up; ranks without a hook wait in their collectives meanwhile.",
        ),
    )


def resume(rack: Rack, job: JobView) -> Proposal:
    """Let a paused job go on now."""
    now = effect.now(rack, job.load)
    return Proposal(
        title=f"Resume {job.name}",
        action=Resume(job.name),
        before=replace(now, step_s=None, tokens_per_s=0.0),
        after=replace(now, peak_c=None, power_w=None),  # what it drew before the pause is not measured now
        scope=f"{len(job.microbatches)} ranks at one step",
        refusal=_unable(job, "resume") or ("" if job.paused else f"{job.name} is not paused."),
        notes=("Its step is taken to be what it was before the pause.",),
    )


def microbatch(rack: Rack, job: JobView, value: int) -> Proposal:
    """Set the microbatch; the hook accumulates more or fewer of them, so that the global batch stays."""
    refusal, load, notes = _unable(job, "microbatch"), job.load, []
    if not refusal:
        refusal = _microbatch_refusal(job, value)
    if not refusal and job.reload and job.load:
        found = job.reload(value)
        if isinstance(found, str):
            notes.append(found)
            load = None
        else:
            load = found
    elif not refusal:
        notes.append("No cost model for this job (it names no model profile): the effect is not predicted.")
        load = None
    before = effect.now(rack, job.load)
    after = effect.after(rack, job.load, Change(load=load)) if job.load and load else _unknown()
    return Proposal(
        title=f"Microbatch of {job.name} from {job.microbatch} to {value}",
        action=Microbatch(job.name, value),
        before=before,
        after=after,
        scope=f"{len(job.microbatches)} ranks at one step",
        refusal=refusal,
        notes=(*notes, "Same samples and global batch: the parameters stay the same up to rounding."),
    )


def rebalance(rack: Rack, job: JobView, threshold_c: float, moves: int = 1) -> Proposal:
    """Move up to `moves` microbatches from each hot rank to a cold one; the total stays.

    Hot is above `threshold_c`, cold below it by COLD_MARGIN_K. A move that the prediction sees heat its receiver to
    the threshold is not made. Without a hot or without a cold rank nothing moves, and the proposal says so.
    """
    refusal = _unable(job, "rebalance")
    counts = list(job.microbatches)
    load = job.load
    if not refusal and load is None:
        refusal = f"{job.name} does not say which rank runs on which GPU: there is no telling which ranks are hot."
    moved = 0
    if not refusal and load is not None:
        hottest = hottest_by_rank(rack, load)
        hot = [int(r) for r in np.argsort(-hottest) if hottest[r] > threshold_c]
        # Those with the least to do first, so that one receiver is not loaded twice while another has no more yet.
        cold = [int(r) for r in np.lexsort((hottest, np.asarray(counts))) if hottest[r] < threshold_c - COLD_MARGIN_K]
        if not hot:
            peak = np.nanmax(hottest) if np.any(~np.isnan(hottest)) else float("nan")
            refusal = (
                f"No rank is above {threshold_c:.0f} C or headed there (the hottest: {peak:.0f} C): nothing to move."
            )
        elif not cold:
            refusal = f"No rank is below {threshold_c - COLD_MARGIN_K:.0f} C: there is no cold GPU to take work."
        else:
            counts, moved = _move(rack, load, counts, hot, cold, threshold_c, moves)
            if not moved:
                refusal = f"Every cold rank would itself cross {threshold_c:.0f} C with more work: nothing is moved."
    after = (
        effect.after(rack, load, Change(load=effect.with_microbatches(load, tuple(counts))))
        if load is not None and moved
        else _unknown()
    )
    return Proposal(
        title=f"Move {moved or 'no'} microbatch{'es' * (moved != 1)} of {job.name} from hot to cold ranks",
        action=Rebalance(job.name, tuple(counts)),
        before=effect.now(rack, load),
        after=after,
        scope=f"{len(counts)} ranks at one step, {sum(counts)} microbatches in all as before",
        refusal=refusal,
        notes=(
            *_notes((moved and bool(load and load.assumes), load.assumes if load else "")),
            "Gradient weights follow the samples: the parameters stay the same up to rounding.",
        ),
    )


def undo(done: Proposal, put_back: Action, ticket_id: str, rack: Rack, load: Load | None) -> Proposal:
    """The proposal that puts back what a done action changed."""
    return Proposal(
        title=f"Undo: {done.title}",
        action=put_back,
        before=effect.now(rack, load),
        after=done.before,
        scope=done.scope,
        notes=("Predicted as it was before the action.",),
        undoes=ticket_id,
    )


def hottest_by_rank(rack: Rack, load: Load) -> effect.Floats:
    """The hottest GPU of each replica, by where it is or where it is headed, C; NaN where none was read."""
    out, celsius = np.full(len(load.microbatches), np.nan), np.fmax(rack.temperature_c, rack.settled_c)
    for rank in range(len(out)):
        known = celsius[(load.replica == rank) & ~np.isnan(celsius)]
        out[rank] = known.max() if len(known) else np.nan
    return out


def _move(
    rack: Rack, load: Load, counts: list[int], hot: Sequence[int], cold: Sequence[int], threshold_c: float, moves: int
) -> tuple[list[int], int]:
    """Pair each hot rank with a cold one and move; every receiver is checked by prediction before it receives."""
    moved = 0
    free = list(cold)
    for giver in hot:
        for receiver in list(free):
            trial = list(counts)
            amount = min(moves, trial[giver] - 1)
            if amount < 1:
                break
            trial[giver] -= amount
            trial[receiver] += amount
            _, celsius = effect.settle(rack, load, Change(load=effect.with_microbatches(load, tuple(trial))))
            theirs = celsius[(load.replica == receiver) & ~np.isnan(celsius)]
            free.remove(receiver)
            if len(theirs) and theirs.max() < threshold_c:
                counts, moved = trial, moved + amount
                break
    return counts, moved


def _microbatch_refusal(job: JobView, value: int) -> str:
    ranks = len(job.microbatches)
    fits = [m for m in range(1, job.global_batch + 1) if job.global_batch % m == 0 and job.global_batch // m >= ranks]
    if value == job.microbatch:
        return f"The microbatch of {job.name} is {value} already."
    if value not in fits:
        near = ", ".join(str(m) for m in fits[:12])
        return f"{value} does not fit: the global batch {job.global_batch} on {ranks} ranks allows {near}."
    return ""


def _unable(job: JobView, what: str) -> str:
    return "" if what in job.can else f"The hook of {job.name} does not offer {what}; its trainer would have to."


def _notes(*pairs: tuple[int, str]) -> tuple[str, ...]:
    return tuple(text for count, text in pairs if count)


def _unknown() -> Outlook:
    return Outlook(None, None, None, None)
