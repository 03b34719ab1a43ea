"""How fast a Prometheus of this machine is read: `rackside bench prometheus`, with an exporter of made-up GPUs."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.profile import Cluster, ProfileError, Prometheus, catalog
from engine.profile.metrics import read
from engine.telemetry.prometheus.api import Api
from engine.telemetry.prometheus.poller import SHIPPED, Poller
from engine.telemetry.source import SourceError
from engine.telemetry.store import Store

GPUS_A_NODE = 8
STEP_S = 5.0
ROUNDS = 5
SPAN_S = 900.0
PAST_STEP_S = 15.0
READY_S = 120.0
PAGES = 4
SERIES = (
    "DCGM_FI_DEV_SM_CLOCK",
    "DCGM_FI_DEV_MEM_CLOCK",
    "DCGM_FI_DEV_MEMORY_TEMP",
    "DCGM_FI_DEV_GPU_TEMP",
    "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
    "DCGM_FI_DEV_GPU_UTIL",
    "DCGM_FI_DEV_XID_ERRORS",
    "DCGM_FI_DEV_FB_FREE",
    "DCGM_FI_DEV_FB_USED",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE",
)
"""What of DCGM-exporter's default list the metric map reads."""
HISTORY = (
    "DCGM_FI_DEV_GPU_TEMP",
    "DCGM_FI_DEV_POWER_USAGE",
    "DCGM_FI_DEV_SM_CLOCK",
    "DCGM_FI_DEV_GPU_UTIL",
)
"""What of it the store keeps a history of."""


def page(nodes: int, salt: int) -> bytes:
    """The exporter's page; every temperature is 30 to 79 C."""
    lines = [
        f"{series}{{{labels_of(node, gpu)}}} {30 + (salt + node + 7 * gpu) % 50}\n"
        for series in SERIES
        for node in range(nodes)
        for gpu in range(GPUS_A_NODE)
    ]
    return "".join(lines).encode()


def labels_of(node: int, gpu: int) -> str:
    """A GPU's labels as DCGM-exporter writes them."""
    return (
        f'gpu="{gpu}",UUID="GPU-{node:08d}-{gpu:04d}-0000-0000-000000000000",pci_bus_id="00000000:{gpu}3:00.0",'
        f'device="nvidia{gpu}",modelName="NVIDIA H100 80GB HBM3",Hostname="{name_of(node)}",'
        f'DCGM_FI_DRIVER_VERSION="580.105.08"'
    )


def remembered(path: Path, nodes: int, target: str, ends: float) -> None:
    """What the last 15 minutes' scrapes would have left, as OpenMetrics."""
    with path.open("w", encoding="ascii") as file:
        for series in HISTORY:
            for node in range(nodes):
                for gpu in range(GPUS_A_NODE):
                    head = f'{series}{{instance="{target}",job="dcgm",{labels_of(node, gpu)}}}'
                    for back in range(int(SPAN_S / PAST_STEP_S), 0, -1):
                        file.write(f"{head} {30 + (back + node) % 50} {ends - PAST_STEP_S * back:.0f}\n")
        file.write("# EOF\n")


def name_of(node: int) -> str:
    return f"n{node + 1:04d}"


def serve(nodes: int) -> None:
    """The exporter, in a process of its own: its port on standard output, then pages until standard input ends."""
    import threading

    pages = [page(nodes, salt) for salt in range(PAGES)]  # made before: a thousand exporters would not share a core

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = pages[int(time.time()) % PAGES]
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.buffer.read()


def reading(gpus: int) -> dict[str, Any]:
    """Seconds of a refresh of the whole store, and of filling 15 minutes of history. ProfileError without the parts."""
    program, tool = shutil.which("prometheus"), shutil.which("promtool")
    if program is None or tool is None:
        raise ProfileError("This bench needs the programs prometheus and promtool, which are not installed.")
    nodes = max(1, -(-gpus // GPUS_A_NODE))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rackside-bench-")))
        exporter = subprocess.Popen(
            [sys.executable, "-m", "engine.control.bench_prometheus", str(nodes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).resolve().parents[2],
        )
        stack.callback(_end, exporter)
        assert exporter.stdout is not None
        target = int(exporter.stdout.readline())
        remembered(folder / "past", nodes, f"127.0.0.1:{target}", time.time())
        blocks = [tool, "tsdb", "create-blocks-from", "openmetrics", "-q", str(folder / "past"), str(folder / "data")]
        subprocess.run(blocks, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        (folder / "past").unlink()
        port = _free_port()
        stack.callback(_end, _started(program, folder, port, target))
        return asyncio.run(_measured(cluster_of(nodes, f"http://127.0.0.1:{port}")))


def cluster_of(nodes: int, url: str) -> Cluster:
    """As many nodes of eight H100, read from there."""
    small = catalog.cluster("h100x64-400g")
    like = small.nodes[0]
    many = tuple(
        msgspec.structs.replace(like, name=name_of(i), rack=f"r{i // 4 + 1}", u=1 + 8 * (i % 4)) for i in range(nodes)
    )
    told = Prometheus(url=url, step_s=STEP_S)
    return msgspec.structs.replace(small, name=f"h100x{8 * nodes}", nodes=many, prometheus=told)


def _started(program: str, folder: Path, port: int, target: int) -> subprocess.Popen[bytes]:
    config = {
        "global": {"scrape_interval": f"{STEP_S:.0f}s", "scrape_timeout": f"{STEP_S:.0f}s"},
        "scrape_configs": [{"job_name": "dcgm", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")
    return subprocess.Popen(
        [
            program,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "LC_ALL": "C"},
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


async def _measured(cluster: Cluster) -> dict[str, Any]:
    assert cluster.prometheus is not None
    told, found = cluster.prometheus, read(SHIPPED)
    await _scraped(Api(told), cluster.gpus)
    nodes = [(n.name, cluster.type_of(n).gpus) for n in cluster.nodes]
    store, poller = Store(nodes, STEP_S), Poller(cluster, told, found)
    began = time.perf_counter()
    await Poller(cluster, msgspec.structs.replace(told, step_s=PAST_STEP_S), found).backfill(store, SPAN_S)
    backfill_s = time.perf_counter() - began
    points = int(np.isfinite(store.history("temperature_c", 0)[1]).sum())
    began = time.perf_counter()
    await poller.refresh(store)
    first_s = time.perf_counter() - began
    seconds: list[float] = []
    own: list[float] = []
    while len(seconds) < ROUNDS:
        began, used = time.perf_counter(), time.process_time()
        refreshed = await poller.refresh(store)
        took, used = time.perf_counter() - began, time.process_time() - used
        if refreshed == len(nodes):
            seconds.append(took)
            own.append(used)
        elif not refreshed:
            await asyncio.sleep(0.2)  # the next scrape is not there yet
    known = int(np.isfinite(store.publish(time.time()).gpus["temperature_c"]).sum())
    return {
        "gpus": cluster.gpus,
        "known": known,
        "series": len(SERIES) * cluster.gpus,
        "refresh_s": {"median": float(np.median(seconds)), "max": max(seconds), "first": first_s},
        "own_cpu_s": float(np.median(own)),
        "backfill_s": backfill_s,
        "backfill_points": points,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


async def _scraped(api: Api, gpus: int) -> None:
    """Until every GPU was scraped twice."""
    ends = time.monotonic() + READY_S
    while time.monotonic() < ends:
        try:
            counts = await api.instant(f"count(count_over_time({SERIES[-1]}[5m]) > 1)", list)
            if counts and float(counts[0].value[1]) >= gpus:
                return
        except SourceError:
            pass  # it is still starting
        await asyncio.sleep(0.5)
    raise ProfileError(f"The Prometheus of this bench had not scraped {gpus} GPUs within {READY_S:.0f} s.")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def text(told: dict[str, Any]) -> str:
    """What was measured, to read."""
    of = told["refresh_s"]
    return (
        f"{told['gpus']:,} GPUs, {told['series']:,} series\n"
        f"refresh      {of['median']:.2f} s median, {of['max']:.2f} s at most, {of['first']:.2f} s the first time; "
        f"of it {told['own_cpu_s']:.2f} s of CPU here\n"
        f"backfill     {told['backfill_s']:.2f} s for 15 minutes, {told['backfill_points']} points a GPU and metric\n"
        f"peak memory  {told['rss_mb']:.0f} MB"
    )


if __name__ == "__main__":
    serve(int(sys.argv[1]))
