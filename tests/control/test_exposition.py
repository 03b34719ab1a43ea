"""The scrape target: its text, its server, and a real Prometheus that reads it."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.act.alarm import Alarm, Priority
from engine.control import scrape
from engine.control.control import Control
from engine.control.exposition import exposition
from engine.profile import ProfileError
from engine.telemetry.snapshot import NodeState
from tests.parts.prometheus import PrometheusServer
from tests.parts.still import still
from tui.cli import main

LINE = re.compile(r'rackside_[a-z0-9_]+(\{([a-z_]+="([^"\\\n]|\\.)*",?)+\})? (\+Inf|-Inf|-?[0-9.e+-]+)')


@pytest.fixture
def control(tmp_path: Path) -> Control:
    """Four nodes, one of them down, and a job."""
    return still(tmp_path, down=[1]).control


def sample(text: str, name: str, **labels: str) -> float | None:
    """The value of the one sample of that name with these labels among its own."""
    found = [
        line
        for line in text.splitlines()
        if line.startswith((f"{name}{{", f"{name} ")) and all(f'{k}="{v}"' in line for k, v in labels.items())
    ]
    assert len(found) <= 1, found
    return float(found[0].rpartition(" ")[2]) if found else None


def test_the_page_says_what_the_console_shows(control: Control) -> None:
    text, now = scrape.page(control), control.snapshot
    table = now.gpus
    assert sample(text, "rackside_gpu_temperature_celsius", node="n04", gpu="5") == table["temperature_c"][29]
    assert sample(text, "rackside_gpu_sm_clock_hertz", node="n01", gpu="0") == table["sm_clock_mhz"][0] * 1e6
    assert sample(text, "rackside_node_state", node="n02", state="down") == 1
    assert sample(text, "rackside_node_state", node="n02", state="live") == 0
    assert sample(text, "rackside_gpu_temperature_celsius", node="n02", gpu="0") is None
    assert now.nodes[0].last_sample is not None
    age = now.time - now.nodes[0].last_sample
    assert sample(text, "rackside_node_sample_age_seconds", node="n01") == pytest.approx(age)
    assert sample(text, "rackside_alarms", priority="critical") == sum(
        a.priority is Priority.CRITICAL for a in control.alarms
    )
    assert sample(text, "rackside_alarm_since_seconds", key="node:n02", priority="critical") is not None
    job = control.jobs.current
    assert job is not None
    assert sample(text, "rackside_job_step_seconds", job=job.name) == job.step_s
    assert sample(text, "rackside_job_tokens_per_second", job=job.name) == job.tokens_per_s
    assert sample(text, "rackside_job_attached", job=job.name) == 1
    forecast = control.watch.forecast()
    assert sample(text, "rackside_gpu_forecast_60s_celsius", node="n04", gpu="5") == forecast.celsius[29, 5]
    assert sample(text, "rackside_gpu_forecast_60s_celsius", node="n01", gpu="0") == forecast.celsius[0, 5]
    assert forecast.times_s[5] == 60
    assert sample(text, "rackside_gpu_forecast_steady_celsius", node="n04", gpu="5") == forecast.settled_c[29]
    assert sample(text, "rackside_gpu_time_to_limit_seconds", node="n04", gpu="5") == forecast.reaches_s[29]


def test_every_line_is_of_the_format(control: Control) -> None:
    text = scrape.page(control)
    assert text.endswith("\n")
    lines, seen = text.splitlines(), set()
    for at, line in enumerate(lines):
        if line.startswith("# HELP "):
            name = line.split()[2]
            assert name not in seen
            seen.add(name)
            assert lines[at + 1].split()[:3] == ["#", "TYPE", name]
            assert lines[at + 1].split()[3] in ("gauge", "counter")
            assert lines[at + 1].endswith("counter") == name.endswith("_total")
        elif not line.startswith("# TYPE "):
            assert LINE.fullmatch(line), line
            assert line.startswith((f"{name}{{", f"{name} "))
    assert "nan" not in text.lower()


def test_labels_are_escaped_and_what_is_unknown_is_left_out(control: Control) -> None:
    table = control.snapshot.gpus
    columns = {m: np.full(len(table), np.nan) for m in table.columns}
    blind = replace(control.snapshot, gpus=replace(table, columns=columns))
    alarm = Alarm('a"b\\c\nd', Priority.NOTICE, "x", 1.5)
    text = exposition(control.cluster, blind, [alarm, alarm], [], None)
    assert r'rackside_alarm_since_seconds{key="a\"b\\c\nd",priority="notice"} 1.5' in text
    assert "rackside_gpu_" not in text
    assert "rackside_job_" not in text


def test_old_readings_are_not_given_as_new(control: Control) -> None:
    first, *others = control.snapshot.nodes
    stale = replace(control.snapshot, nodes=(replace(first, state=NodeState.STALE), *others))
    text = exposition(control.cluster, stale, [], [], None)
    assert sample(text, "rackside_gpu_temperature_celsius", node=first.name, gpu="0") is None
    assert sample(text, "rackside_node_state", node=first.name, state="stale") == 1
    assert sample(text, "rackside_node_sample_age_seconds", node=first.name) is not None


async def test_a_real_prometheus_reads_it(control: Control, prometheus: Callable[..., PrometheusServer]) -> None:
    async with scrape.serving(control, "127.0.0.1", 0) as port:
        server = await asyncio.to_thread(prometheus, rackside=port)
        up = 'up{job="rackside"} == 1'
        await asyncio.to_thread(server.until, lambda: server.query(up), "rackside is scraped")
        found = await asyncio.to_thread(server.query, "rackside_gpu_temperature_celsius")
        forecast = await asyncio.to_thread(server.query, 'rackside_gpu_forecast_60s_celsius{node="n04",gpu="5"}')
        alarms = await asyncio.to_thread(server.query, "sum(rackside_alarms)")
    values: dict[Any, float] = {(s["metric"]["node"], s["metric"]["gpu"]): float(s["value"][1]) for s in found}  # type: ignore
    assert len(values) == 24
    assert values["n04", "5"] == control.snapshot.gpus["temperature_c"][29]
    assert len(forecast) == 1
    assert float(alarms[0]["value"][1]) == len(control.alarms)  # type: ignore[index]


async def asked(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    reply = await reader.read()
    writer.close()
    return reply


@pytest.mark.parametrize(
    ("request_", "answer"),
    [
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4"),
        (b"GET / HTTP/1.0\r\n\r\n", b"HTTP/1.1 200"),
        (b"GET /other HTTP/1.1\r\n\r\n", b"HTTP/1.1 404"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.1 405"),
        (b"\x16\x03\x01\r\n\r\n", b"HTTP/1.1 405"),
        (b"x" * 70000, b""),
    ],
)
async def test_the_server_answers_or_hangs_up(control: Control, request_: bytes, answer: bytes) -> None:
    async with scrape.serving(control, "127.0.0.1", 0) as port:
        try:
            reply = await asked(port, request_)
        except ConnectionError:
            reply = b""
        assert reply.startswith(answer)
        assert (await asked(port, b"HEAD /metrics HTTP/1.1\r\n\r\n")).endswith(b"\r\n\r\n")


async def test_a_taken_port_is_a_sentence(control: Control) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ProfileError, match="choose another with --listen"):
            async with scrape.serving(control, "127.0.0.1", taken.getsockname()[1]):
                pass


def test_addresses() -> None:
    assert scrape.address("127.0.0.1:9464") == ("127.0.0.1", 9464)
    assert scrape.address(":9464") == ("127.0.0.1", 9464)
    assert scrape.address("[::]:1") == ("::", 1)
    for wrong in ("9464x", "h:1", "1.2.3.4", "127.0.0.1:70000"):
        with pytest.raises(ProfileError):
            scrape.address(wrong)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--prometheus"], "--cluster C"),
        (["--prometheus", "--cluster", "lab", "--listen", "gpu-host:1"], "write its IP address"),
        (["--prometheus", "plan.yaml", "--cluster", "lab"], "takes no plan"),
        ([], "export takes a PLAN and --to"),
        (["compute-bound", "--to", "yaml", "--listen", ":1"], "export takes a PLAN and --to"),
    ],
)
def test_the_command_line(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", *words]) == 2
    assert sentence in capsys.readouterr().err


async def test_the_whole_way_round(control: Control) -> None:
    """A console that reads nothing still serves: what it does not know is left out."""
    cluster = msgspec.structs.replace(control.cluster, poll_interval_s=0.05)
    empty = Control(cluster, {}, control.policy, control._audit, "ops@test", read_only=True)
    async with empty.running(), scrape.serving(empty, "127.0.0.1", 0) as port:
        reply = await asked(port, b"GET /metrics HTTP/1.1\r\n\r\n")
    assert b'rackside_node_state{node="n01",state="connecting"} 1.0' in reply
    assert b"rackside_gpu_" not in reply
