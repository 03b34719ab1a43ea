"""Telemetry through a real Prometheus."""

from __future__ import annotations

import asyncio
import http.server
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine.control.connect import sources
from engine.profile import Cluster, metrics
from engine.telemetry.prometheus.poller import NO_WAY, SHIPPED, Poller
from engine.telemetry.snapshot import NodeState, Snapshot
from engine.telemetry.source import SourceError
from engine.telemetry.store import Store
from tests.parts.prometheus import Exporter, PrometheusServer, Served, inventory, said
from tests.parts.waiting import until

Exporters = Callable[[list[str]], Exporter]
Servers = Callable[..., PrometheusServer]


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
