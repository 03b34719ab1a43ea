"""One look at a cluster without a screen: every node's first samples, and what stands in the way of good ones."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from engine.profile import Cluster
from engine.telemetry.reading import ReadingState, Result
from engine.telemetry.snapshot import NodeState, NodeStatus, Snapshot
from engine.telemetry.source import NodeSource
from engine.telemetry.store import Store

ENOUGH = 3
"""Samples of a node before it is judged: rates need two, seldom-told metrics come with the first."""
SKEW_S, SLOW_MS = 2.0, 300.0
NEEDED = ("temperature_c", "power_w", "power_limit_w", "sm_clock_mhz", "utilization_pct", "memory_used_mib")
SETTLED = (NodeState.DOWN, NodeState.ERROR)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Finding:
    """One thing about a node: `wrong` asks for somebody to do something, otherwise it is worth knowing."""

    wrong: bool
    text: str


@dataclass(frozen=True)
class Examined:
    """A node: what was found, and in words whether power limits may be set there."""

    name: str
    findings: tuple[Finding, ...]
    may_limit: str

    @property
    def well(self) -> bool:
        return not any(f.wrong for f in self.findings)


@asynccontextmanager
async def following(
    cluster: Cluster, sources: Mapping[str, NodeSource], wait_s: float, progress: Progress | None = None
) -> AsyncIterator[Snapshot]:
    """All nodes, followed until each has told enough or cannot be read, at most `wait_s`; connected within."""
    store = Store([(n.name, cluster.type_of(n).gpus) for n in cluster.nodes], cluster.poll_interval_s)
    tasks = [asyncio.create_task(source.run(store)) for source in sources.values()]
    try:
        until = time.monotonic() + wait_s
        snapshot = store.publish(time.time())
        while time.monotonic() < until and not all(_told(n) for n in snapshot.nodes):
            await asyncio.sleep(cluster.poll_interval_s / 4)
            snapshot = store.publish(time.time())
            if progress:
                progress(sum(_told(n) for n in snapshot.nodes), len(snapshot.nodes))
        yield snapshot
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def look(
    cluster: Cluster, sources: Mapping[str, NodeSource], wait_s: float, progress: Progress | None = None
) -> tuple[Snapshot, dict[str, Result]]:
    """What all nodes read, and what each that lives answers to being asked what may be done there."""
    async with following(cluster, sources, wait_s, progress) as snapshot:
        live = [n.name for n in snapshot.nodes if n.state is NodeState.LIVE]
        asked = [sources[name].command({"do": "examine", "id": uuid.uuid4().hex}, 10.0) for name in live]
        return snapshot, dict(zip(live, await asyncio.gather(*asked), strict=True))


def _told(node: NodeStatus) -> bool:
    return node.state in SETTLED or (node.state is NodeState.LIVE and node.samples >= ENOUGH)


def examine(cluster: Cluster, snapshot: Snapshot, answers: Mapping[str, Result]) -> tuple[Examined, ...]:
    """What each node works with, and what is missing or wrong."""
    out = []
    for node, status in zip(cluster.nodes, snapshot.nodes, strict=True):
        found = list(_connection(status))
        may = "not asked: it cannot be read"
        if status.state in (NodeState.LIVE, NodeState.STALE):
            found += [*_health(cluster.type_of(node).gpus, status, snapshot), *_links(status.name, snapshot)]
            found += _ranks(status, snapshot)
        if status.name in answers:
            may = answers[status.name].found.get("may_limit") or f"no: {answers[status.name].reason}"
            if may.startswith("no"):
                found.append(Finding(False, f"power limits cannot be set here: {may.removeprefix('no: ')}"))
        out.append(Examined(status.name, tuple(found), may))
    return tuple(out)


def _connection(status: NodeStatus) -> list[Finding]:
    if status.state is not NodeState.LIVE:
        return [Finding(True, f"{status.state.value}: {status.reason}")]
    told = []
    if status.because:
        told.append(Finding(False, f"read through {status.reader}: {status.because}"))
    if abs(status.skew_s) > SKEW_S:
        ahead = "ahead of" if status.skew_s > 0 else "behind"
        told.append(Finding(True, f"its clock is {abs(status.skew_s):.0f} s {ahead} this machine's"))
    if status.took_ms > SLOW_MS:
        told.append(Finding(True, f"one sample takes {status.took_ms:.0f} ms: is persistence mode off?"))
    if status.missed:
        told.append(Finding(True, f"{status.missed} samples were lost on the way"))
    return told


def _health(expected: int, status: NodeStatus, snapshot: Snapshot) -> list[Finding]:
    rows, gpus = list(status.rows), snapshot.gpus
    told = [Finding(True, trouble) for trouble in status.troubles]
    if len(rows) != expected:
        told.append(Finding(True, f"it shows {len(rows)} GPUs; its node type has {expected}"))
    missing = [name for name in NEEDED if np.isnan(gpus[name][rows]).all()]
    if missing:
        named = [f"{name} ({gpus.state(name, rows[0]).value})" for name in missing]
        told.append(Finding(False, f"not to be read here: {', '.join(named)}"))
    off = [gpus.index[r] for r in rows if gpus.facts[r].persistence is False]
    if off:
        told.append(Finding(False, f"persistence mode is off ({_listed(off)}): nvidia-smi -pm 1"))
    for name, words in (
        ("ecc_uncorrected", "uncorrected memory errors since the driver started"),
        ("remap_pending", "rows wait to be remapped: reset the GPU"),
        ("remap_failed", "rows could not be remapped: the board is to be replaced"),
        ("xid", "a critical event (XID) was told"),
    ):
        bad = [gpus.index[r] for r in rows if gpus[name][r] > 0]
        if bad:
            told.append(Finding(True, f"{words} ({_listed(bad)})"))
    hot = [gpus.index[r] for r in rows if gpus["held_by_heat"][r] > 0]
    if hot:
        told.append(Finding(True, f"clocks are held by heat ({_listed(hot)})"))
    if status.dropped:
        told.append(Finding(False, f"{status.dropped} readings out of physical range were dropped"))
    notes = {gpus.facts[r].note for r in rows} - {None}
    return told + [Finding(False, str(note)) for note in sorted(map(str, notes))]


def _links(name: str, snapshot: Snapshot) -> list[Finding]:
    links, told = snapshot.links, []
    rows = links.of.get(name, range(0))
    for state in ("inactive", "degraded"):
        bad = [r for r in rows if links.state[r] == state]
        if bad:
            named = [links.name[r] if links.gpu[r] < 0 else f"GPU {links.gpu[r]} {links.name[r]}" for r in bad]
            told.append(Finding(True, f"{len(bad)} links {state}: {', '.join(named[:4])}{', …' * (len(bad) > 4)}"))
    counted = [r for r in rows if links["errors"][r] > 0]
    if counted:
        worst = max(counted, key=lambda r: float(links["errors"][r]))
        told.append(
            Finding(
                False,
                f"{len(counted)} links have counted errors, most of all {links.name[worst]} with "
                f"{links['errors'][worst]:.0f}",
            )
        )
    return told


def _ranks(status: NodeStatus, snapshot: Snapshot) -> list[Finding]:
    """Whether the running ranks are bound to the CPUs beside their GPUs."""
    loose, far = [], []
    for row in status.rows:
        near = cpus_of(snapshot.gpus.facts[row].cpus)
        for process in snapshot.gpus.processes[row]:
            may = cpus_of(process.cpus)
            if near and may and not may & near:
                far.append(process.rank or str(process.pid))
            elif near and may - near:
                loose.append(process.rank or str(process.pid))
    told = []
    if far:
        told.append(Finding(True, f"ranks are bound to the wrong CPUs, far from their GPUs: {_listed(far)}"))
    if loose:
        told.append(Finding(False, f"ranks are not bound to the CPUs beside their GPUs: {_listed(loose)}"))
    return told


def cpus_of(text: str | None) -> set[int]:
    """CPUs as the kernel lists them, such as 0-47,96-143."""
    out: set[int] = set()
    for part in (text or "").split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (last or first).isdigit() and int(last or first) < 65536:
            out |= set(range(int(first), int(last or first) + 1))
    return out


def _listed(things: list[int] | list[str]) -> str:
    shown = ", ".join(str(t) for t in things[:8])
    return shown + (f" and {len(things) - 8} more" if len(things) > 8 else "")


def as_rows(snapshot: Snapshot) -> list[dict[str, Any]]:
    """A snapshot as one record a node, its GPUs within; NaN for what was not read."""
    gpus = snapshot.gpus
    out: list[dict[str, Any]] = []
    for status in snapshot.nodes:
        out.append(
            {
                "node": status.name,
                "state": status.state.value,
                "reason": status.reason,
                "reader": status.reader,
                "because": status.because,
                "age_s": math.nan if status.last_sample is None else snapshot.time - status.last_sample,
                "took_ms": status.took_ms,
                "dropped": status.dropped,
                "troubles": list(status.troubles),
                "gpus": [
                    {
                        "index": gpus.index[row],
                        "name": gpus.name[row],
                        "bus_id": gpus.bus_id[row],
                        **{name: float(column[row]) for name, column in gpus.columns.items()},
                        "states": {
                            name: state.value
                            for name in gpus.columns
                            if (state := gpus.state(name, row)) is not ReadingState.VALUE
                        },
                        "near": list(gpus.facts[row].near),
                        "note": gpus.facts[row].note,
                        "mig": [msgspec.to_builtins(part) for part in gpus.facts[row].mig],
                        "processes": [
                            {
                                "pid": p.pid,
                                "name": p.name,
                                "memory_mib": p.memory_mib,
                                "rank": p.rank,
                                "job": p.slurm_job,
                            }
                            for p in gpus.processes[row]
                        ],
                    }
                    for row in status.rows
                ],
                "links": [
                    {
                        "gpu": snapshot.links.gpu[r],
                        "kind": snapshot.links.kind[r],
                        "name": snapshot.links.name[r],
                        "state": snapshot.links.state[r],
                        **{name: float(column[r]) for name, column in snapshot.links.columns.items()},
                    }
                    for r in snapshot.links.of.get(status.name, range(0))
                ],
            }
        )
    return out
