"""Telemetry through a real Prometheus, and through servers that answer anything but what they should."""

from __future__ import annotations

import asyncio
import base64
import http.server
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.control.connect import sources
from engine.profile import Cluster, ProfileError, Prometheus, catalog, metrics
from engine.telemetry.prometheus import api as promapi
from engine.telemetry.prometheus.places import Places, combined, host_of
from engine.telemetry.prometheus.poller import NO_WAY, SHIPPED, Poller
from engine.telemetry.prometheus.traffic import Traffic
from engine.telemetry.snapshot import GPU_FACTS, GPU_METRICS, NodeState, Snapshot
from engine.telemetry.source import SourceError
from engine.telemetry.store import Store
from tests.parts.prometheus import Exporter, PrometheusServer, Served, said
from tests.parts.sshd import free_port
from tests.parts.waiting import until

Exporters = Callable[[list[str]], Exporter]
Servers = Callable[..., PrometheusServer]


def inventory(folder: Path, url: str, nodes: str = "n01 n02", **more: Any) -> Cluster:
    """A cluster of 8-GPU nodes that Prometheus reads."""
    text = {
        "name": "test",
        "poll_interval_s": 0.2,
        "prometheus": {"url": url, "step_s": 1, **more},
        "nodes": [{"name": name, "type": "hgx-h100", "u": 1 + 8 * i} for i, name in enumerate(nodes.split())],
    }
    path = folder / "cluster.yaml"
    path.write_text(json.dumps(text))
    return catalog.cluster(str(path))


def store_of(cluster: Cluster) -> Store:
    return Store([(n.name, cluster.type_of(n).gpus) for n in cluster.nodes])


@asynccontextmanager
async def polled(cluster: Cluster) -> AsyncIterator[Callable[[], Snapshot]]:
    """The cluster's sources at work; what is yielded publishes."""
    store = store_of(cluster)
    tasks = [asyncio.create_task(source.run(store)) for source in sources(cluster).values()]
    try:
        yield lambda: store.publish(time.time())
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in ended)


def dcgm(node: str, gpus: int = 8, first_c: float = 40) -> list[str]:
    """What DCGM-exporter shows; labels differ between rows and the memory temperature stops early."""
    out = []
    for gpu in range(gpus):
        of = (
            f'gpu="{gpu}",UUID="GPU-{node}-{gpu}",pci_bus_id="00000000:{gpu}3:00.0",device="nvidia{gpu}",'
            f'modelName="NVIDIA H100 80GB HBM3",Hostname="{node}",DCGM_FI_DRIVER_VERSION="580.105.08"'
        )
        pod = ',container="main",namespace="train",pod="trainer-0"' if gpu == 0 else ""
        out += [
            f"DCGM_FI_DEV_GPU_TEMP{{{of}{pod}}} {first_c + gpu}",
            f"DCGM_FI_DEV_POWER_USAGE{{{of}{pod}}} {500 + gpu}.611000",
            f"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{of}}} 5000",
            f"DCGM_FI_DEV_FB_USED{{{of}}} 1000",
            f"DCGM_FI_DEV_FB_FREE{{{of}}} 80000",
        ]
        if gpu < 6:
            out.append(f"DCGM_FI_DEV_MEMORY_TEMP{{{of}}} {50 + gpu}")
    return out


def states(snapshot: Snapshot) -> list[NodeState]:
    return [node.state for node in snapshot.nodes]


LIVE = [NodeState.LIVE, NodeState.LIVE]


async def test_values_arrive_and_what_is_missing_is_unknown(
    exporters: Exporters, prometheus: Servers, tmp_path: Path
) -> None:
    one, other = exporters(dcgm("n01")), exporters(dcgm("n02.cluster.local", first_c=60))
    server = prometheus(one=one.port, other=other.port)
    server.until(lambda: len(server.query("DCGM_FI_DEV_GPU_TEMP")) == 16, "both are scraped")
    async with polled(inventory(tmp_path, server.url)) as publish:
        await until(lambda: states(publish()) == LIVE)
        shown = publish()
    table = shown.gpus
    assert table["temperature_c"].tolist() == [*range(40, 48), *range(60, 68)]
    assert table["power_w"][3] == pytest.approx(503.611)
    assert table["energy_j"][0] == pytest.approx(5.0)
    assert table["memory_total_mib"][0] == 81000
    assert table["memory_temperature_c"][:6].tolist() == [50, 51, 52, 53, 54, 55]
    assert np.isnan(table["memory_temperature_c"][6:8]).all()
    assert np.isnan(table["sm_clock_mhz"]).all()
    assert (table.uuid[9], table.bus_id[9], table.name[9]) == (
        "GPU-n02.cluster.local-1",
        "00000000:13:00.0",
        "NVIDIA H100 80GB HBM3",
    )
    node = shown.nodes[0]
    assert (node.reader, node.driver, node.hostname) == ("Prometheus", "580.105.08", "n01")
    assert node.last_sample is not None
    assert 0 <= shown.time - node.last_sample < 3


async def test_a_dead_exporter_is_stale_and_a_lost_gpu_is_told(
    exporters: Exporters, prometheus: Servers, tmp_path: Path
) -> None:
    one, other = exporters(dcgm("n01")), exporters(dcgm("n02"))
    server = prometheus(one=one.port, other=other.port)
    async with polled(inventory(tmp_path, server.url)) as publish:
        await until(lambda: states(publish()) == LIVE, 30)
        one.stop()
        other.lines = dcgm("n02", gpus=7)
        await until(lambda: publish().nodes[0].state is NodeState.STALE, 10)
        shown = publish()
        assert shown.nodes[0].reason.startswith("no sample for ")
        assert shown.gpus["temperature_c"][0] == 40
        await until(lambda: publish().nodes[1].troubles == ("GPU at 00000000:73:00.0 does not answer",), 10)
        shown = publish()
        assert math.isnan(shown.gpus["temperature_c"][15])
        assert shown.gpus["temperature_c"][14] == 46
        one.start()
        await until(lambda: states(publish()) == LIVE, 15)


async def test_samples_without_an_end_grow_old(exporters: Exporters, prometheus: Servers, tmp_path: Path) -> None:
    """Series with times of their own get no end marker: Prometheus shows them for five minutes, we do not."""
    exporter = exporters([])
    at = int((time.time() - 60) * 1000)
    exporter.lines = [f"{line} {at}" for line in dcgm("n01")]
    server = prometheus(one=exporter.port)
    server.until(lambda: len(server.query("DCGM_FI_DEV_GPU_TEMP")) == 8, "it is scraped")
    async with polled(inventory(tmp_path, server.url)) as publish:
        await until(lambda: publish().nodes[0].last_sample is not None)
        shown = publish()
    assert shown.nodes[0].state is NodeState.STALE
    assert shown.nodes[1].state is NodeState.DOWN
    assert "has no series of it; nodes are told by Hostname, hostname, node" in shown.nodes[1].reason
    assert shown.nodes[0].last_sample == pytest.approx(at / 1000, abs=1.0)


async def test_a_silent_prometheus_takes_the_nodes_with_it(
    exporters: Exporters, prometheus: Servers, tmp_path: Path
) -> None:
    server = prometheus(one=exporters([*dcgm("n01"), *dcgm("n02")]).port)
    async with polled(inventory(tmp_path, server.url)) as publish:
        await until(lambda: states(publish()) == LIVE, 30)
        server.stop()
        await until(lambda: states(publish()) == [NodeState.DOWN, NodeState.DOWN], 15)
        shown = publish()
        assert "nothing listens there (connection refused)" in shown.nodes[0].reason
        assert np.isnan(shown.gpus["temperature_c"]).all()
        server.start()
        await until(lambda: states(publish()) == LIVE, 45)


def amd_and_host(gpus: int = 8) -> list[str]:
    out = ["node_load1 12.5"]
    for gpu in range(gpus):
        of = f'gpu_id="{gpu}",card_model="MI300X",hostname="n01",serial_number="S{gpu}",gpu_partition_id="0"'
        out += [
            f"gpu_junction_temperature{{{of}}} {70 + gpu}",
            f"gpu_package_power{{{of}}} 700",
            f'gpu_clock{{{of},clock_type="GPU_CLOCK_TYPE_SYSTEM",clock_index="0"}} 1500',
            f'gpu_clock{{{of},clock_type="GPU_CLOCK_TYPE_SYSTEM",clock_index="1"}} 1533',
            f'gpu_clock{{{of},clock_type="GPU_CLOCK_TYPE_MEMORY",clock_index="8"}} 1292',
        ]
    for device, state in (("mlx5_0", 4), ("mlx5_1", 1)):
        of = f'device="{device}",port="1"'
        now = int(time.time() * 1000)
        out += [
            f"node_infiniband_port_data_received_bytes_total{{{of}}} {now * 1000}",
            f"node_infiniband_port_data_transmitted_bytes_total{{{of}}} 7",
            f"node_infiniband_rate_bytes_per_second{{{of}}} 50000000000",
            f"node_infiniband_state_id{{{of}}} {state}",
        ]
    return [*out, 'node_network_receive_bytes_total{device="lo"} 1']


class Counting(Exporter):
    """Its InfiniBand counters run at a megabyte a second."""

    def start(self) -> None:
        def answer(handler: http.server.BaseHTTPRequestHandler, _: bytes) -> None:
            said(handler, ("\n".join(amd_and_host()) + "\n").encode(), Content_Type="text/plain; version=0.0.4")

        self._served = Served(answer)
        self.port = self._served.port


async def test_amd_and_the_nodes_links(prometheus: Servers, tmp_path: Path) -> None:
    exporter = Counting()
    exporter.start()
    server = prometheus(one=exporter.port)
    server.until(lambda: server.query("rate(node_infiniband_port_data_received_bytes_total[60s]) > 0"), "a rate")
    # The node-exporter's only label is the address it was scraped at, so that one is the node's name here.
    try:
        async with polled(inventory(tmp_path, server.url, "127.0.0.1", node_label="instance")) as publish:
            await until(lambda: len(publish().links) == 2, 20)
            shown = publish()
    finally:
        exporter.stop()
    assert shown.gpus["temperature_c"].tolist() == [*range(70, 78)]
    assert shown.gpus["sm_clock_mhz"].tolist() == [1533] * 8
    assert shown.gpus["memory_clock_mhz"].tolist() == [1292] * 8
    assert shown.gpus.name[0] == "MI300X"
    assert shown.nodes[0].load == 12.5
    assert shown.links.name == ("mlx5_0:1", "mlx5_1:1")
    assert shown.links.state == ("active", "inactive")
    assert shown.links["peak_gb_s"].tolist() == [50, 50]
    assert shown.links["rx_gb_s"][0] == pytest.approx(0.001, rel=0.3)
    assert shown.links["tx_gb_s"][0] == 0


async def test_history_comes_from_before(exporters: Exporters, prometheus: Servers, tmp_path: Path) -> None:
    exporter = exporters(dcgm("n02"))
    server = prometheus(one=exporter.port)
    server.until(lambda: len(server.query("count_over_time(DCGM_FI_DEV_GPU_TEMP[60s]) > 3")) == 8, "some scrapes")
    cluster = inventory(tmp_path, server.url)
    store = store_of(cluster)
    assert cluster.prometheus is not None
    await Poller(cluster, cluster.prometheus, metrics.read(SHIPPED)).backfill(store, 30)
    times, celsius = store.history("temperature_c", 8)
    assert len(times) == 30
    assert times[-1] == pytest.approx(time.time(), abs=3)
    assert np.isnan(celsius[0])
    assert celsius[-1] == 40
    assert np.isnan(store.history("temperature_c", 0)[1]).all()
    assert np.isnan(store.history("sm_clock_mhz", 8)[1]).all()


async def test_there_is_no_way_to_act(tmp_path: Path) -> None:
    source = sources(inventory(tmp_path, "http://127.0.0.1:9"))["n01"]
    answer = await source.command({"id": "7", "command": "limit"}, 1.0)
    assert (answer.result, answer.state, answer.reason) == ("7", "failed", NO_WAY)
    with pytest.raises(SourceError, match="give it an ssh address"):
        await source.open_job_socket("/tmp/x")


def test_ssh_is_preferred(tmp_path: Path) -> None:
    cluster = inventory(tmp_path, "http://127.0.0.1:9")
    first = msgspec.structs.replace(cluster.nodes[0], ssh="u@n01")
    mixed = msgspec.structs.replace(cluster, nodes=(first, cluster.nodes[1]))
    assert [type(s).__name__ for s in sources(mixed).values()] == ["SshSource", "PrometheusSource"]


# What is not Prometheus.


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
