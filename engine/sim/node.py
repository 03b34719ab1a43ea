"""A simulated node: an SSH server on loopback with its own host key, that runs the probe it is sent."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import stat
import sys
import threading
import time
import types
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh

from engine.sim.nvml import SimNvml, bus_number

WAIT_S = 30.0
SAMPLE_S = 0.5
"""Seconds between readings of power within a tick: a whole rack's probes share this machine."""
_LOADING = threading.Lock()


class _Input:
    """The channel's input as the blocking binary stream that a program on a node would have."""

    def __init__(self) -> None:
        self._chunks: queue.Queue[bytes] = queue.Queue()
        self._buffer = b""
        self._ended = False

    def feed(self, data: bytes) -> None:
        self._chunks.put(data)

    def _more(self) -> bool:
        if not self._ended:
            data = self._chunks.get()
            self._ended = not data
            self._buffer += data
        return not self._ended

    def read(self, size: int) -> bytes:
        while len(self._buffer) < size and self._more():
            pass
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def readline(self, limit: int = -1) -> bytes:
        while b"\n" not in self._buffer and self._more():
            pass
        end = self._buffer.find(b"\n") + 1 or len(self._buffer)
        data, self._buffer = self._buffer[:end], self._buffer[end:]
        return data


class _Output:
    """The channel's output, written from the program's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, process: asyncssh.SSHServerProcess[bytes]) -> None:
        self._loop, self._process = loop, process

    def write(self, data: bytes) -> None:
        self._loop.call_soon_threadsafe(self._put, data)

    def _put(self, data: bytes) -> None:
        if not self._process.is_closing():
            self._process.stdout.write(data)

    def flush(self) -> None:
        pass


@dataclass
class SimHost:
    """The world of the probe on a simulated node: its NVML, a few files, its clock and its hook sockets."""

    name: str
    nvml: SimNvml
    hooks: Path
    nic_gbps: float
    nics: int
    nvml_error: str = ""

    def _files(self) -> dict[str, str]:
        rack, rows = self.nvml.rack, slice(self.nvml.first, self.nvml.first + self.nvml.count)
        words = str(int(rack.network_b[rows].sum() / self.nics / 4))
        found = {"/proc/loadavg": "8.0 8.0 8.0 1/100 1\n"}
        for half, cpus in enumerate(("0-47,96-143", "48-95,144-191")):
            found[f"/sys/devices/system/node/node{half}/cpulist"] = cpus
        for slot in range(self.nvml.count):
            bus = f"/sys/bus/pci/devices/0000:{bus_number(slot):02x}:00.0"
            found[f"{bus}/numa_node"] = str(2 * slot // self.nvml.count)
        for index in range(self.nics):
            base = f"/sys/class/infiniband/mlx5_{index}/ports/1/"
            found |= {
                f"{base}counters/port_xmit_data": words,
                f"{base}counters/port_rcv_data": words,
                f"{base}state": "4: ACTIVE",
                f"{base}rate": f"{self.nic_gbps:.0f} Gb/sec (4X NDR)",
            }
        for index in range(self.nvml.count):
            found[f"/proc/{4000 + index}/comm"] = "train"
            found[f"/proc/{4000 + index}/environ"] = f"LOCAL_RANK={index}\0"
        return found

    def read(self, path: str) -> str | None:
        return self._files().get(path)

    def list(self, path: str) -> Sequence[str]:
        if path == "/sys/class/infiniband":
            return [f"mlx5_{i}" for i in range(self.nics)]
        return ["1"] if path.startswith("/sys/class/infiniband/") and path.endswith("/ports") else []

    def real(self, path: str) -> str:
        """A GPU and the ports that go with it sit under one switch of their own."""
        words = path.split("/")
        if words[-1] == "device" and words[-2].startswith("mlx5_"):
            slot = int(words[-2][5:]) * self.nvml.count // self.nics
            return f"/sys/devices/pci0000:{bus_number(slot):02x}/switch/nic"
        if path.startswith("/sys/bus/pci/devices/"):
            return f"/sys/devices/pci0000:{words[-1][5:7]}/switch/gpu"
        return path

    def claim(self, console: str) -> str:
        return ""

    def alive(self) -> None:
        pass

    def is_root(self) -> bool:
        return True

    def hostname(self) -> str:
        return self.name

    def python(self) -> str:
        return "simulated"

    def user(self) -> str:
        return "ops"

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def hook_sockets(self) -> Sequence[str]:
        return sorted(str(p) for p in self.hooks.glob("*.sock") if stat.S_ISSOCK(p.lstat().st_mode))

    def run(self, argv: Sequence[str], timeout_s: float) -> tuple[int, str]:
        return 127, "simulated nodes have no programs"


class _Stand:
    """What the probe sees of a simulated host: its world, through the probe's own reading of a system's files."""

    def __init__(self, world: SimHost) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)


@dataclass
class SimNode:
    """One server. `start` gives its port."""

    host: SimHost
    host_key: asyncssh.SSHKey = field(default_factory=lambda: asyncssh.generate_private_key("ssh-ed25519"))
    port: int = 0
    _server: asyncssh.SSHAcceptor | None = None
    _inputs: list[_Input] = field(default_factory=list)

    async def start(self, client_key: asyncssh.SSHKey) -> None:
        """Listen on a free loopback port; only `client_key` may log in."""
        allowed = asyncssh.import_authorized_keys(client_key.export_public_key().decode())
        hooks = self.host.hooks

        class Server(asyncssh.SSHServer):
            def unix_connection_requested(self, dest_path: str) -> bool:
                return Path(dest_path).parent == hooks

        self._server = await asyncssh.create_server(
            Server,
            "127.0.0.1",
            0,
            server_host_keys=[self.host_key],
            authorized_client_keys=allowed,
            process_factory=self._run,
            encoding=None,
            line_editor=False,
            family=socket.AF_INET,
        )
        self.port = self._server.get_port()

    def known_hosts_line(self) -> str:
        return f"[127.0.0.1]:{self.port} {self.host_key.export_public_key().decode().strip()}\n"

    async def stop(self) -> None:
        """Close the server and end the programs that run on it."""
        for stream in self._inputs:
            stream.feed(b"")
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _run(self, process: asyncssh.SSHServerProcess[bytes]) -> None:
        """A login's command: `python3 -u -c …` runs what it is sent; there are no other programs."""
        if "python3 -u -c" not in (process.command or ""):
            process.stderr.write(b"simulated node: there is only python3 here\n")
            process.exit(127)
            return
        stream, output = _Input(), _Output(asyncio.get_running_loop(), process)
        self._inputs.append(stream)
        program = threading.Thread(target=self._program, args=(stream, output), name=f"probe {self.host.name}")
        program.daemon = True
        program.start()
        try:
            while data := await process.stdin.read(1 << 16):
                stream.feed(data)
        except (asyncssh.Error, OSError):
            pass  # the console is gone: for the program that is the end of its input
        finally:
            stream.feed(b"")
            self._inputs.remove(stream)
        await asyncio.to_thread(program.join, WAIT_S)
        process.exit(0)

    def _program(self, stream: _Input, output: _Output) -> None:
        """What python3 on the node does with the loader's framing: run the probe that was sent, on our host."""
        header = json.loads(stream.readline())
        stream.read(header["boot"])
        modules: dict[str, Any] = {}
        with _LOADING:
            for name, size in header["sources"]:
                source = zlib.decompress(stream.read(size))
                if name.startswith("rackside"):
                    modules[name] = sys.modules[name] = types.ModuleType(name)
                    exec(compile(source, f"{name}.py", "exec"), modules[name].__dict__)
            host = type("Node", (_Stand, modules["rackside_host"].System), {"sample_s": SAMPLE_S})(self.host)
        modules["rackside_probe"].main(stream, output, host, header["interval_s"], header["console"])
