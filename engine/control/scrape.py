"""A scrape target: GET /metrics over HTTP, on loopback unless another address is named."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engine.control.control import Control
from engine.control.exposition import CONTENT_TYPE, exposition
from engine.profile import ProfileError

DEFAULT = "127.0.0.1:9464"
REQUEST_S = 5.0
MOST_CLIENTS = 16
"""A few Prometheus servers and a person; what comes beyond is turned away."""


def address(text: str) -> tuple[str, int]:
    """host:port, IPv6 in brackets; a port alone is on loopback. ProfileError with a sentence."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdigit() or not 0 <= int(port) < 65536:
        raise ProfileError(f"'{text}' is no address to listen on; write 127.0.0.1:9464.")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if host != "localhost":
            raise ProfileError(f"'{host}' is no address of this machine; write its IP address.") from None
    return host, int(port)


def page(control: Control) -> str:
    """What the control knows now."""
    watched = control.watch.watched_s > 0
    return exposition(
        control.cluster,
        control.snapshot,
        control.alarms,
        list(control.jobs.statuses.values()),
        control.watch.forecast() if watched else None,
    )


@asynccontextmanager
async def serving(control: Control, host: str, port: int) -> AsyncIterator[int]:
    """Answer scrapes for as long as the block runs; the port that was taken."""
    clients = 0

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal clients
        clients += 1
        try:
            async with asyncio.timeout(REQUEST_S):
                line, _, _ = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
                writer.write(answer(control, line) if clients <= MOST_CLIENTS else _reply(503, "busy\n"))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # whoever hangs up or sends no HTTP has no need of an answer
        finally:
            clients -= 1
            writer.close()

    try:
        server = await asyncio.start_server(client, host, port, limit=1 << 14, family=socket.AF_UNSPEC)
    except OSError as error:
        why = error.strerror or "it cannot be listened on"
        raise ProfileError(f"{host}:{port}: {why.split(': ')[-1]}; choose another with --listen.") from None
    async with server:
        yield int(server.sockets[0].getsockname()[1])


def answer(control: Control, line: bytes) -> bytes:
    """The reply to a request, by its first line."""
    words = line.split()
    if len(words) != 3 or words[0] not in (b"GET", b"HEAD"):
        return _reply(405, "only GET is answered\n")
    path = words[1].partition(b"?")[0]
    if path == b"/metrics":
        found = _reply(200, page(control), CONTENT_TYPE)
    elif path == b"/":
        found = _reply(200, "rackside: the metrics are at /metrics\n")
    else:
        found = _reply(404, "the metrics are at /metrics\n")
    return found if words[0] == b"GET" else found.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


def _reply(status: int, text: str, kind: str = "text/plain; charset=utf-8") -> bytes:
    names = {200: "OK", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
    body = text.encode("utf-8", "replace")
    head = f"HTTP/1.1 {status} {names[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + body
