"""What polling costs: many nodes over SSH from this process, its own processor time and memory alone."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.telemetry.snapshot import NodeState, Snapshot
from engine.telemetry.ssh import SshSource, Way
from engine.telemetry.store import Store

CONNECT_MOST_S = 120.0
SETTLE_S = 2.0


async def poll(way: Way, ports: list[int], nodes: int, seconds: float, interval_s: float = 1.0) -> dict[str, Any]:
    """Connect to `nodes` nodes spread over `ports`, then watch them for `seconds`."""
    names = [f"n{number:04d}" for number in range(nodes)]
    store = Store([(name, 8) for name in names], interval_s)
    began = time.monotonic()
    tasks = [
        asyncio.create_task(SshSource(name, "127.0.0.1", ports[i % len(ports)], None, way, interval_s).run(store))
        for i, name in enumerate(names)
    ]
    try:
        connect_s = await _all_live(store, nodes, began)
        await asyncio.sleep(SETTLE_S)
        return {"nodes": nodes, "gpus": 8 * nodes, "connect_s": connect_s, **await _watched(store, seconds, interval_s)}
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _all_live(store: Store, nodes: int, began: float) -> float:
    while time.monotonic() - began < CONNECT_MOST_S:
        snapshot = store.publish(time.time())
        if sum(n.state is NodeState.LIVE for n in snapshot.nodes) == nodes:
            return time.monotonic() - began
        await asyncio.sleep(0.5)
    missing = [n for n in snapshot.nodes if n.state is not NodeState.LIVE]
    raise TimeoutError(f"{len(missing)} of {nodes} nodes did not connect; {missing[0].name}: {missing[0].reason}")


async def _watched(store: Store, seconds: float, interval_s: float) -> dict[str, Any]:
    """A snapshot an interval, as a console takes them."""
    first = store.publish(time.time())
    cpu, began = time.process_time(), time.monotonic()
    due, late = began, 0.0
    while (now := time.monotonic()) - began < seconds:
        due += interval_s
        await asyncio.sleep(max(0.0, due - now))
        late = max(late, time.monotonic() - due)
        last = store.publish(time.time())
    wall, used = time.monotonic() - began, time.process_time() - cpu
    return {
        "seconds": round(wall, 2),
        "lines_per_s": round((_samples(last) - _samples(first)) / wall, 1),
        "cpu_fraction": round(used / wall, 4),
        "rss_mb": round(_rss_mb(), 1),
        "lost_ticks": sum(n.missed for n in last.nodes),
        "silent_nodes": sum(n.state is not NodeState.LIVE for n in last.nodes),
        "late_snapshot_s": round(late, 3),
    }


def _samples(snapshot: Snapshot) -> int:
    return sum(n.samples for n in snapshot.nodes)


def _rss_mb() -> float:
    """Resident memory now; where the system does not tell, the most there was."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize() / 1e6
    except (OSError, IndexError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 * (1 if sys.platform == "linux" else 1 / 1024)


@contextlib.contextmanager
def room_for(files: int) -> Iterator[None]:
    """Each connection is a file: raise this process's own limit as far as it may go."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, files + 64)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def text(found: dict[str, Any]) -> str:
    """To read."""
    return "\n".join(
        [
            f"{found['nodes']:,} nodes, {found['gpus']:,} GPUs connected in {found['connect_s']:.1f} s",
            f"{found['lines_per_s']:,.0f} samples a second: {found['cpu_fraction']:.1%} of a core, "
            f"{found['rss_mb']:.0f} MB",
            f"{found['lost_ticks']} ticks lost, {found['silent_nodes']} nodes silent, "
            f"snapshots at most {found['late_snapshot_s'] * 1000:.0f} ms late",
        ]
    )
