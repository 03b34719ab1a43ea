"""A simulated cluster: nodes behind real SSH, a job behind the real hook, and the inventory to reach them."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncssh
import msgspec

from engine.profile import Cluster, Model, Plan, ProfileError, Ssh
from engine.sim.job import Job
from engine.sim.node import SimHost, SimNode
from engine.sim.nvml import SimNvml
from engine.sim.rack import Rack

TICK_S = 0.1
USER = "ops"


@asynccontextmanager
async def simulated(cluster: Cluster, model: Model, plan: Plan) -> AsyncIterator[Cluster]:
    """Run `cluster` with a job on it; yields the same cluster with addresses and keys that lead to it."""
    foreign = next((d.name for d in cluster.devices.values() if d.vendor != "nvidia"), None)
    if foreign is not None:
        raise ProfileError(f"The demo simulates NVML, which {foreign} does not have; try --cluster h200x32-400g.")
    with tempfile.TemporaryDirectory(prefix="rackside-") as folder:
        base = Path(folder)
        rack = Rack(cluster)
        job = Job(
            rack, model, plan, f"{model.name}-demo", base / cluster.nodes[0].name, [n.name for n in cluster.nodes]
        )
        nodes = _nodes(rack, base, job.prediction.memory.total_gib)
        client_key = asyncssh.generate_private_key("ssh-ed25519")
        async with asyncio.TaskGroup() as starting:
            for node in nodes:
                starting.create_task(node.start(client_key))
        reachable = _reachable(cluster, nodes, client_key, base)
        tasks = [asyncio.create_task(_advance(rack), name="rack"), asyncio.create_task(job.run(), name="training")]
        try:
            yield reachable
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(node.stop() for node in nodes))


def _nodes(rack: Rack, base: Path, memory_gib: float) -> list[SimNode]:
    nodes, first, cluster = [], 0, rack.cluster
    for node in cluster.nodes:
        kind = cluster.type_of(node)
        hooks = base / node.name
        hooks.mkdir(mode=0o700)
        gbps = cluster.network.gbps_per_node if cluster.network else kind.nic.gbps
        ports = 1 if cluster.network else kind.nic.count
        host = SimHost(node.name, SimNvml(rack, first, kind.gpus, memory_gib), hooks, gbps, ports)
        nodes.append(SimNode(host))
        first += kind.gpus
    return nodes


def _reachable(cluster: Cluster, nodes: list[SimNode], client_key: asyncssh.SSHKey, base: Path) -> Cluster:
    """The inventory that a user would write for these nodes, with its files."""
    known_hosts, identity = base / "known_hosts", base / "id_ed25519"
    known_hosts.write_text("".join(node.known_hosts_line() for node in nodes))
    client_key.write_private_key(str(identity))
    identity.chmod(0o600)
    placed = tuple(
        msgspec.structs.replace(profile, ssh=f"{USER}@127.0.0.1:{node.port}")
        for profile, node in zip(cluster.nodes, nodes, strict=True)
    )
    return msgspec.structs.replace(cluster, nodes=placed, ssh=Ssh(known_hosts=str(known_hosts), identity=str(identity)))


async def _advance(rack: Rack) -> None:
    """Move the rack with the clock on the wall."""
    before = time.monotonic()
    while True:
        await asyncio.sleep(TICK_S)
        now = time.monotonic()
        rack.advance(now - before)
        before = now
