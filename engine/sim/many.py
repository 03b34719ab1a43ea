"""A thousand nodes' worth of probe output behind one SSH server.

`python -m engine.sim.many INTERVAL_S PUBLIC_KEY HOST_KEY [PORT]` prints its port and ends with its input.

Each login that asks for python3 reads the loader's framing as a node would, is greeted, and gets a tick a second: the
records of eight GPUs, their NVLinks, PCIe ports and network ports, as long as a real node's. What they say is made up.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from typing import Any

import asyncssh

FRAME = b"\x1e"
GPUS, NVLINKS, PORTS = 8, 18, 8
VARIANTS = 16


def hello(node: int) -> bytes:
    """A node's greeting."""
    facts = [
        {
            "index": slot,
            "name": "NVIDIA H100 80GB HBM3",
            "uuid": f"GPU-{node:08x}-0000-0000-0000-{slot:012x}",
            "bus_id": f"00000000:{0x11 + 0x10 * slot:02X}:00.0",
            "memory_total_mib": 81559,
            "power_limit_min_w": 200,
            "power_limit_max_w": 700,
            "power_limit_default_w": 700,
            "sm_clock_max_mhz": 1980,
            "slowdown_c": 89,
            "shutdown_c": 95,
            "numa_node": slot // 4,
            "cpus": "0-47,96-143",
            "near": [f"mlx5_{slot}"],
            "persistence": True,
        }
        for slot in range(GPUS)
    ]
    return _line({"hello": 1, "hostname": f"n{node:04d}", "python": "3.11.2", "driver": "580.95.05", "gpus": facts})


def links() -> list[dict[str, Any]]:
    """Every link of a node, as its first tick lists them."""
    out: list[dict[str, Any]] = []
    for slot in range(GPUS):
        of = {"gpu": slot, "state": "active"}
        out += [
            {**of, "kind": "nvlink", "name": f"NVLink {k}", "gb_s": 26.562, "to": "NVSwitch"} for k in range(NVLINKS)
        ]
        out.append({**of, "kind": "pcie", "name": "PCIe", "gb_s": 63.0, "best_gb_s": 63.0})
    out += [{"gpu": -1, "kind": "nic", "name": f"mlx5_{k}", "state": "active", "gb_s": 50.0} for k in range(PORTS)]
    return out


def columns(chance: random.Random) -> dict[str, list[float]]:
    """The readings of a busy node."""

    def each(low: float, high: float, digits: int = 0) -> list[float]:
        return [round(chance.uniform(low, high), digits) if digits else chance.randint(int(low), int(high))] * GPUS

    return {
        "temperature_c": each(55, 78),
        "memory_temperature_c": each(60, 84),
        "power_w": each(480, 690, 2),
        "power_max_w": each(650, 760, 2),
        "utilization_pct": each(90, 100),
        "memory_used_mib": each(60000, 79000, 1),
        "throttle": [4] * GPUS,
        "power_limit_w": [700.0] * GPUS,
        "sm_clock_mhz": each(1400, 1980),
        "memory_clock_mhz": [2619] * GPUS,
        "margin_c": each(8, 30),
        "energy_j": each(1e8, 9e8, 2),
        "held_by_power": each(0, 1, 3),
        "held_by_heat": [0.0] * GPUS,
    }


def ticks(chance: random.Random) -> list[bytes]:
    """What follows the number and the time in a tick's line, in several variants."""
    many = GPUS * (NVLINKS + 1) + PORTS
    out = []
    for _ in range(VARIANTS):
        rates = [[chance.randint(0, 24000) for _ in range(many)] for _ in range(2)]
        record = {"gpus": columns(chance), "lost": [], "rx_mb_s": rates[0], "tx_mb_s": rates[1], "load": 8.0}
        out.append(json.dumps({**record, "hooks": [], "took_ms": 4.2}, separators=(",", ":")).encode()[1:])
    return out


class Many:
    """The server. Every login is another node."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s, self._count = interval_s, 0
        self._ticks = ticks(random.Random(1))
        self._first = json.dumps({"links": links(), "processes": []}).encode()[1:-1] + b","

    async def start(self, allowed: asyncssh.SSHKey, own: asyncssh.SSHKey, port: int) -> int:
        """Listen on a loopback port (0: a free one), and say which."""
        server = await asyncssh.create_server(
            asyncssh.SSHServer,
            "127.0.0.1",
            port,
            server_host_keys=[own],
            authorized_client_keys=asyncssh.import_authorized_keys(allowed.export_public_key().decode()),
            process_factory=self._node,
            encoding=None,
            line_editor=False,
            encryption_algs=["aes128-gcm@openssh.com"],
            compression_algs=["none"],
        )
        return server.get_port()

    async def _node(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        number, self._count = self._count, self._count + 1
        try:
            header = json.loads(await process.stdin.readline())
            await process.stdin.readexactly(header["boot"] + sum(size for _, size in header["sources"]))
            process.stdout.write(hello(number))
            ended = asyncio.create_task(process.stdin.read())
            await self._tell(process, number, ended)
        except (asyncssh.Error, OSError, asyncio.IncompleteReadError):
            pass  # the console went
        process.exit(0)

    async def _tell(self, process: asyncssh.SSHServerProcess[bytes], number: int, ended: asyncio.Task[bytes]) -> None:
        """Ticks until the input ends, each node at its own moment of the second."""
        clock = asyncio.get_running_loop()
        due, seq = clock.time() + self._interval_s * (number * 0.618 % 1.0), 0
        while not ended.done():
            await asyncio.wait([ended], timeout=max(0.0, due - clock.time()))
            due += self._interval_s
            seq += 1
            head = b'{"tick":%d,"time":%.3f,' % (seq, _now())
            first = self._first if seq == 1 else b""
            process.stdout.write(FRAME + head + first + self._ticks[(number + seq) % VARIANTS] + b"\n")


def _now() -> float:
    import time

    return time.time()


def _line(record: dict[str, Any]) -> bytes:
    return FRAME + json.dumps(record).encode() + b"\n"


async def _serve(interval_s: float, allowed: str, own: str, port: int = 0) -> None:
    listening = await Many(interval_s).start(asyncssh.read_public_key(allowed), asyncssh.read_private_key(own), port)
    print(listening, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(float(sys.argv[1]), sys.argv[2], sys.argv[3], *map(int, sys.argv[4:])))
