"""A bad network between the console and its nodes: what the screen is told, and that nobody else is late for it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import asyncssh
import pytest

from engine.telemetry import ssh
from engine.telemetry.snapshot import NodeState
from engine.telemetry.source import Backoff
from engine.telemetry.ssh import SshSource, Way
from tests.parts.nvml import FakeNvml
from tests.parts.proxy import Proxy, proxy
from tests.parts.sshd import Sshd, free_port
from tests.parts.waiting import until
from tests.telemetry.test_ssh import INTERVAL_S, Watched, polled, source_of

MakeSshd = Callable[..., Sshd]


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "MOST_S", 0.5)
    monkeypatch.setattr(Backoff, "SLOW_S", 0.5)


def through(link: Proxy, server: Sshd, folder: Path, name: str = "far") -> SshSource:
    """A node behind the proxy, its key known under the proxy's port."""
    kind, key, *_ = server.host_key.with_suffix(".pub").read_text().split()
    known = folder / f"known_{name}"
    known.write_text(f"[127.0.0.1]:{link.port} {kind} {key}\n")
    way = Way(known_hosts=known, identity=server.identity)
    return SshSource(name, "127.0.0.1", link.port, server.user, way, INTERVAL_S)


async def keeps_its_tick(watched: Watched, node: int, while_: Callable[[], bool]) -> None:
    """While something lasts, a node's newest sample is never older than one tick more than it may be."""
    worst = 0.0
    while while_():
        status = watched.status(node)
        assert status.last_sample is not None
        worst = max(worst, time.time() - status.last_sample)
        await asyncio.sleep(INTERVAL_S / 10)
    assert worst < 2 * INTERVAL_S + 0.3, f"a sample was {worst:.2f} s old"


def _accepted(link: Proxy, count: int) -> bool:
    return link.accepted >= count


async def test_a_cut_network_is_seen_and_comes_back(nvml: FakeNvml, make_sshd: MakeSshd, tmp_path: Path) -> None:
    server = make_sshd(nvml.environment)
    async with (
        proxy(server.port) as link,
        polled(through(link, server, tmp_path), source_of(server, "near")) as watched,
    ):
        await watched.reaches(NodeState.LIVE, 0)
        await watched.reaches(NodeState.LIVE, 1)
        link.cut()
        stale = await watched.reaches(NodeState.STALE, 0, "no sample for")
        assert "the figures shown are the last ones" in stale.reason
        await keeps_its_tick(watched, 1, lambda: watched.status(0).state is not NodeState.DOWN)
        assert "was lost" in watched.status(0).reason
        link.restore()
        await watched.reaches(NodeState.LIVE, 0)


async def test_a_slow_link_loses_no_tick(nvml: FakeNvml, make_sshd: MakeSshd, tmp_path: Path) -> None:
    """300 ms each way: the set-up takes its round trips, then every tick comes, a little old."""
    server = make_sshd(nvml.environment)
    async with proxy(server.port, latency_s=0.3) as link, polled(through(link, server, tmp_path)) as watched:
        await watched.reaches(NodeState.LIVE, 0)
        first = watched.status(0).samples
        await until(lambda: watched.status(0).samples > first + 15, 30)
        assert watched.status(0).missed == 0
        assert watched.status(0).state is NodeState.LIVE


async def test_a_short_stall_is_no_loss(nvml: FakeNvml, make_sshd: MakeSshd, tmp_path: Path) -> None:
    server = make_sshd(nvml.environment)
    async with proxy(server.port) as link, polled(through(link, server, tmp_path)) as watched:
        await watched.reaches(NodeState.LIVE, 0)
        link.cut()
        await watched.reaches(NodeState.STALE, 0)
        before = watched.status(0).samples
        link.restore()
        await watched.reaches(NodeState.LIVE, 0)
        await until(lambda: watched.status(0).samples > before + 5, 20)
        assert watched.status(0).missed == 0, "what was held back came after all"
        assert link.accepted == 1, "the connection was kept"


async def test_a_reset_in_the_middle_of_a_line(nvml: FakeNvml, make_sshd: MakeSshd, tmp_path: Path) -> None:
    server = make_sshd(nvml.environment)
    async with proxy(server.port) as link, polled(through(link, server, tmp_path)) as watched:
        for _ in range(3):
            await watched.reaches(NodeState.LIVE, 0)
            link.reset_after(3000)
            wanted = link.accepted + 1
            await until(partial(_accepted, link, wanted), 20)
        await watched.reaches(NodeState.LIVE, 0)
        assert list(watched.snapshot().gpus["temperature_c"]) == [61, 61]


class Herd:
    """Many nodes behind one stand-in server that can be killed and brought back on its port."""

    def __init__(self, folder: Path) -> None:
        self.port, self.folder = free_port(), folder
        own, theirs = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
        own.write_private_key(str(folder / "own"))
        own.write_public_key(str(folder / "own.pub"))
        theirs.write_private_key(str(folder / "host"))
        known = f"[127.0.0.1]:{self.port} {theirs.export_public_key().decode()}"
        (folder / "known").write_text(known)
        self.way = Way(known_hosts=folder / "known", identity=folder / "own")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            sys.executable,
            "-m",
            "engine.sim.many",
            "1.0",
            str(self.folder / "own.pub"),
            str(self.folder / "host"),
        ]
        self._process = subprocess.Popen([*command, str(self.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert int(self._process.stdout.readline()) == self.port

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@asynccontextmanager
async def herd(folder: Path) -> AsyncIterator[Herd]:
    found = Herd(folder)
    await asyncio.to_thread(found.start)
    try:
        yield found
    finally:
        found.kill()


async def test_two_hundred_nodes_reboot_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come back spread out: never more set-ups at once than the gate lets through, and all within seconds."""
    setting_up, most = 0, 0
    real = asyncssh.create_connection

    async def counted(*args: object, **kwargs: object) -> object:
        nonlocal setting_up, most
        setting_up += 1
        most = max(most, setting_up)
        try:
            return await real(*args, **kwargs)  # type: ignore[arg-type]
        finally:
            setting_up -= 1

    monkeypatch.setattr(Backoff, "MOST_S", 2.0)
    monkeypatch.setattr(asyncssh, "create_connection", counted)
    async with herd(tmp_path) as nodes:
        sources = [SshSource(f"n{i}", "127.0.0.1", nodes.port, None, nodes.way, 1.0) for i in range(200)]
        async with polled(*sources, gpus=8, interval_s=1.0) as watched:

            async def all_reach(state: NodeState) -> None:
                await until(lambda: all(n.state is state for n in watched.snapshot().nodes), 60, look_s=0.25)

            await all_reach(NodeState.LIVE)
            nodes.kill()
            await all_reach(NodeState.DOWN)
            await asyncio.to_thread(nodes.start)
            most = 0
            await all_reach(NodeState.LIVE)
            assert 0 < most <= ssh.AT_ONCE
