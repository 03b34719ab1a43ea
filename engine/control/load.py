"""Where a job meets the rack: which GPU row runs which replica, and what the cost model says of the job's plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from engine.act import effect
from engine.act.effect import Load, Rack
from engine.act.propose import JobView, Target
from engine.job.status import JobStatus
from engine.model import pace
from engine.model.predict import PlanError, Prediction, predict, with_microbatch
from engine.model.thermal import Chassis
from engine.profile import Cluster, Model, Plan, ProfileError, catalog
from engine.telemetry.snapshot import NodeState, Snapshot


@dataclass(frozen=True)
class Planned:
    """A job's own model and plan, as its trainer told its hook."""

    model: Model
    plan: Plan


def planned(status: JobStatus) -> Planned | None:
    """The model profile and plan that the job names, at its present microbatch; None when it names none."""
    told = status.plan or {}
    try:
        model = catalog.model(str(told["model"]))
        plan = msgspec.convert(_plain(told["plan"]), Plan)
    except (KeyError, TypeError, ProfileError, msgspec.ValidationError):
        return None
    return Planned(model, with_microbatch(plan, status.microbatch))


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value


def predicted(found: Planned, cluster: Cluster) -> Prediction | str:
    """The cost model's word on the job's plan, or the sentence why it has none."""
    try:
        return predict(found.model, found.plan, cluster, catalog.stack(found.plan.stack))
    except (PlanError, ProfileError) as error:
        return str(error)


def column(cluster: Cluster, snapshot: Snapshot, name: str) -> effect.Floats:
    """One metric, one row a GPU of the inventory; NaN where a node has not answered."""
    ours, theirs = inventory_rows(cluster, snapshot)
    out = np.full(cluster.gpus, np.nan)
    out[ours] = snapshot.gpus[name][theirs]
    return out


def rack_now(cluster: Cluster, snapshot: Snapshot, settled_c: effect.Floats, chassis: Chassis) -> Rack:
    """The measured rack; `settled_c` and the learned `chassis` come from the twin that runs beside the sensors."""
    return effect.rack_of(
        cluster,
        chassis,
        column(cluster, snapshot, "temperature_c"),
        settled_c,
        column(cluster, snapshot, "power_w"),
        column(cluster, snapshot, "power_limit_w"),
        column(cluster, snapshot, "sm_clock_mhz"),
    )


def inventory_rows(cluster: Cluster, snapshot: Snapshot) -> tuple[Rows, Rows]:
    """Pairs of (row in the inventory, row in the snapshot): a node may show fewer GPUs than its type has."""
    global _last_rows
    if _last_rows is None or _last_rows[0] is not cluster or _last_rows[1] is not snapshot.nodes:
        _last_rows = (cluster, snapshot.nodes, _rows(cluster, snapshot))
    return _last_rows[2]


Rows = npt.NDArray[np.intp]
READ = (NodeState.LIVE, NodeState.STALE)
_last_rows: tuple[Cluster, object, tuple[Rows, Rows]] | None = None
"""Those of the snapshot that was asked for last: each is asked for a dozen times."""


def _rows(cluster: Cluster, snapshot: Snapshot) -> tuple[Rows, Rows]:
    each = [
        (status.rows.start, min(len(status.rows), gpus) if status.state in READ else 0, gpus)
        for status, gpus in zip(snapshot.nodes, (cluster.types[n.type].gpus for n in cluster.nodes), strict=True)
    ]
    start, count, gpus_of = np.array(each, np.intp).reshape(-1, 3).T
    first = np.concatenate(([0], np.cumsum(gpus_of)[:-1]))
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return np.repeat(first, count) + within, np.repeat(start, count) + within


def replica_rows(status: JobStatus, cluster: Cluster, snapshot: Snapshot, plan: Plan | None) -> effect.Ints | None:
    """The data-parallel rank of each inventory row (-1: none), or None when the job does not say enough.

    From the ranks' own words (host and device) where each rank is one GPU; else from the plan's rank order, if the
    job fills the cluster.
    """
    want = cluster.gpus
    if plan is not None and plan.model_gpus * status.world_size == want and plan.model_gpus > 1:
        return pace.replica_of_gpu(plan, status.world_size, want)
    if not status.ranks or len(status.ranks) != status.world_size:
        return None
    hosts = {s.hostname: i for i, s in enumerate(snapshot.nodes) if s.hostname}
    starts = np.cumsum([0] + [cluster.type_of(n).gpus for n in cluster.nodes])
    out = np.full(want, -1, np.int64)
    for place in status.ranks:
        node = hosts.get(place.host)
        slot = _slot(snapshot, node, place.device) if node is not None else None
        if node is None or slot is None or slot >= starts[node + 1] - starts[node]:
            return None
        out[starts[node] + slot] = place.rank
    return out


def _slot(snapshot: Snapshot, node: int, device: str | None) -> int | None:
    """A device named by index, UUID or PCI bus id, as a slot of the node."""
    if device is None:
        return None
    for slot, row in enumerate(snapshot.nodes[node].rows):
        bus = str(snapshot.gpus.bus_id[row]).lower()
        if (
            device == str(slot)
            or device == snapshot.gpus.uuid[row]
            or (bus and bus.endswith(device.lower().lstrip("0")))
        ):
            return slot
    return None


MEASURED = (
    "The job names no model profile: its step is taken to follow the busiest rank's microbatches and the SM clock."
)


def load_of(status: JobStatus, cluster: Cluster, snapshot: Snapshot) -> Load | None:
    """The job's load on the rack: its plan's pace by the cost model, else what its measured step allows to say.

    None when its ranks' places are not known or no step has ended yet.
    """
    if not status.step_s:
        return None
    found = planned(status)
    replica = replica_rows(status, cluster, snapshot, found.plan if found else None)
    if replica is None:
        return None
    tokens = status.tokens_per_s * status.step_s if status.tokens_per_s else None
    microbatches = np.asarray(status.microbatches, np.int64)
    prediction = predicted(found, cluster) if found else ""
    if isinstance(prediction, str) or prediction.dp != status.world_size:
        each = pace.Pace(status.step_s / max(1, int(microbatches.max())), 0.0, 0.0, 0.0)
        return Load(each, replica, microbatches, status.step_s, tokens, assumes=MEASURED)
    return Load(prediction.pace, replica, microbatches, status.step_s, tokens, prediction.memory.total_gib)


def job_view(status: JobStatus, cluster: Cluster, snapshot: Snapshot) -> JobView:
    """What a proposal needs of the job."""
    load, found = load_of(status, cluster, snapshot), planned(status)

    def reload(microbatch: int) -> Load | str:
        assert load is not None
        assert found is not None
        prediction = predicted(Planned(found.model, with_microbatch(found.plan, microbatch)), cluster)
        if isinstance(prediction, str):
            return f"The cost model has no answer: {prediction}"
        if not prediction.fits:
            return f"The cost model says it does not fit: {-prediction.headroom_gib:.0f} GiB too much a GPU."
        even = np.full(prediction.dp, prediction.microbatches, np.int64)
        return replace(load, pace=prediction.pace, microbatches=even, memory_gib=prediction.memory.total_gib)

    return JobView(
        name=status.name,
        global_batch=status.global_batch,
        microbatch=status.microbatch,
        microbatches=status.microbatches,
        can=status.can if status.attached else frozenset(),
        load=load,
        max_pause_s=status.max_pause_s,
        paused=status.paused_until is not None,
        reload=reload if load is not None and found is not None and not load.assumes else None,
    )


def target(label: str, cells: list[tuple[int, int]], cluster: Cluster, snapshot: Snapshot) -> Target:
    """A selection of (node number, slot) as addressable rows with the limits their boards allow."""
    starts = np.cumsum([0] + [cluster.type_of(n).gpus for n in cluster.nodes])
    rows, nodes, index, low, high, usual, most, reachable = [], [], [], [], [], [], [], []
    for node, slot in cells:
        status, device = snapshot.nodes[node], cluster.device_of(cluster.nodes[node])
        read = slot < len(status.rows)
        row = status.rows[slot] if read else 0
        own_low = float(snapshot.gpus["power_limit_min_w"][row]) if read else float("nan")
        own_high = float(snapshot.gpus["power_limit_max_w"][row]) if read else float("nan")
        rows.append(int(starts[node]) + slot)
        nodes.append(cluster.nodes[node].name)
        index.append(int(snapshot.gpus.index[row]) if read else slot)
        low.append(device.power_limit_w.min if np.isnan(own_low) else own_low)
        high.append(device.power_limit_w.max if np.isnan(own_high) else own_high)
        own_usual = float(snapshot.gpus["power_limit_default_w"][row]) if read else float("nan")
        usual.append(device.power_limit_w.default if np.isnan(own_usual) else own_usual)
        own_most = float(snapshot.gpus["sm_clock_max_mhz"][row]) if read else float("nan")
        most.append(device.clock.max if np.isnan(own_most) else own_most)
        reachable.append(read and status.state is NodeState.LIVE)
    return Target(
        label,
        tuple(rows),
        tuple(nodes),
        tuple(index),
        tuple(low),
        tuple(high),
        tuple(usual),
        tuple(most),
        tuple(reachable),
    )
