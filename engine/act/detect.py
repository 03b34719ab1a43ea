"""What a snapshot gives cause to alarm about. A reading near its line keeps what it raised until a deadband is left."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from engine.act.alarm import Priority, Raised
from engine.profile import Policy
from engine.telemetry.snapshot import NodeState, Snapshot

DEADBAND_K = 2.0
LINK_SHARE = 0.70
LINK_DEADBAND = 0.05
REMEDIES = "lower the tensor-parallel degree, enable GPUDirect RDMA, or move to a faster PCIe generation"
THERMAL_SLOWDOWN = 0x8 | 0x20 | 0x40 | 0x80


HEALTH = (
    ("xid", Priority.CRITICAL, "told critical event XID {}: look it up in the driver's log"),
    ("remap_failed", Priority.CRITICAL, "could not remap a memory row: the board is to be replaced"),
    ("ecc_uncorrected", Priority.WARNING, "has {} uncorrected memory errors since the driver started"),
    ("remap_pending", Priority.WARNING, "waits for a reset to remap a memory row"),
)
"""Counters of a board that are 0 on a good day, how urgent each is, and in what words."""


def causes(
    snapshot: Snapshot,
    policy: Policy,
    slowdown_c: Sequence[float],
    job_troubles: Mapping[str, str],
    standing: Collection[str],
) -> list[Raised]:
    """All that is amiss now. `standing` are the keys of the look before; `slowdown_c` is each row's slowdown point from
    its profile: the device's own figure, where it reports one, wins over it."""
    return [
        *_nodes(snapshot),
        *_heat(snapshot, policy, slowdown_c, standing),
        *_links(snapshot, standing),
        *_health(snapshot),
        *(Raised(f"job:{name}", Priority.CRITICAL, text) for name, text in job_troubles.items()),
    ]


def _nodes(snapshot: Snapshot) -> list[Raised]:
    out = []
    for node in snapshot.nodes:
        if node.state in (NodeState.DOWN, NodeState.ERROR):
            out.append(Raised(f"node:{node.name}", Priority.CRITICAL, f"{node.name}: {node.reason}", node.name))
        elif node.state is NodeState.STALE:
            out.append(Raised(f"node:{node.name}", Priority.WARNING, f"{node.name}: {node.reason}", node.name))
        out += [
            Raised(f"trouble:{node.name}:{_word(text)}", Priority.CRITICAL, f"{node.name}: {text}", node.name)
            for text in node.troubles
        ]
    return out


def _heat(snapshot: Snapshot, policy: Policy, slowdown_c: Sequence[float], standing: Collection[str]) -> list[Raised]:
    table, out = snapshot.gpus, []
    celsius, throttle = table["temperature_c"], table["throttle"]
    own = table["slowdown_c"]
    points = np.where(np.isnan(own), np.asarray(slowdown_c, float), own)
    hot = [rule for rule in policy.rules if rule.when.hot]
    kinds, of = np.unique(points, return_inverse=True)
    lowest = np.array([min((r.when.severity(float(p)) for r in hot), default=np.inf) for p in kinds])
    for row in np.flatnonzero(celsius > lowest[of] - DEADBAND_K):
        key = f"heat:{table.node[row]}:{table.index[row]}"
        band = DEADBAND_K if key in standing else 0.0
        rule = policy.rule_for(float(celsius[row]) + band, float(points[row]))
        if rule is None:
            continue
        urgent = celsius[row] >= points[row]
        text = (
            f"{table.node[row]} GPU {table.index[row]} at {celsius[row]:.0f} C, slows itself at {points[row]:.0f} C "
            f"(policy {policy.name}: {rule.name})"
        )
        out.append(Raised(key, Priority.CRITICAL if urgent else Priority.WARNING, text, table.node[row], int(row)))
    bits = np.nan_to_num(throttle, nan=0.0).astype(np.int64)
    for row in np.flatnonzero(bits & THERMAL_SLOWDOWN):
        text = f"{table.node[row]} GPU {table.index[row]} is slowed by its own hardware ({_reasons(int(bits[row]))})"
        out.append(
            Raised(f"slow:{table.node[row]}:{table.index[row]}", Priority.CRITICAL, text, table.node[row], int(row))
        )
    return out


def _reasons(bits: int) -> str:
    names = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
    return ", ".join(name for bit, name in names.items() if bits & bit)


def _health(snapshot: Snapshot) -> list[Raised]:
    """What a board says of itself that somebody must act on."""
    table, out = snapshot.gpus, []
    for metric, priority, words in HEALTH:
        for row in np.flatnonzero(table[metric] > 0):
            where, value = f"{table.node[row]} GPU {table.index[row]}", int(table[metric][row])
            text = f"{where} {words.format(value)}"
            out.append(
                Raised(f"{metric}:{table.node[row]}:{table.index[row]}", priority, text, table.node[row], int(row))
            )
    return out


def _links(snapshot: Snapshot, standing: Collection[str]) -> list[Raised]:
    """One alarm for each link that is broken, and one for each node and kind of link that is close to its peak."""
    links, out = snapshot.links, []
    busiest = np.fmax(links["rx_gb_s"], links["tx_gb_s"])
    with np.errstate(invalid="ignore", divide="ignore"):
        share = busiest / links["peak_gb_s"]
    for row in np.flatnonzero(links["well"] == 0):
        name = links.name[row]
        where = f"{links.node[row]} {name}" if links.gpu[row] < 0 else f"{links.node[row]} GPU {links.gpu[row]} {name}"
        out.append(Raised(f"link:{_word(where)}", Priority.WARNING, f"{where} is {links.state[row]}", links.node[row]))
    loaded: dict[tuple[str, str], list[int]] = {}
    for row in np.flatnonzero((share > LINK_SHARE - LINK_DEADBAND) & (links["well"] != 0)):
        loaded.setdefault((links.node[row], links.kind[row]), []).append(int(row))
    for (node, kind), rows in loaded.items():
        key = f"links:{node}:{kind}"
        top = max(rows, key=lambda r: float(share[r]))
        if key in standing or share[top] > LINK_SHARE:
            many = f"{len(rows)} {kind} links, most of all {links.name[top]}," if len(rows) > 1 else links.name[top]
            text = f"{node} {many} at {share[top]:.0%} of {links['peak_gb_s'][top]:.0f} GB/s: {REMEDIES}"
            out.append(Raised(key, Priority.NOTICE, text, node))
    return out


def _word(text: str) -> str:
    """Without blanks, so that a key can be typed."""
    return "-".join(text.split())
