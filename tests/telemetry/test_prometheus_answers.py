"""Servers that answer anything but what a Prometheus should: each is a sentence, never a value."""

from __future__ import annotations

import asyncio
import base64
import http.server
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.profile import ProfileError, Prometheus, metrics
from engine.telemetry.prometheus import api as promapi
from engine.telemetry.prometheus.places import Places, combined, host_of
from engine.telemetry.prometheus.poller import SHIPPED
from engine.telemetry.prometheus.traffic import Traffic
from engine.telemetry.snapshot import GPU_FACTS, GPU_METRICS
from engine.telemetry.source import SourceError
from tests.parts.prometheus import Served, inventory, said
from tests.parts.sshd import free_port

Answer = Callable[[http.server.BaseHTTPRequestHandler, bytes], None]


def half(handler: http.server.BaseHTTPRequestHandler, _: bytes) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"status":"success","data":{')


def slow(handler: http.server.BaseHTTPRequestHandler, _: bytes) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _turn in range(200):  # never quiet for long, never done
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


def huge(handler: http.server.BaseHTTPRequestHandler, _: bytes) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _turn in range(64):
        handler.wfile.write(b" " * (1 << 16))


def fixed(body: bytes, status: int = 200, **headers: str) -> Answer:
    return lambda handler, _: said(handler, body, status, **headers)


WRONG = {
    "login": (fixed(b"no", 401), "the server wants a login (401)"),
    "forbidden": (fixed(b"no", 403), "does not allow this login"),
    "address": (fixed(b"<html>", 404), "(404): is this the API's base URL?"),
    "redirect": (
        fixed(b"", 302, Location="https://sso.test/\x1b[31m"),
        "redirects to https://sso.test/[31m: name that",
    ),
    "own words": (
        fixed(b'{"status":"error","errorType":"bad_data","error":"1:5: parse \\u001b[31merror"}', 400),
        "does not take the query (400): 1:5: parse [31merror",
    ),
    "own words in a good answer": (fixed(b'{"status":"error","error":"too many samples"}'), "too many samples"),
    "unready": (fixed(b"", 503), "not ready (503)"),
    "web page": (fixed(b"<!doctype html><title>Grafana</title>"), "a web page, not JSON: is this the API's base URL?"),
    "garbage": (fixed(b"\xff\xfe\x00"), "not that of a Prometheus API"),
    "other JSON": (fixed(b"[1,2]"), "not that of a Prometheus API"),
    "scalar": (fixed(b'{"status":"success","data":{"resultType":"scalar","result":[1,"1"]}}'), "not that of"),
    "empty": (fixed(b""), "not that of a Prometheus API"),
    "half": (half, "the answer breaks off"),
    "slow": (slow, "no whole answer within"),
    "huge": (huge, "larger than 1 MiB"),
}


@pytest.mark.parametrize("name", WRONG)
async def test_wrong_answers_are_sentences(name: str) -> None:
    answer, sentence = WRONG[name]
    server = Served(answer)
    try:
        api = promapi.Api(Prometheus(url=server.url), timeout_s=0.5, most_bytes=1 << 20)
        with pytest.raises(SourceError) as caught:
            await api.instant("up", list)
    finally:
        server.stop()
    assert sentence in str(caught.value)
    assert "\x1b" not in str(caught.value)


async def test_nobody_listens_and_no_http() -> None:
    with pytest.raises(SourceError, match="connection refused"):
        await promapi.Api(Prometheus(url=f"http://127.0.0.1:{free_port()}")).instant("up", list)

    async def ssh(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"query=up")
        writer.write(b"SSH-2.0-x\r\n")
        writer.close()

    server = await asyncio.start_server(ssh, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(SourceError, match="no HTTP"):
            await promapi.Api(Prometheus(url=f"http://127.0.0.1:{port}")).instant("up", list)


async def test_the_login_is_sent_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def answer(handler: http.server.BaseHTTPRequestHandler, _: bytes) -> None:
        seen.append((handler.headers.get("Authorization"), handler.headers.get("X-Scope-OrgID")))
        said(handler, b'{"status":"success","data":{"resultType":"vector","result":[]}}')

    server = Served(answer)
    (tmp_path / "token").write_text("geheim\n")
    monkeypatch.setenv("RACKSIDE_TEST_TOKEN", "pass")
    try:
        told = inventory(tmp_path, server.url, token_file="token", org="team-a").prometheus
        assert told is not None
        await promapi.Api(told).instant("up", list)
        await promapi.Api(Prometheus(url=server.url, user="me", token_env="RACKSIDE_TEST_TOKEN")).instant("up", list)
        (tmp_path / "token").write_text("two\nlines")
        with pytest.raises(SourceError, match="holds no token") as caught:
            await promapi.Api(told).instant("up", list)
    finally:
        server.stop()
    assert seen == [("Bearer geheim", "team-a"), ("Basic " + base64.b64encode(b"me:pass").decode(), None)]
    assert "two" not in str(caught.value)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"url": "http://me:secret@h:9090"}, "prometheus.url"),
        ({"url": "ftp://h"}, "prometheus.url"),
        ({"labels": "x"}, "unknown key"),
        ({"token_file": "a", "token_env": "b"}, "keep one"),
        ({"step_s": 0}, "prometheus.step_s"),
    ],
)
def test_a_wrong_block_is_a_sentence(tmp_path: Path, more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ProfileError, match=sentence) as caught:
        inventory(tmp_path, **{"url": "http://h:9090", **more})
    assert "secret" not in str(caught.value)


def test_maps_are_checked(tmp_path: Path) -> None:
    assert set(metrics.GpuSeries.__struct_fields__) == {*GPU_METRICS, *GPU_FACTS}
    path, head = tmp_path / "map.yaml", "node_labels: [a]\ngpu_labels: [b]\n"
    for text, sentence in (
        (
            head + "gpu:\n  temprature_c:\n    - {series: X}\n",
            r":4: gpu.temprature_c: unknown key; did you mean 'temper",
        ),
        (head + "gpu: {temperature_c: [{series: 'a b'}]}\n", r":3: gpu.temperature_c\[0\].series"),
        (head + "gpu: {}\n", "temperature_c or power_w needs a series"),
        (head + "gpu: {power_w: [{series: X}]}\nlinks: [{kind: nic, rx: A, tx: B, name: [d], only: '('}]\n", "links"),
        (head + "gpu: {power_w: [{series: X}]}\nlinks: [{kind: nic, rx: A, tx: B}]\n", "a label that names it"),
    ):
        path.write_text(text)
        with pytest.raises(ProfileError, match=sentence):
            metrics.read(path)


# Labels and numbers.


def test_hosts_and_slots() -> None:
    places = Places([("n01", 2), ("n02.a.org", 2), ("N03", 2)], ["Hostname", "instance"], ["gpu", "device"])
    assert [places.node({"instance": v}) for v in ("n01:9400", "N01.b.org:9400", "n02.a.org", "n02", "n03")] == [
        0,
        0,
        1,
        1,
        2,
    ]
    assert places.node({"Hostname": "exporter-7f", "instance": "n01:9400"}) == 0
    assert places.node({"instance": "n02.b.org:1"}) is None
    assert places.node({"instance": "n01.other.org"}) is None
    assert places.ambiguous == {0: ("n01.b.org", "n01.other.org")}
    assert [host_of(v) for v in ("[fe80::1]:9400", "10.0.0.1:9", "h")] == ["fe80::1", "10.0.0.1", "h"]
    assert [places.slot(v) for v in ({"gpu": "3"}, {"device": "nvidia11"}, {"gpu": "x"}, {}, {"gpu": "9999"})] == [
        3,
        11,
        None,
        None,
        None,
    ]


def test_what_is_no_number_is_an_error_and_never_a_value() -> None:
    places = Places([("n", 3)], ["h"], ["g"])
    reply = [
        {"metric": {"h": "n", "g": str(slot)}, "value": [1, text]}
        for slot, text in ((0, "NaN"), (0, "5"), (1, "+Inf"), (2, "7"), (2, "6"))
    ]
    found = places.numbers(promapi.vector(body(reply)))
    ways = metrics.read(SHIPPED).gpu.temperature_c
    values, kinds = combined(ways, {"DCGM_FI_DEV_GPU_TEMP": found}, 3)
    assert kinds.tolist() == [1, 2, 1]
    assert values[[0, 2]].tolist() == [5, 7]


def body(result: Any) -> bytes:
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()


def test_queries_are_quoted() -> None:
    assert promapi.selector("up", {"a": 'x"y\\', "b": "~p.*"}) == 'up{a="x\\"y\\\\",b=~"p.*"}'
    told = metrics.read(SHIPPED)
    traffic = Traffic(None, told, Places([], ["instance"], ["gpu"]), {"c": "d"}, 15.0)  # type: ignore[arg-type]
    assert traffic._query(told.links[1], "rx", "x") == (
        'max by (instance,device) (irate(x{c="d",device=~"(?:^(en|eth|ib|bond|rdma)).*"}[60000ms]))'
    )


@given(st.binary(max_size=400))
def test_any_bytes_are_an_answer_or_a_sentence(data: bytes) -> None:
    for read in (promapi.vector, promapi.matrix):
        try:
            read(data)
        except SourceError as error:
            assert str(error)


_LABELS = st.dictionaries(st.sampled_from(["h", "g", "x"]), st.sampled_from(["n", "n.a.b", "0", "1", "", "\x00"]))
_NUMBER = st.one_of(st.floats().map(str), st.text(max_size=6), st.floats(), st.none())
_SAMPLE = st.fixed_dictionaries(
    {"metric": st.one_of(_LABELS, st.integers(), st.none()), "value": st.tuples(st.one_of(st.floats(0, 2e9)), _NUMBER)}
)


@given(st.lists(_SAMPLE, max_size=12))
def test_no_reading_is_invented(samples: list[dict[str, Any]]) -> None:
    places = Places([("n", 2)], ["h"], ["g"])
    try:
        found = places.numbers(promapi.vector(body(samples)))
    except SourceError:
        return
    sent = {float(v) for s in samples if isinstance(v := s["value"][1], str) and _is_number(v)}
    assert all(math.isnan(v) or v in sent for v in found.values())
    assert set(found) <= set(places.rows.values())
    assert set(places.rows) <= {(0, 0), (0, 1)}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
