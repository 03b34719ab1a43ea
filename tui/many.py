"""`rackside bench poll`: starts servers that stand in for many nodes, each in a process of its own, and polls them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SERVERS = 2


def polled(nodes: int, seconds: float) -> dict[str, Any]:
    """Poll `nodes` stand-ins for `seconds`."""
    import asyncssh

    from engine.control import bench_poll
    from engine.telemetry.ssh import Way

    with tempfile.TemporaryDirectory() as place, bench_poll.room_for(2 * nodes):
        paths = {name: Path(place) / name for name in ("ours", "ours.pub", "theirs", "known_hosts")}
        ours, theirs = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
        ours.write_private_key(str(paths["ours"]))
        ours.write_public_key(str(paths["ours.pub"]))
        theirs.write_private_key(str(paths["theirs"]))
        servers = [_server(paths["ours.pub"], paths["theirs"]) for _ in range(SERVERS)]
        try:
            ports = [_port(server) for server in servers]
            public = theirs.export_public_key().decode().strip()
            paths["known_hosts"].write_text("".join(f"[127.0.0.1]:{port} {public}\n" for port in ports))
            way = Way(known_hosts=paths["known_hosts"], identity=paths["ours"])
            return asyncio.run(bench_poll.poll(way, ports, nodes, seconds))
        finally:
            for server in servers:
                server.kill()
                server.wait()


def _server(allowed: Path, own: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "engine.sim.many", "1.0", str(allowed), str(own)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _port(server: subprocess.Popen[bytes]) -> int:
    assert server.stdout is not None
    return int(server.stdout.readline())
