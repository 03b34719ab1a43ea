"""From an inventory to its sources: SSH for remote nodes, a process of its own for this machine, and Prometheus for
nodes without an address."""

from __future__ import annotations

from pathlib import Path

from engine.profile import Cluster, ProfileError, parse_address
from engine.telemetry.local import LocalSource
from engine.telemetry.source import NodeSource


def sources(cluster: Cluster) -> dict[str, NodeSource]:
    """One source a node, by name. ProfileError when the inventory does not say how to reach one."""
    lost = [n.name for n in cluster.nodes if not n.ssh and not n.local]
    if lost and cluster.prometheus is None:
        raise ProfileError(
            f"{cluster.name}: {', '.join(lost[:4])} {'has' if len(lost) == 1 else 'have'} no address: give each node "
            'ssh: "user@host" (or local: true for this machine), or the cluster a prometheus: block. Built-in clusters '
            f"without addresses are for planning; rackside demo --cluster {cluster.name} simulates one."
        )
    found: dict[str, NodeSource] = {
        n.name: LocalSource(n.name, cluster.poll_interval_s) for n in cluster.nodes if n.local
    }
    if lost and cluster.prometheus is not None:
        from engine.telemetry.prometheus import poller

        found |= poller.sources(cluster, cluster.prometheus)
    if len(found) < len(cluster.nodes):
        found |= _over_ssh(cluster)
    return {n.name: found[n.name] for n in cluster.nodes}


def _over_ssh(cluster: Cluster) -> dict[str, NodeSource]:
    from engine.telemetry.ssh import SshSource, Way  # asyncssh takes 150 ms to load

    way = Way(
        known_hosts=Path(cluster.ssh.known_hosts).expanduser(),
        identity=Path(cluster.ssh.identity).expanduser() if cluster.ssh.identity else None,
        config=Path(cluster.ssh.config).expanduser() if cluster.ssh.config else None,
        jump=cluster.ssh.jump,
    )
    found: dict[str, NodeSource] = {}
    for node in cluster.nodes:
        if node.ssh:
            address = parse_address(node.ssh)
            found[node.name] = SshSource(
                node.name, address.host, address.port, address.user, way, cluster.poll_interval_s
            )
    return found
