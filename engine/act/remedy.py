"""A guard's measure as a proposal, from the rack and the job as they are."""

from __future__ import annotations

import numpy as np

from engine.act import effect, propose
from engine.act.action import ClockLock, Microbatch, Outlook, Proposal, Rebalance, Throttle
from engine.act.effect import Change, Load, Rack
from engine.act.guard import Wish, share_at
from engine.act.propose import JobView, Target
from engine.profile.policy import Measure

NO_JOB = "There is no job with a hook to change."


def proposal(
    measure: Measure, wish: Wish, rack: Rack, load: Load | None, job: JobView | None, target: Target, limit_c: float
) -> Proposal | None:
    """What a measure comes to; None for advice that nobody but a person can carry out. `limit_c`: where the hottest
    device in the job slows itself."""
    if measure.drain:
        return None
    if measure.power_limit_share is not None:
        return propose.throttle(rack, load, target, share=share_at(measure.power_limit_share, wish.level))
    if measure.sm_clock_share is not None:
        most = min(target.max_mhz, default=0.0)
        return propose.clock_lock(rack, load, target, to_mhz=share_at(measure.sm_clock_share, wish.level) * most)
    if job is None:
        nothing = Outlook(None, None, None, None)
        return Proposal(measure.text(), Rebalance("", ()), nothing, nothing, "", refusal=NO_JOB)
    if measure.microbatch is not None:
        return propose.microbatch(rack, job, max(1, job.microbatch // 2))
    if measure.rebalance is not None:
        return propose.rebalance(rack, job, limit_c - propose.HOT_MARGIN_K, int(measure.rebalance))
    return propose.pause(rack, job, measure.pause_s or 0.0)


def stays_cool(
    action: object, rack: Rack, load: Load | None, job: JobView | None, target: Target, below_c: float
) -> bool:
    """Whether no GPU of the rack would settle above `below_c` once what the guard did is taken back by `action`."""
    change = Change()
    if isinstance(action, Throttle):
        limit = rack.limit_w.copy()
        limit[list(target.rows)] = target.default_w
        change = Change(limit_w=limit)
    elif isinstance(action, Rebalance) and load is not None:
        change = Change(load=effect.with_microbatches(load, action.microbatches))
    elif isinstance(action, Microbatch) and load is not None and job is not None and job.reload is not None:
        found = job.reload(action.microbatch)
        change = Change(load=found) if isinstance(found, Load) else change
    elif isinstance(action, ClockLock):
        return True  # the next look sees what came of it: a lock's release has no model of what held before it
    _, celsius = effect.settle(rack, load, change)
    known = celsius[~np.isnan(celsius)]
    return bool(len(known)) and float(known.max()) < below_c
