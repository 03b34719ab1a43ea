"""The real probe with the real pynvml on a fake driver: readings, refusals, leases."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pynvml
import pytest

from engine.telemetry.loader import BOOTSTRAP, PROBE, probe_payload
from engine.telemetry.reading import FRAME
from tests.parts.nvml import FakeNvml


class Running:
    """A probe as a process: `record` waits for the next record that has a key, `send` writes a command."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def record(self, key: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(15):
            while line := await self.process.stdout.readline():
                if line.startswith(FRAME):
                    record: dict[str, Any] = json.loads(line[1:])
                    if key in record:
                        return record
        raise AssertionError(f"the probe ended before a record with '{key}'")

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")


@asynccontextmanager
async def probe(nvml: FakeNvml | None, interval_s: float = 0.1) -> AsyncIterator[Running]:
    environment = {**os.environ, **(nvml.environment if nvml else {})}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-u",
        "-c",
        BOOTSTRAP,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
        limit=1 << 22,
    )
    assert process.stdin is not None
    process.stdin.write(probe_payload(interval_s))
    try:
        yield Running(process)
    finally:
        if process.returncode is None:
            process.stdin.close()
            await asyncio.wait_for(process.wait(), 10)


def test_the_probe_runs_on_old_pythons() -> None:
    """The syntax of the probe and of the pynvml that is sent along is Python 3.6's."""
    for path in (PROBE, Path(pynvml.__file__)):
        ast.parse(path.read_text(), feature_version=(3, 6))


async def test_a_healthy_node(nvml: FakeNvml) -> None:
    async with probe(nvml) as running:
        hello = await running.record("hello")
        assert hello["driver"] == "580.00.fake"
        first = hello["gpus"][0]
        assert first["name"] == "NVIDIA H100 80GB HBM3"
        assert (first["power_limit_min_w"], first["power_limit_max_w"]) == (200, 700)
        assert (first["slowdown_c"], first["shutdown_c"]) == (89, 95)
        assert (first["nvlinks"], first["bus_id"]) == (2, "00000000:11:00.0")
        gpu = (await running.record("tick"))["gpus"][1]
        assert gpu["temperature_c"] == 61
        assert gpu["memory_temperature_c"] == 66
        assert gpu["power_w"] == pytest.approx(512.34)
        assert gpu["power_limit_w"] == 700
        assert gpu["sm_clock_mhz"] == 1755
        assert gpu["memory_used_mib"] == 71234
        assert gpu["throttle"] == 4
        assert gpu["energy_j"] == pytest.approx(123456.789)
        assert gpu["nvlinks"][1] == {"link": 1, "active": True, "tx_b": 1024e6, "rx_b": 2048e6, "mb_s": 26562}


async def test_what_is_not_there_is_never_zero(nvml: FakeNvml) -> None:
    """In MIG mode utilisation is not supported; one broken call takes nothing else with it."""
    nvml.write(gpu0_utilization="!3", gpu0_power="!999", gpu0_energy="!3", gpu1_field82="!3")
    async with probe(nvml) as running:
        first, second = (await running.record("tick"))["gpus"]
        assert first["utilization_pct"] == "unsupported"
        assert first["power_w"] == "error"
        assert first["energy_j"] == "unsupported"
        assert first["temperature_c"] == 61
        assert second["memory_temperature_c"] == "unsupported"
        assert second["power_w"] == pytest.approx(512.34)


async def test_a_lost_gpu_is_named_and_the_others_go_on(nvml: FakeNvml) -> None:
    async with probe(nvml) as running:
        await running.record("tick")
        nvml.write(gpu1_temperature="!15", gpu1_power="!15")
        while not (tick := await running.record("tick"))["lost"]:
            pass
        assert tick["lost"] == ["00000000:21:00.0"]
        assert tick["gpus"][1]["power_w"] == "lost"
        assert tick["gpus"][0]["temperature_c"] == 61


async def test_no_driver_is_a_sentence_and_the_node_still_reports(nvml: FakeNvml) -> None:
    async with probe(None) as running:
        hello = await running.record("hello")
        assert "NVML does not start" in hello["trouble"] or "no NVIDIA driver" in hello["trouble"]
        assert (await running.record("tick"))["gpus"] == []
    nvml.write(init="!18")
    async with probe(nvml) as running:
        assert "version mismatch" in (await running.record("hello"))["trouble"]


async def test_a_limit_is_set_read_back_and_answered_once(nvml: FakeNvml) -> None:
    async with probe(nvml) as running:
        running.send(id="one", do="power_limit", gpus={"0": 500, "1": 450}, lease_s=60)
        result = await running.record("result")
        assert result["state"] == "done"
        assert result["gpus"]["1"] == {"before_w": 700, "asked_w": 450, "now_w": 450}
        assert nvml.limits() == {0: 500000, 1: 450000}
        nvml.overrule(0, 600000)
        running.send(id="one", do="power_limit", gpus={"0": 500, "1": 450}, lease_s=60)
        assert (await running.record("result"))["state"] == "done"
        assert nvml.limits()[0] == 600000, "a repeated id must not act again"


@pytest.mark.parametrize(
    ("readings", "limits", "says"),
    [
        ({}, {"0": 900}, "outside the 200 to 700 W"),
        ({}, {"0": 500, "7": 500}, "there is no such GPU"),
        ({"gpu1_limit_set": "!17"}, {"0": 500, "1": 500}, "the driver refused 500 W"),
        ({"gpu1_limit_set": "ignored"}, {"0": 500, "1": 500}, "the driver took 500 W and kept 700.0 W"),
        ({"gpu0_limit_set": "!4"}, {"0": 500}, "sudoers line"),
        ({}, {"zero": 500}, "malformed"),
        ({}, {"0": "much"}, "malformed"),
    ],
)
async def test_all_or_nothing(nvml: FakeNvml, readings: dict[str, str], limits: dict[str, Any], says: str) -> None:
    nvml.write(**readings)
    async with probe(nvml) as running:
        running.send(id="x", do="power_limit", gpus=limits, lease_s=60)
        result = await running.record("result")
        assert result["state"] == "failed"
        assert says in result["reason"]
    assert set(nvml.limits().values()) <= {700000}


async def test_a_lease_that_is_not_renewed_gives_back_what_was_before(nvml: FakeNvml) -> None:
    nvml.overrule(0, 650000)
    async with probe(nvml) as running:
        running.send(id="a", do="power_limit", gpus={"0": 500}, lease_s=60)
        await running.record("result")
        running.send(id="b", do="power_limit", gpus={"0": 400}, lease_s=0.4)
        await running.record("result")
        released = await running.record("released")
        assert (released["released"], released["limit_w"], released["reason"]) == (0, 650, "the lease ran out")
    assert nvml.limits()[0] == 650000, "the limit before the first command, not the default and not the one between"


async def test_the_end_of_input_gives_back_but_not_what_others_set_since(nvml: FakeNvml) -> None:
    async with probe(nvml) as running:
        running.send(id="a", do="power_limit", gpus={"0": 500, "1": 500}, lease_s=60)
        await running.record("result")
        nvml.overrule(1, 300000)
    assert nvml.limits() == {0: 700000, 1: 300000}


async def test_a_permanent_limit_stays(nvml: FakeNvml) -> None:
    async with probe(nvml) as running:
        running.send(id="a", do="power_limit", gpus={"0": 500}, lease_s=None)
        await running.record("result")
    assert nvml.limits() == {0: 500000}


async def test_restore_gives_back_at_once(nvml: FakeNvml) -> None:
    async with probe(nvml) as running:
        running.send(id="a", do="power_limit", gpus={"0": 500}, lease_s=60)
        await running.record("result")
        running.send(id="b", do="restore", gpus=[0])
        assert (await running.record("result"))["state"] == "done"
        assert nvml.limits()[0] == 700000
        running.send(id="c", do="restore", gpus=[1])
        assert "holds no limit" in (await running.record("result"))["reason"]
        running.send(do="nonsense", id="d")
        assert "cannot do 'nonsense'" in (await running.record("result"))["reason"]
