"""Nodes without python3 over a real OpenSSH server: their own tools are read, and every way in which these fail."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import signal
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine.telemetry import ssh
from engine.telemetry.loader import CONSOLE
from engine.telemetry.local import LocalSource
from engine.telemetry.shell import loader as shellloader
from engine.telemetry.shell import reader as shell
from engine.telemetry.snapshot import NodeState, Snapshot
from engine.telemetry.source import Backoff
from engine.telemetry.ssh import SshSource
from engine.telemetry.store import Store
from tests.parts.sshd import Sshd
from tests.parts.tools import Tools, bus, h100, in_group, listed, notes, shells, tools, uuid
from tests.parts.waiting import until
from tests.telemetry.test_ssh import Watched, source_of

__all__ = ["tools"]

MakeSshd = Callable[..., Sshd]
AMD_INTERVAL_S = 1.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "MOST_S", 0.5)
    monkeypatch.setattr(Backoff, "SLOW_S", 0.5)
    monkeypatch.setattr(shellloader, "RETRY_S", 0.3)
    monkeypatch.setattr(shellloader, "POLL_S", 1.0)
    monkeypatch.setattr(shellloader, "SIDE_S", 0.4)


@asynccontextmanager
async def polled(source: SshSource | LocalSource, interval_s: float = 0.2) -> AsyncIterator[Watched]:
    watched = Watched([source.name])
    source._interval_s = interval_s
    watched.store = Store([(source.name, 2)], interval_s)
    task = asyncio.create_task(source.run(watched.store))
    try:
        yield watched
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def values(snapshot: Snapshot, metric: str) -> list[float | None]:
    """A column, None where there is no number."""
    return [None if math.isnan(v) else float(v) for v in snapshot.gpus[metric]]


def console_of(node: str) -> str:
    return f"{CONSOLE}-{hashlib.sha256(node.encode()).hexdigest()[:12]}"


# nvidia-smi.

THRESHOLDS = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log><driver_version>555.42.06</driver_version><attached_gpus>2</attached_gpus>
{gpus}</nvidia_smi_log>
"""


def details(*gpus: tuple[int, str]) -> str:
    def one(index: int, more: str) -> str:
        return f"""<gpu id="0000{bus(index)}"><uuid>{uuid(index)}</uuid>
<temperature><gpu_temp>58 C</gpu_temp><gpu_temp_tlimit>29 C</gpu_temp_tlimit>
<gpu_temp_max_tlimit_threshold>-8 C</gpu_temp_max_tlimit_threshold>
<gpu_temp_slow_tlimit_threshold>-2 C</gpu_temp_slow_tlimit_threshold></temperature>
<supported_clocks><supported_mem_clock><value>2619 MHz</value>
<supported_graphics_clock>1980 MHz</supported_graphics_clock>
</supported_mem_clock></supported_clocks>{more}</gpu>
"""

    return THRESHOLDS.format(gpus="".join(one(i, more) for i, more in gpus))


def two(tools: Tools) -> None:
    tools.nvidia(h100(0), h100(1, temperature__gpu="61", utilization__gpu="0 %"))


async def test_a_healthy_node(tools: Tools, make_sshd: MakeSshd) -> None:
    two(tools)
    tools.put("details", details((0, ""), (1, "")))
    tools.put("topo", "\tGPU0\tGPU1\tmlx5_2\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV18\tPIX\t0-31\t0\n")
    tools.put("nvlink", listed(["H", "H"]).replace("\n", "\n\t Link 0: 26.562 GB/s\n"))
    tools.put("errors", listed(["H"]) + "\t Link 0: Replay Errors: 0\n\t Link 0: CRC Errors: 3\n")
    tools.put(
        "apps",
        f"gpu_uuid, pid, process_name, used_gpu_memory [MiB]\n{uuid(1)}, 4711, /opt/my, env/bin/python, 60000 MiB\n",
    )
    hooks = tools.folder / "hooks"
    hooks.mkdir(mode=0o700)
    job = await asyncio.start_unix_server(lambda *_: None, hooks / "7.sock")
    source = source_of(make_sshd({"RACKSIDE_HOOK_DIR": str(hooks)}, extra=tools.login()))
    async with job, polled(source) as watched:
        await watched.reaches(NodeState.LIVE)
        await until(lambda: str(hooks / "7.sock") in watched.status().hook_sockets, what="the job's socket")
        await until(lambda: any(watched.snapshot().gpus.processes), what="processes")
        await until(lambda: values(watched.snapshot(), "slowdown_c") == [89.0, 89.0], what="thresholds")
        await until(lambda: "nvlink" in watched.snapshot().links.kind, what="links")
        await until(lambda: 3.0 in list(watched.snapshot().links["errors"]), what="errors of links")
        snapshot = watched.snapshot()
        status, gpus = snapshot.nodes[0], snapshot.gpus
        assert (status.reader, status.driver) == ("nvidia-smi", "555.42.06")
        assert "there is no python3" in status.because
        assert status.hostname
        assert status.load >= 0
        assert not status.troubles
        assert values(snapshot, "temperature_c") == [58, 61]
        assert values(snapshot, "margin_c") == [29, 29]
        assert values(snapshot, "power_w") == [431.25, 431.25]
        assert values(snapshot, "power_limit_w") == [650, 650]
        assert values(snapshot, "utilization_pct") == [93, 0]
        assert values(snapshot, "memory_total_mib") == [81559, 81559]
        assert values(snapshot, "held_by_power") == [1, 1]
        assert values(snapshot, "held_by_heat") == [0, 0]
        assert values(snapshot, "energy_j") == [None, None], "what was not asked is not known"
        assert gpus.bus_id == (bus(0), bus(1))
        assert gpus.facts[0].near == ("mlx5_2",)
        assert gpus.facts[0].cpus == "0-31"
        assert [(p.pid, p.name, p.memory_mib) for p in gpus.processes[1]] == [(4711, "python", 60000)]
        links = snapshot.links
        rates = {k: links["peak_gb_s"][links.kind.index(k)] for k in ("nvlink", "pcie")}
        assert rates["nvlink"] == pytest.approx(26.562)
        assert rates["pcie"] == pytest.approx(63, rel=0.01), "the generation drops when idle: that is no fault"
        assert set(links.state[: links.kind.index("nic")] if "nic" in links.kind else links.state) == {"active"}
        assert math.isnan(links["tx_gb_s"][links.kind.index("nvlink")]), "only its speed is printed"
        two(tools)
        tools.nvidia(h100(0, temperature__gpu="84"), h100(1))
        await until(lambda: values(watched.snapshot(), "temperature_c") == [84, 58])
        refused = await source.command({"id": "a", "do": "power_limit", "gpus": {"0": 400}}, 1)
        assert refused.state == "failed"
        assert "nvidia-smi" in refused.reason
        assert len(tools.calls("-lms")) == 1, "one long-lived reader"


async def test_a_comma_in_a_name_and_a_gpu_that_needs_a_reset(tools: Tools, make_sshd: MakeSshd) -> None:
    fields = ("clocks__sm", "utilization__gpu", "memory__used", "power__draw")
    reset = dict.fromkeys(fields, "[GPU requires reset]")
    tools.nvidia(h100(0, name="Graphics, Of, Some Kind"), h100(1, temperature__gpu="[Unknown Error]", **reset))
    async with polled(source_of(make_sshd(extra=tools.login()))) as watched:
        status = await watched.reaches(NodeState.LIVE)
        snapshot = watched.snapshot()
        assert snapshot.gpus.name == ("Graphics, Of, Some Kind", "NVIDIA H100 80GB HBM3")
        assert values(snapshot, "temperature_c") == [58, None]
        assert values(snapshot, "power_w") == [431.25, None]
        assert values(snapshot, "memory_total_mib") == [81559, 81559]
        assert [t for t in status.troubles if bus(1) in t and "reset" in t]
        assert "needs a reset" in (snapshot.gpus.facts[1].note or "")


async def test_a_gpu_that_is_lost_and_comes_back(tools: Tools, make_sshd: MakeSshd) -> None:
    tools.nvidia(h100(0), h100(1), h100(2))
    async with polled(source_of(make_sshd(extra=tools.login()))) as watched:
        await watched.reaches(NodeState.LIVE)
        tools.put("said", f"Unable to determine the device handle for GPU{bus(1)}: Unknown Error\n")
        tools.put("status", "255")
        # The driver counts the others anew.
        tools.nvidia(h100(0), h100(2, index="1"))
        await until(lambda: watched.status().troubles == (f"GPU at {bus(1)} does not answer",))
        snapshot = watched.snapshot()
        assert snapshot.nodes[0].state is NodeState.LIVE
        assert values(snapshot, "temperature_c") == [58, None, 58]
        assert snapshot.gpus.index == (0, 1, 2)
        assert snapshot.gpus.facts[1].lost
        samples = watched.status().samples
        await until(lambda: watched.status().samples > samples + 2, what="the others are read on")
        tools.drop("said")
        tools.drop("status")
        tools.nvidia(h100(0), h100(1), h100(2, name="NVIDIA H200"))
        await until(lambda: watched.snapshot().gpus.name[2] == "NVIDIA H200", what="facts found anew")
        assert not watched.status().troubles
        assert values(watched.snapshot(), "temperature_c") == [58, 58, 58]


async def test_a_gpu_lost_before_the_first_look(tools: Tools, make_sshd: MakeSshd) -> None:
    tools.nvidia(h100(0), h100(2))
    tools.put("said", f"Unable to determine the device handle for GPU{bus(1)}: Unknown Error\n")
    tools.put("status", "255")
    async with polled(source_of(make_sshd(extra=tools.login()))) as watched:
        await watched.reaches(NodeState.LIVE)
        snapshot = watched.snapshot()
        assert snapshot.gpus.bus_id == (bus(0), bus(1), bus(2))
        assert values(snapshot, "power_w") == [431.25, None, 431.25]
        assert snapshot.nodes[0].troubles == (f"GPU at {bus(1)} does not answer",)


async def test_driver_and_library_differ(tools: Tools, make_sshd: MakeSshd) -> None:
    two(tools)
    async with polled(source_of(make_sshd(extra=tools.login()))) as watched:
        await watched.reaches(NodeState.LIVE)
        tools.put("said", "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 555.99\n")
        tools.put("status", "18")
        tools.put("rows", "")
        await watched.reaches(NodeState.ERROR, says="driver/library version mismatch")
        assert values(watched.snapshot(), "temperature_c") == [None, None]
        tools.drop("said")
        tools.drop("status")
        tools.nvidia(h100(0, driver_version="555.99"), h100(1, driver_version="555.99"))
        await watched.reaches(NodeState.LIVE)
        await until(lambda: watched.status().driver == "555.99", what="facts found anew")


async def test_an_old_driver_is_asked_for_the_old_names(tools: Tools, make_sshd: MakeSshd) -> None:
    two(tools)
    tools.put("refuses", "")
    tools.put("details", details((0, ""), (1, "")).replace("_tlimit", "_none"))
    async with polled(source_of(make_sshd(extra=tools.login()))) as watched:
        status = await watched.reaches(NodeState.LIVE)
        assert "does not know clocks_event_reasons.active" in status.because
        assert values(watched.snapshot(), "throttle") == [4, 4]
        await until(lambda: len(tools.calls("-lms", "clocks_throttle_reasons.active")) == 1)


async def test_mig_and_links_that_are_down(tools: Tools, make_sshd: MakeSshd) -> None:
    tools.nvidia(h100(0, utilization__gpu="[N/A]", mig__mode__current="Enabled"), h100(1), h100(2))
    lines = listed(["H", "H", "H"]).splitlines()
    tools.put("list", "\n".join([lines[0], "  MIG 3g.40gb     Device  0: (UUID: MIG-5)", *lines[1:]]) + "\n")
    said = (
        "NVLink is not supported in MIG mode",
        "\t Link 0: 26.562 GB/s\n\t Link 1: 1.562 GB/s\n\t Link 2: <inactive>",
        "NVML: Unable to retrieve NVLink information as all links are inActive",
    )
    tools.put("nvlink", "".join(f"{line}\n{text}\n" for line, text in zip(lines, said, strict=True)))
    async with polled(source_of(make_sshd(extra=tools.login()))) as watched:
        await watched.reaches(NodeState.LIVE)
        await until(lambda: "nvlink" in watched.snapshot().links.kind)
        snapshot = watched.snapshot()
        links = snapshot.links
        found = [(g, s) for g, k, s in zip(links.gpu, links.kind, links.state, strict=True) if k == "nvlink"]
        assert found == [(0, "unknown"), (1, "active"), (1, "degraded"), (1, "inactive"), (2, "inactive")]
        await until(lambda: "inactive" in (watched.snapshot().gpus.facts[2].note or ""))
        assert [m.name for m in watched.snapshot().gpus.facts[0].mig] == ["3g.40gb"]
        assert values(snapshot, "utilization_pct") == [None, 93, 93], "in MIG mode it is not known, and not 0"


async def test_banners_and_half_lines(tools: Tools, make_sshd: MakeSshd) -> None:
    two(tools)
    shout = "printf 'Welcome!\\n0, 1, 2\\nquota 83%% used, no end of line'"
    async with polled(source_of(make_sshd(extra=tools.login(shout=shout)))) as watched:
        await watched.reaches(NodeState.LIVE)
        assert values(watched.snapshot(), "temperature_c") == [58, 61]


async def test_a_tool_that_hangs(tools: Tools, make_sshd: MakeSshd) -> None:
    """The node is stale, nothing is killed, and nothing is started beside it; not even over a new connection."""
    two(tools)
    source = source_of(make_sshd(extra=tools.login()))
    async with polled(source) as watched:
        await watched.reaches(NodeState.LIVE)
        await until(lambda: tools.calls("-lms"))
        tools.put("hang", "")
        await watched.reaches(NodeState.STALE, says="no sample for")
        (stream,) = {int(line.split()[0]) for line in tools.calls("-lms")}
        begun = len(tools.calls("--query-gpu"))
        assert source._connection is not None
        source._connection.abort()
        await watched.reaches(NodeState.ERROR, says="hangs in the driver: none is started beside it")
        assert stream in tools.running(), "a GPU's reader is never killed"
        assert len(tools.calls("--query-gpu")) == begun
        tools.drop("hang")
        await watched.reaches(NodeState.LIVE)


async def test_a_tool_that_never_answers(tools: Tools, make_sshd: MakeSshd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "FIRST_WORD_S", 1.5)
    two(tools)
    tools.put("hang", "")
    async with polled(source_of(make_sshd(extra=tools.login()))) as watched:
        await watched.reaches(NodeState.ERROR, says="nvidia-smi has not answered")
        assert len(tools.calls()) == 1
        tools.drop("hang")
        await watched.reaches(NodeState.LIVE)


async def test_everything_ends_with_the_connection(tools: Tools, make_sshd: MakeSshd) -> None:
    two(tools)
    async with polled(source_of(make_sshd(extra=tools.login()))) as watched:
        await watched.reaches(NodeState.LIVE)
        await until(lambda: tools.calls("-lms"))
        found = shells(console_of("n1"))
        assert len(found) >= 4, "the reader, its loops and the tool"
        group = os.getpgid(found[0])
    await until(lambda: not in_group(group), what="the end of all that was started")
    assert not tools.running()
    assert not notes(console_of("n1")).exists()


async def test_an_earlier_reader_of_this_console_is_asked_to_end(tools: Tools, make_sshd: MakeSshd) -> None:
    """Its connection is gone, and nobody on the node has noticed."""
    two(tools)
    places = {**os.environ, "PATH": f"{tools.folder}:{os.environ['PATH']}"}
    earlier = await asyncio.create_subprocess_exec(
        "sh", "-s", stdin=PIPE, stdout=PIPE, stderr=PIPE, env=places, start_new_session=True
    )
    assert earlier.stdin is not None
    earlier.stdin.write(shellloader.shell_payload(0.2, "n1"))
    await until(lambda: len(tools.calls("-lms")) == 1, what="its stream")
    async with polled(source_of(make_sshd(extra=tools.login()))) as watched:
        await watched.reaches(NodeState.LIVE)
        assert await asyncio.wait_for(earlier.wait(), 10) == -signal.SIGTERM
        await until(lambda: len(tools.running()) == 1, what="one stream, the new reader's")


async def test_python_is_not_asked_for_again_at_once(
    tools: Tools, make_sshd: MakeSshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    two(tools)
    source = source_of(make_sshd(extra=tools.login()))
    async with polled(source) as watched:
        for forget_s, times in ((600.0, 1), (600.0, 1), (-1.0, 2)):
            monkeypatch.setattr(ssh, "FORGET_S", forget_s)
            if times > 1 or watched.status().samples:
                assert source._connection is not None
                source._connection.abort()
                await watched.reaches(NodeState.DOWN)
            await watched.reaches(NodeState.LIVE)
            assert tools.asked_for_python() == times


async def test_no_tools_at_all(tools: Tools, make_sshd: MakeSshd) -> None:
    async with polled(source_of(make_sshd(extra=tools.login()))) as watched:
        status = await watched.reaches(NodeState.ERROR, says="there is no python3 on 127.0.0.1")
        assert all(name in status.reason for name in ("nvidia-smi", "amd-smi", "rocm-smi", "/opt/rocm/bin"))


async def test_a_node_that_prints_garbage(tools: Tools, make_sshd: MakeSshd) -> None:
    async with polled(source_of(make_sshd(extra=tools.login(shout="exec cat /dev/zero")))) as watched:
        await watched.reaches(NodeState.ERROR, says="prints garbage")


# AMD's tools.


def die(watts: str, celsius: str, **more: str) -> dict[str, str]:
    return {
        "Temperature (Sensor edge) (C)": "44.0",
        "Temperature (Sensor junction) (C)": celsius,
        "Average Graphics Package Power (W)": watts,
        "GPU use (%)": "88",
        "VRAM Total Memory (B)": "68702699520",
        "VRAM Total Used Memory (B)": "34351349760",
        "sclk clock speed:": "(1700Mhz)",
        "Card series": "AMD Instinct MI250 (MCM) OAM",
        **more,
    }


async def test_two_dies_of_one_module(tools: Tools, make_sshd: MakeSshd) -> None:
    cards = {
        "card0": die("301.0", "61.0", **{"Max Graphics Package Power (W)": "500.0", "PCI Bus": "0000:31:00.0"}),
        "card1": die("N/A (Secondary die)", "59.0", **{"PCI Bus": "0000:34:00.0", "Firmware": "1.7 " * 2500}),
        "system": {"Driver version": "6.3.6"},
    }
    tools.rocm(cards, "WARNING: a device is in a low-power state\n")
    async with polled(source_of(make_sshd(extra=tools.login())), AMD_INTERVAL_S) as watched:
        status = await watched.reaches(NodeState.LIVE)
        snapshot = watched.snapshot()
        assert (status.reader, status.driver) == ("rocm-smi", "6.3.6")
        assert values(snapshot, "temperature_c") == [61, 59]
        assert values(snapshot, "power_w") == [301, None]
        assert values(snapshot, "power_limit_w") == [500, None]
        assert "module" in (snapshot.gpus.facts[1].note or "")
        await until(lambda: watched.status().samples > 1, what="another poll")


async def test_this_very_machine_with_amds_tools_alone(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe runs and finds no NVML: the reader beside it takes over, and says why."""
    tools.rocm({"card0": die("301.0", "61.0", **{"PCI Bus": "0000:31:00.0"})})
    monkeypatch.setenv("PATH", f"{tools.folder}:{os.environ['PATH']}")
    source = LocalSource("me", AMD_INTERVAL_S)
    async with polled(source, interval_s=AMD_INTERVAL_S) as watched:
        status = await watched.reaches(NodeState.LIVE)
        assert (status.reader, values(watched.snapshot(), "temperature_c")) == ("rocm-smi", [61])
        assert "NVIDIA driver" in status.because
        answer = await source.command({"do": "power_limit", "id": "x", "gpus": {"0": 300}, "lease_s": 9}, 15.0)
        assert "there is no such AMD GPU on this node" in answer.reason, "the kernel here shows none"


def instinct(index: int, hotspot: Any, watts: float) -> dict[str, Any]:
    return {
        "gpu": index,
        "temperature": {"edge": {"value": 41, "unit": "C"}, "hotspot": {"value": hotspot, "unit": "C"}},
        "power": {"socket_power": {"value": watts, "unit": "W"}},
        "usage": {"gfx_activity": {"value": 77, "unit": "%"}},
    }


def facts(index: int) -> dict[str, Any]:
    return {
        "gpu": index,
        "asic": {"market_name": "AMD Instinct MI300X"},
        "bus": {
            "bdf": f"0000:{index + 5:02x}:00.0",
            "max_pcie_width": 16,
            "max_pcie_speed": {"value": 32, "unit": "GT/s"},
        },
        "limit": {"max_power": {"value": 750, "unit": "W"}, "socket_power": {"value": 700, "unit": "W"}},
    }


async def test_a_torn_temperature_of_amd_smi(tools: Tools, make_sshd: MakeSshd) -> None:
    tools.amd([instinct(1, 66, 512), instinct(0, 4093, 498)], [facts(0), facts(1)], "WARNING: not in render\n")
    async with polled(source_of(make_sshd(extra=tools.login())), AMD_INTERVAL_S) as watched:
        status = await watched.reaches(NodeState.LIVE)
        snapshot = watched.snapshot()
        assert status.reader == "amd-smi"
        assert values(snapshot, "temperature_c") == [41, 66], "the edge's where the junction's is torn"
        assert values(snapshot, "power_w") == [498, 512]
        assert values(snapshot, "power_limit_w") == [700, 700]
        assert snapshot.gpus.name == ("AMD Instinct MI300X",) * 2
        assert snapshot.gpus.bus_id == ("0000:05:00.0", "0000:06:00.0")


async def test_python_without_nvml_where_amd_smi_is_there(tools: Tools, make_sshd: MakeSshd) -> None:
    tools.amd([instinct(0, 50, 300)], [facts(0)])
    tools.put("nvidia-smi", "")
    async with polled(source_of(make_sshd(extra=tools.login(hide=False))), AMD_INTERVAL_S) as watched:
        status = await watched.reaches(NodeState.LIVE)
        assert status.reader == "amd-smi"
        assert "no NVIDIA driver" in status.because or "NVML" in status.because
        assert values(watched.snapshot(), "temperature_c") == [50]
