"""From an inventory to its sources: SSH for remote nodes, a process of its own for this machine, and Prometheus for
nodes without an address."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

from engine.profile import Cluster, ProfileError, parse_address
from engine.telemetry.source import NodeSource


class Sources(Mapping[str, NodeSource]):
    """One source a node, by name. Those over SSH are made when the first is asked for: asyncssh takes a quarter of a
    second to load, and the screen comes first."""

    def __init__(self, cluster: Cluster, found: Mapping[str, NodeSource]) -> None:
        self._cluster, self._found = cluster, found

    @cached_property
    def _all(self) -> Mapping[str, NodeSource]:
        names = [n.name for n in self._cluster.nodes]
        found = self._found if len(self._found) == len(names) else {**self._found, **_over_ssh(self._cluster)}
        return {name: found[name] for name in names}

    def __getitem__(self, name: str) -> NodeSource:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._cluster.nodes)


def sources(cluster: Cluster) -> Mapping[str, NodeSource]:
    """The sources of a cluster. ProfileError when the inventory does not say how to reach a node."""
    lost = [n.name for n in cluster.nodes if not n.ssh and not n.local]
    if lost and cluster.prometheus is None:
        raise ProfileError(
            f"{cluster.name}: {', '.join(lost[:4])} {'has' if len(lost) == 1 else 'have'} no address: give each node "
            'ssh: "user@host" (or local: true for this machine), or the cluster a prometheus: block. Built-in clusters '
            f"without addresses are for planning; rackside demo --cluster {cluster.name} simulates one."
        )
    found: dict[str, NodeSource] = {}
    if any(n.local for n in cluster.nodes):
        found |= _here(cluster)
    if lost and cluster.prometheus is not None:
        from engine.telemetry.prometheus import poller

        found |= poller.sources(cluster, cluster.prometheus)
    return Sources(cluster, found)


def _here(cluster: Cluster) -> dict[str, NodeSource]:
    from engine.telemetry.local import LocalSource

    return {n.name: LocalSource(n.name, cluster.poll_interval_s) for n in cluster.nodes if n.local}


def _over_ssh(cluster: Cluster) -> dict[str, NodeSource]:
    from engine.telemetry.ssh import SshSource, Way

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
