"""What is measured on the rack just now, as far as it changes what a plan would do there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from engine.profile import Cluster, Network, Plan


@dataclass(frozen=True)
class Conditions:
    """`clock_mhz` of the slowest GPU that heat or a setting holds down, `power_limit_w` the lowest limit in force below
    the default; shares of the worst GPU's fabric and of the worst node's ports that are up; `warmer_k` what each node's
    hottest GPU is warmer than its power and place explain, K. `told` says each that differs from a healthy rack."""

    clock_mhz: float | None = None
    power_limit_w: float | None = None
    fabric_share: float = 1.0
    network_share: float = 1.0
    warmer_k: Mapping[str, float] = field(default_factory=dict)
    told: tuple[str, ...] = ()


def under(cluster: Cluster, now: Conditions) -> Cluster:
    """The cluster as it is now: links that are down carry nothing, warm nodes are warm."""
    nodes = tuple(
        msgspec.structs.replace(n, warmer_k=n.warmer_k + now.warmer_k.get(n.name, 0.0)) for n in cluster.nodes
    )
    network = cluster.network
    if now.network_share < 1:
        network = msgspec.structs.replace(
            network or Network(gbps_per_node=1.0), gbps_per_node=cluster.node_gb_s * 8 * now.network_share
        )
    devices = cluster.devices
    if now.fabric_share < 1:
        devices = {
            name: msgspec.structs.replace(
                d, fabric=msgspec.structs.replace(d.fabric, gb_s_per_link=d.fabric.gb_s_per_link * now.fabric_share)
            )
            for name, d in devices.items()
        }
    return msgspec.structs.replace(cluster, nodes=nodes, network=network, devices=devices)


def limited(plan: Plan, now: Conditions) -> Plan:
    """The plan under the limits that are in force now."""
    o = plan.optimizations
    clock = min((c for c in (o.sm_clock_mhz, now.clock_mhz) if c), default=None)
    watts = min((w for w in (o.power_limit_w, now.power_limit_w) if w), default=None)
    return msgspec.structs.replace(
        plan, optimizations=msgspec.structs.replace(o, sm_clock_mhz=clock, power_limit_w=watts)
    )
