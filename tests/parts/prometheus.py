"""A real Prometheus on loopback, and an exporter of made-up GPUs that tests may change, kill and bring back."""

from __future__ import annotations

import http.server
import json
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from engine.profile import Cluster, catalog
from tests.parts.missing import program
from tests.parts.sshd import free_port

START_S = 30.0


class Quiet(http.server.ThreadingHTTPServer):
    """Clients that hang up are no news."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass


class Served:
    """An HTTP server on loopback that answers what `answer` makes of a request's path and form."""

    def __init__(self, answer: Callable[[http.server.BaseHTTPRequestHandler, bytes], None], port: int = 0) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer(self, self.rfile.read(int(self.headers.get("Content-Length") or 0)))

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        self._server = Quiet(("127.0.0.1", port), Handler)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def said(handler: http.server.BaseHTTPRequestHandler, body: bytes, status: int = 200, **headers: str) -> None:
    """Answer with a body."""
    handler.send_response(status)
    for name, value in {"Content_Length": str(len(body)), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(body)


@dataclass
class Exporter:
    """Serves `lines` in the text format; `scrapes` counts how often it was asked."""

    lines: list[str] = field(default_factory=list)
    scrapes: int = 0
    _served: Served | None = None
    port: int = 0

    def start(self) -> None:
        def answer(handler: http.server.BaseHTTPRequestHandler, _: bytes) -> None:
            said(handler, ("\n".join(self.lines) + "\n").encode(), Content_Type="text/plain; version=0.0.4")
            self.scrapes += 1

        self._served = Served(answer, self.port)
        self.port = self._served.port

    def stop(self) -> None:
        if self._served is not None:
            self._served.stop()
            self._served = None


@dataclass
class PrometheusServer:
    """A Prometheus that scrapes `targets` (job: port) each `interval_s`."""

    folder: Path
    targets: dict[str, int]
    interval_s: int = 1
    port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start and wait until it answers queries."""
        scrapes = [
            {"job_name": job, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
            for job, port in self.targets.items()
        ]
        config = {
            "global": {"scrape_interval": f"{self.interval_s}s", "scrape_timeout": f"{self.interval_s}s"},
            "scrape_configs": scrapes,
        }
        (self.folder / "prometheus.yml").write_text(json.dumps(config))
        log = (self.folder / "log").open("wb")
        self._process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={self.folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={self.folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        self.until(lambda: self.query("vector(1)"), "Prometheus does not answer")

    def until(self, happened: Callable[[], object], what: str) -> None:
        """Wait until it is so."""
        ends = time.monotonic() + START_S
        while True:
            try:
                if happened():
                    return
            except OSError:
                pass
            if time.monotonic() > ends or (self._process and self._process.poll() is not None):
                raise RuntimeError(f"{what}: {(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def query(self, text: str) -> list[dict[str, object]]:
        """The result of an instant query."""
        url = f"{self.url}/api/v1/query?{urlencode({'query': text})}"
        with urllib.request.urlopen(url, timeout=5) as reply:
            found: list[dict[str, object]] = json.loads(reply.read())["data"]["result"]
        return found

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None


@pytest.fixture
def exporters() -> Iterator[Callable[[list[str]], Exporter]]:
    """Make exporters; all are stopped at the end."""
    made: list[Exporter] = []

    def make(lines: list[str]) -> Exporter:
        found = Exporter(lines)
        found.start()
        made.append(found)
        return found

    yield make
    for one in made:
        one.stop()


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Callable[..., PrometheusServer]]:
    """Make servers; all are stopped at the end."""
    program("prometheus")
    made: list[PrometheusServer] = []

    def make(interval_s: int = 1, **targets: int) -> PrometheusServer:
        folder = tmp_path / f"prometheus{len(made)}"
        folder.mkdir()
        found = PrometheusServer(folder, targets, interval_s)
        made.append(found)
        found.start()
        return found

    yield make
    for one in made:
        one.stop()


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
