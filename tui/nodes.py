"""`rackside poll` and `rackside doctor`: one look at the nodes, printed."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from engine.control import look
from engine.control.connect import sources
from engine.profile import catalog
from engine.telemetry.reading import Result
from engine.telemetry.snapshot import NodeState, Snapshot
from tui.metrics import reasons
from tui.output import printed, progress
from tui.widgets.figures import number

SHOWN = (
    ("temperature_c", "C"),
    ("power_w", "W"),
    ("power_limit_w", "W"),
    ("sm_clock_mhz", "MHz"),
    ("utilization_pct", "%"),
)


def poll(given: Any) -> int:
    """Print what every GPU reads, once or until it is stopped; 1 when a node could not be read."""
    while True:
        snapshot, _ = _looked(given)
        print(printed(look.as_rows(snapshot)) if given.json else _table(snapshot))
        if given.once:
            return 0 if all(n.state is NodeState.LIVE for n in snapshot.nodes) else 1


def doctor(given: Any) -> int:
    """Print what works and what does not, node by node; 1 when something is wrong."""
    cluster = catalog.cluster(given.cluster)
    snapshot, answers = _looked(given)
    found = look.examine(cluster, snapshot, answers)
    if given.json:
        print(printed([_node_json(node, status) for node, status in zip(found, snapshot.nodes, strict=True)]))
    else:
        for node, status in zip(found, snapshot.nodes, strict=True):
            read = "not read"
            if status.state is NodeState.LIVE:
                read = f"{len(status.rows)} GPUs through {status.reader}"
            print(f"{node.name:<16} {'well' if node.well else 'WRONG':<6} {read}, power limits: {node.may_limit}")
            for finding in node.findings:
                print(f"  {'!' if finding.wrong else '-'} {finding.text}")
        wrong = sum(not node.well for node in found)
        print(f"{len(found) - wrong} of {len(found)} nodes are well.")
    return 0 if all(node.well for node in found) else 1


def _node_json(node: look.Examined, status: Any) -> dict[str, Any]:
    return {
        "node": node.name,
        "well": node.well,
        "reader": status.reader,
        "may_limit": node.may_limit,
        "skew_s": status.skew_s,
        "took_ms": status.took_ms,
        "findings": [{"wrong": f.wrong, "text": f.text} for f in node.findings],
    }


def _looked(given: Any) -> tuple[Snapshot, dict[str, Result]]:
    cluster = catalog.cluster(given.cluster)

    def told(some: int, nodes: int) -> None:
        progress(f"{some} of {nodes} nodes")

    try:
        return asyncio.run(look.look(cluster, sources(cluster), given.wait, told))
    finally:
        progress()


def _table(snapshot: Snapshot) -> str:
    gpus = snapshot.gpus
    lines = [
        f"{'node':<16}{'GPU':>4}{'':2}{'':<24}{'temp':>8}{'power':>9}{'limit':>9}{'clock':>10}{'util':>7}  throttle"
    ]
    for status in snapshot.nodes:
        if status.state is not NodeState.LIVE:
            lines.append(f"{status.name:<16} {status.state.value}: {status.reason}")
        lines += [f"{status.name:<16} {trouble}" for trouble in status.troubles]
        for row in status.rows:
            if status.last_sample is None or np.isnan([gpus[name][row] for name, _ in SHOWN]).all():
                continue
            values = [number(float(gpus[name][row]), 0, unit) for name, unit in SHOWN]
            cells = "".join(f"{v:>{w}}" for v, w in zip(values, (8, 9, 9, 10, 7), strict=True))
            why = reasons(float(gpus["throttle"][row]))
            lines.append(f"{status.name:<16}{gpus.index[row]:>4}  {gpus.name[row]:<24.24}{cells}  {why}")
    return "\n".join(lines)
