"""The next start of a running job, from the clocks and the heat of its rack now."""

from __future__ import annotations

import numpy as np

from engine.control import load
from engine.job.status import JobStatus
from engine.model.predict import PlanError
from engine.plan.conditions import Conditions, under
from engine.plan.restart import Restart, restart
from engine.profile import Cluster, ProfileError, catalog
from engine.telemetry.snapshot import Snapshot


def restart_of(job: JobStatus, cluster: Cluster, snapshot: Snapshot, now: Conditions) -> Restart:
    """Its plan as it should be. ProfileError where the job names no plan, or one that does not run here."""
    found = load.planned(job)
    if found is None:
        raise ProfileError(f"{job.name} names no model and plan to its hook: there is nothing to plan a restart with.")
    clocks = load.column(cluster, snapshot, "sm_clock_mhz")
    replica = load.replica_rows(job, cluster, snapshot, found.plan)
    if replica is not None:
        clocks = np.where(replica >= 0, clocks, np.nan)  # a GPU that idles is not slow
    fastest, shares, first = float(np.nanmax(clocks, initial=1.0)), {}, 0
    for node in cluster.nodes:
        mine = clocks[first : first + cluster.type_of(node).gpus]
        first += len(mine)
        if not np.isnan(mine).all():
            shares[node.name] = float(np.nanmin(mine)) / fastest
    try:
        return restart(found.model, under(cluster, now), catalog.stack(found.plan.stack), found.plan, shares)
    except PlanError as error:
        raise ProfileError(f"{job.name}: {error}") from None
