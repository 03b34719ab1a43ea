"""Polling over a real OpenSSH server: what works, and every way in which it may not."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.telemetry.snapshot import NodeState, NodeStatus, Snapshot
from engine.telemetry.source import Backoff
from engine.telemetry.ssh import SshSource, Way
from engine.telemetry.store import Store
from tests.parts.nvml import FakeNvml
from tests.parts.sshd import Sshd, free_port, make_key
from tests.parts.waiting import until

MakeSshd = Callable[..., Sshd]
INTERVAL_S = 0.2


def source_of(server: Sshd, name: str = "n1", **files: Path) -> SshSource:
    way = Way(known_hosts=files.get("known_hosts", server.known_hosts), identity=files.get("identity", server.identity))
    return SshSource(name, "127.0.0.1", server.port, server.user, way, INTERVAL_S)


class Watched:
    """A store fed by sources; `status` publishes and looks."""

    def __init__(self, names: list[str], gpus: int = 2, interval_s: float = INTERVAL_S) -> None:
        self.store = Store([(name, gpus) for name in names], interval_s)

    def snapshot(self) -> Snapshot:
        return self.store.publish(time.time())

    def status(self, node: int = 0) -> NodeStatus:
        return self.snapshot().nodes[node]

    async def reaches(self, state: NodeState, node: int = 0, says: str = "", timeout_s: float = 30) -> NodeStatus:
        def there() -> bool:
            status = self.status(node)
            return status.state is state and says in status.reason

        try:
            await until(there, timeout_s)
        except AssertionError:
            found = self.status(node)
            raise AssertionError(f"wanted {state} with '{says}', found {found.state}: {found.reason}") from None
        return self.status(node)


@asynccontextmanager
async def polled(*sources: SshSource, gpus: int = 2, interval_s: float = INTERVAL_S) -> AsyncIterator[Watched]:
    watched = Watched([s.name for s in sources], gpus, interval_s)
    tasks = [asyncio.create_task(s.run(watched.store)) for s in sources]
    try:
        yield watched
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "MOST_S", 0.5)
    monkeypatch.setattr(Backoff, "SLOW_S", 0.5)


async def test_readings_arrive_in_columns(nvml: FakeNvml, make_sshd: MakeSshd) -> None:
    async with polled(source_of(make_sshd(nvml.environment))) as watched:
        await watched.reaches(NodeState.LIVE)
        nvml.write(gpu1_temperature=84, gpu0_utilization="!3")
        await until(lambda: watched.snapshot().gpus["temperature_c"][1] == 84)
        snapshot = watched.snapshot()
        assert snapshot.gpus["power_w"][0] == pytest.approx(512.34)
        assert snapshot.gpus["utilization_pct"][0] != snapshot.gpus["utilization_pct"][0], "unsupported is NaN"
        assert snapshot.gpus["utilization_pct"][1] == 97
        assert snapshot.gpus.name[0] == "NVIDIA H100 80GB HBM3"
        assert snapshot.gpus["slowdown_c"][0] == 89
        times, values = watched.store.history("temperature_c", 1)
        assert values[-1] == 84
        assert len(times) == len(values)


async def test_link_rates_come_from_counters(nvml: FakeNvml, make_sshd: MakeSshd) -> None:
    async with polled(source_of(make_sshd(nvml.environment))) as watched:
        await watched.reaches(NodeState.LIVE)
        count = 1_000_000

        def busy() -> bool:
            nonlocal count
            count += 400_000  # KiB each look: some GB/s
            nvml.write(field138=count)
            links = watched.snapshot().links
            return any(k == "nvlink" and r > 0.5 for k, r in zip(links.kind, links["tx_gb_s"], strict=True))

        await until(busy)
        links = watched.snapshot().links
        assert links["peak_gb_s"][links.kind.index("nvlink")] == pytest.approx(26.562)
        nvml.write(field138=1, field90=1562)  # the counter starts anew, the link is degraded
        await until(lambda: "degraded" in watched.snapshot().links.state)
        assert not any(r < 0 for r in watched.snapshot().links["tx_gb_s"])


async def test_a_limit_over_ssh_and_its_end_with_the_connection(nvml: FakeNvml, make_sshd: MakeSshd) -> None:
    source = source_of(make_sshd(nvml.environment))
    async with polled(source) as watched:
        await watched.reaches(NodeState.LIVE)
        command = {"id": "x1", "do": "power_limit", "gpus": {"1": 450}, "lease_s": 15}
        result = await source.command(command, 10)
        assert result.state == "done"
        assert result.gpus["1"].now_w == 450
        await until(lambda: watched.snapshot().gpus["power_limit_w"][1] == 450)
    await until(lambda: nvml.limits()[1] == 700000, what="the limit given back after the console is gone")


async def test_an_unknown_key_is_refused_and_named(nvml: FakeNvml, make_sshd: MakeSshd, tmp_path: Path) -> None:
    server = make_sshd(nvml.environment)
    empty = tmp_path / "none_known"
    empty.touch()
    async with polled(source_of(server, known_hosts=empty)) as watched:
        status = await watched.reaches(NodeState.ERROR, says="is not known")
        assert "SHA256:" in status.reason
        assert "ssh-keyscan" in status.reason
        assert status.samples == 0


async def test_a_changed_key_is_refused_and_told_apart(nvml: FakeNvml, make_sshd: MakeSshd) -> None:
    server = make_sshd(nvml.environment)
    server.stop()
    make_key(server.host_key)
    server.start()
    async with polled(source_of(server)) as watched:
        status = await watched.reaches(NodeState.ERROR, says="has CHANGED")
        assert "ssh-keygen -R" in status.reason


async def test_no_known_hosts_file_is_not_taken_for_trust(nvml: FakeNvml, make_sshd: MakeSshd, tmp_path: Path) -> None:
    async with polled(source_of(make_sshd(nvml.environment), known_hosts=tmp_path / "absent")) as watched:
        await watched.reaches(NodeState.ERROR, says="there is no known_hosts file")


async def test_a_wrong_login_key(nvml: FakeNvml, make_sshd: MakeSshd, tmp_path: Path) -> None:
    async with polled(source_of(make_sshd(nvml.environment), identity=make_key(tmp_path / "other"))) as watched:
        await watched.reaches(NodeState.ERROR, says="refused the login")


async def test_no_server_at_all(make_sshd: MakeSshd) -> None:
    server = make_sshd()
    server.stop()
    server.port = free_port()
    async with polled(source_of(server)) as watched:
        await watched.reaches(NodeState.DOWN, says="no SSH server answers")


async def test_no_python_on_the_node(make_sshd: MakeSshd) -> None:
    """A login whose commands find neither python3 nor a tool: env says so and exits 127. All that was looked for is
    named."""
    server = make_sshd(extra="ForceCommand env PATH=/nonexistent /usr/bin/env python3 -c 0\n")
    async with polled(source_of(server)) as watched:
        await watched.reaches(NodeState.ERROR, says="there is no python3 on 127.0.0.1")
        assert "nor is there nvidia-smi, amd-smi or rocm-smi" in watched.status().reason


async def test_no_driver_on_the_node(make_sshd: MakeSshd) -> None:
    async with polled(source_of(make_sshd())) as watched:
        status = await watched.reaches(NodeState.ERROR, says="no NVIDIA driver is loaded on this node")
        await until(lambda: watched.status().samples > 1, what="samples of a node without GPUs")
        assert status.hostname


async def test_a_banner_and_half_lines_are_no_trouble(nvml: FakeNvml, make_sshd: MakeSshd, tmp_path: Path) -> None:
    shout = tmp_path / "shout"
    shout.write_text(
        '#!/bin/sh\nprintf "Welcome!\\n{\\"tick\\": not JSON\\nno end of line"\nexec sh -c "$SSH_ORIGINAL_COMMAND"\n'
    )
    shout.chmod(0o755)
    server = make_sshd(nvml.environment, extra=f"ForceCommand {shout}\n")
    async with polled(source_of(server)) as watched:
        await watched.reaches(NodeState.LIVE)
        assert watched.snapshot().gpus["temperature_c"][0] == 61


async def test_a_node_that_prints_garbage_for_ever(make_sshd: MakeSshd, nvml: FakeNvml) -> None:
    """Bounded memory, a sentence, and the neighbour keeps its tick."""
    noisy, good = make_sshd(extra="ForceCommand cat /dev/zero\n"), make_sshd(nvml.environment)
    async with polled(source_of(noisy, "noisy"), source_of(good, "good")) as watched:
        await watched.reaches(NodeState.ERROR, says="prints garbage")
        await watched.reaches(NodeState.LIVE, node=1)


async def test_a_node_that_dies_and_comes_back(nvml: FakeNvml, make_sshd: MakeSshd) -> None:
    server = make_sshd(nvml.environment)
    async with polled(source_of(server)) as watched:
        await watched.reaches(NodeState.LIVE)
        server.stop()
        await until(lambda: watched.status().state is NodeState.DOWN)
        celsius = watched.snapshot().gpus["temperature_c"]
        assert all(c != c for c in celsius), "the readings of a dead node are gone, not kept and not 0"
        server.start()
        await watched.reaches(NodeState.LIVE)


async def test_a_frozen_node_is_stale_and_others_keep_their_tick(nvml: FakeNvml, make_sshd: MakeSshd) -> None:
    frozen, good = make_sshd(nvml.environment), make_sshd(nvml.environment)
    async with polled(source_of(frozen, "frozen"), source_of(good, "good")) as watched:
        await watched.reaches(NodeState.LIVE, 0)
        await watched.reaches(NodeState.LIVE, 1)
        frozen.signal(signal.SIGSTOP)
        try:
            status = await watched.reaches(NodeState.STALE, 0, "no sample for")
            assert status.last_sample is not None
            before = watched.status(1).samples
            await watched.reaches(NodeState.DOWN, 0, "was lost")
            assert watched.status(1).state is NodeState.LIVE
            assert watched.status(1).samples > before + 5
        finally:
            frozen.signal(signal.SIGCONT)
        await watched.reaches(NodeState.LIVE, 0)


async def test_a_command_cut_off_in_flight_is_unknown_not_failed(nvml: FakeNvml, make_sshd: MakeSshd) -> None:
    server = make_sshd(nvml.environment)
    source = source_of(server)
    async with polled(source) as watched:
        await watched.reaches(NodeState.LIVE)
        server.signal(signal.SIGSTOP)
        command = {"id": "cut", "do": "power_limit", "gpus": {"0": 500}, "lease_s": 15}
        answer = asyncio.create_task(source.command(command, 20))
        await watched.reaches(NodeState.DOWN)
        assert (await answer).state == "unknown"
        server.signal(signal.SIGCONT)
        refused = await SshSource("never", "127.0.0.1", 1, None, Way(server.known_hosts), 1).command(command, 1)
        assert refused.state == "failed"
