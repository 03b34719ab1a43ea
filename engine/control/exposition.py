"""What rackside knows, in Prometheus's text format 0.0.4. A pure function: values in, text out.

What is not known is left out; a state of several is one series each, 1 for the one that is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.act.alarm import Alarm, Priority
from engine.control import load
from engine.job.status import JobStatus
from engine.model.forecast import HORIZON_S, Forecast
from engine.profile import Cluster
from engine.telemetry.snapshot import NodeState, Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MINUTE_S = 60.0

GPU_GAUGES = {
    "temperature_c": ("temperature_celsius", 1.0, "Temperature that was read."),
    "memory_temperature_c": ("memory_temperature_celsius", 1.0, "Temperature of the memory that was read."),
    "power_w": ("power_watts", 1.0, "Power that was read."),
    "power_limit_w": ("power_limit_watts", 1.0, "Power limit that was read."),
    "sm_clock_mhz": ("sm_clock_hertz", 1e6, "Clock of the SMs (or compute units) that was read."),
    "memory_clock_mhz": ("memory_clock_hertz", 1e6, "Clock of the memory that was read."),
    "utilization_pct": ("utilization_ratio", 0.01, "Share of time in which a kernel ran."),
    "memory_used_mib": ("memory_used_bytes", 2.0**20, "Memory in use."),
    "memory_total_mib": ("memory_total_bytes", 2.0**20, "Memory in all."),
    "held_by_power": ("held_by_power_ratio", 1.0, "Share of the sample in which a power limit held the clock."),
    "held_by_heat": ("held_by_heat_ratio", 1.0, "Share of the sample in which heat held the clock."),
}
"""Our metric: name, factor to base units, help."""
GPU_COUNTERS = {
    "energy_j": ("energy_joules_total", 1.0, "Energy since the driver started."),
    "ecc_corrected": ("ecc_corrected_total", 1.0, "Corrected ECC errors since the driver started."),
    "ecc_uncorrected": ("ecc_uncorrected_total", 1.0, "Uncorrected ECC errors since the driver started."),
    "pcie_replays": ("pcie_replays_total", 1.0, "PCIe replays since the driver started."),
}

Labels = Mapping[str, str]


@dataclass
class Page:
    """Families of samples, each with its head before its first sample."""

    lines: list[str] = field(default_factory=list)

    def family(self, name: str, kind: str, text: str, samples: Iterable[tuple[Labels, float]]) -> None:
        """Add a family; samples without a number are left out, and with them a family that has no other."""
        rows = [f"rackside_{name}{_braced(of)} {_number(value)}" for of, value in samples if not math.isnan(value)]
        if rows:
            self.lines += [f"# HELP rackside_{name} {_help(text)}", f"# TYPE rackside_{name} {kind}", *rows]

    @property
    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def exposition(
    cluster: Cluster,
    snapshot: Snapshot,
    alarms: Sequence[Alarm],
    jobs: Sequence[JobStatus],
    forecast: Forecast | None,
) -> str:
    """The whole page. `forecast` has the inventory's rows."""
    page = Page()
    page.family("snapshot_time_seconds", "gauge", "When this was so, unix time.", [({}, snapshot.time)])
    _nodes(page, snapshot)
    _gpus(page, snapshot)
    if forecast is not None:
        _forecasts(page, cluster, snapshot, forecast)
    _alarms(page, alarms)
    _jobs(page, jobs)
    return page.text


def _nodes(page: Page, snapshot: Snapshot) -> None:
    nodes = snapshot.nodes
    states = [({"node": n.name, "state": s.value}, float(n.state is s)) for n in nodes for s in NodeState]
    page.family("node_state", "gauge", "1 for the state that the node is in.", states)
    ages = [({"node": n.name}, max(0.0, snapshot.time - n.last_sample)) for n in nodes if n.last_sample is not None]
    page.family("node_sample_age_seconds", "gauge", "Age of the newest sample.", ages)
    page.family("node_samples_total", "counter", "Samples taken.", [({"node": n.name}, n.samples) for n in nodes])
    dropped = [({"node": n.name}, float(n.dropped)) for n in nodes]
    page.family("node_readings_dropped_total", "counter", "Readings that no sensor can mean.", dropped)
    page.family("node_load1", "gauge", "One-minute load of the host.", [({"node": n.name}, n.load) for n in nodes])


def _gpus(page: Page, snapshot: Snapshot) -> None:
    """Readings of nodes that are live: an old reading must not look like a new one to whoever scrapes this."""
    table = snapshot.gpus
    rows = [row for n in snapshot.nodes if n.state is NodeState.LIVE for row in n.rows]
    of = [({"node": table.node[r], "gpu": str(table.index[r]), "uuid": table.uuid[r]}, r) for r in rows]
    for kind, names in (("gauge", GPU_GAUGES), ("counter", GPU_COUNTERS)):
        for metric, (name, factor, text) in names.items():
            values = table[metric]
            page.family(f"gpu_{name}", kind, text, [(gpu, factor * float(values[r])) for gpu, r in of])


def _forecasts(page: Page, cluster: Cluster, snapshot: Snapshot, found: Forecast) -> None:
    ours, theirs = load.inventory_rows(cluster, snapshot)
    table = snapshot.gpus
    of = [({"node": table.node[t], "gpu": str(table.index[t])}, o) for o, t in zip(ours, theirs, strict=True)]
    known = np.isfinite(found.settled_c)
    minute = int(np.searchsorted(found.times_s, MINUTE_S))

    def each(value: Callable[[int], float]) -> list[tuple[Labels, float]]:
        return [(gpu, value(row)) for gpu, row in of if known[row]]

    steady = "Temperature at which the GPU settles under its present load, if nothing limits it."
    limits = f"Time until the GPU slows itself; infinite where it does not within {HORIZON_S:.0f} s."
    page.family("gpu_forecast_60s_celsius", "gauge", "Temperature in 60 s.", each(lambda r: found.celsius[r, minute]))
    page.family(
        "gpu_forecast_60s_low_celsius", "gauge", "Low end of nine of ten.", each(lambda r: found.low[r, minute])
    )
    page.family(
        "gpu_forecast_60s_high_celsius", "gauge", "High end of nine of ten.", each(lambda r: found.high[r, minute])
    )
    page.family("gpu_forecast_steady_celsius", "gauge", steady, each(lambda r: found.settled_c[r]))
    page.family("gpu_limit_celsius", "gauge", "Where the GPU begins to slow itself.", each(lambda r: found.limit_c[r]))
    page.family("gpu_time_to_limit_seconds", "gauge", limits, each(lambda r: found.reaches_s[r]))


def _alarms(page: Page, alarms: Sequence[Alarm]) -> None:
    alarms = [a for a in alarms if a.stands]
    counts = [({"priority": p.name.lower()}, float(sum(a.priority is p for a in alarms))) for p in Priority]
    page.family("alarms", "gauge", "Alarms that stand.", counts)
    standing = [
        ({"key": a.key, "node": a.node, "priority": a.priority.name.lower()}, a.since)
        for a in {a.key: a for a in alarms}.values()
    ]
    page.family("alarm_since_seconds", "gauge", "Since when an alarm stands, unix time.", standing)


def _jobs(page: Page, jobs: Sequence[JobStatus]) -> None:
    of = [({"job": j.name, "node": j.node, "socket": j.socket}, j) for j in jobs if j.greeted]

    def each(value: Callable[[JobStatus], float | None]) -> list[tuple[Labels, float]]:
        return [(labels, float(v)) for labels, job in of if (v := value(job)) is not None]

    page.family("job_attached", "gauge", "1 while the job's hook answers.", each(lambda j: j.attached))
    page.family("job_step", "gauge", "The job's step.", each(lambda j: j.step))
    page.family("job_step_seconds", "gauge", "Time of the last step.", each(lambda j: j.step_s))
    page.family("job_tokens_per_second", "gauge", "Tokens a second in the last step.", each(lambda j: j.tokens_per_s))
    page.family("job_microbatch", "gauge", "Sequences in a microbatch.", each(lambda j: j.microbatch))
    page.family("job_world_size", "gauge", "Data-parallel ranks.", each(lambda j: j.world_size))
    page.family("job_loss", "gauge", "Loss that was reported last.", each(lambda j: j.loss))


def _braced(of: Labels) -> str:
    told = [f'{name}="{_escaped(value)}"' for name, value in of.items() if value]
    return f"{{{','.join(told)}}}" if told else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))
