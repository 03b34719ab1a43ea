"""A web server whose every visitor gets a console process of their own. Needs textual-serve: the extra `serve`."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from textual_serve.server import Server

MOST_VISITORS = 8
"""Each has a connection to every node: what comes beyond is turned away."""
POLICY = "default-src 'self' 'unsafe-inline' data:; connect-src 'self' ws: wss:; frame-ancestors 'none'"
"""The page asks nobody else for anything, fonts included, and stands in nobody's frame."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Consoles(Server):
    """Serves `command`, a console, to browsers. There is no login: a page of another site is kept from reading it."""

    def __init__(self, command: str, host: str, port: int, title: str, said: str) -> None:
        super().__init__(command, host, port, title)
        self._said = said
        self._visitors: set[asyncio.Task[Any]] = set()

    def initialize_logging(self) -> None:
        logging.basicConfig(level=logging.WARNING, format="rackside: %(message)s", stream=sys.stderr)

    async def _make_app(self) -> web.Application:
        app = await super()._make_app()
        app.middlewares.append(_own_pages_only)
        return app

    async def on_startup(self, app: web.Application) -> None:
        print(self._said, file=sys.stderr, flush=True)

    async def on_shutdown(self, app: web.Application) -> None:
        """Browsers that are still open hold up nobody: their consoles end now."""
        for task in self._visitors:
            task.cancel()

    async def handle_index(self, request: web.Request) -> Any:
        """The page leads back to the name under which it was asked for."""
        self.public_url = f"{request.scheme}://{request.host}"
        return await super().handle_index(request)

    async def handle_websocket(self, request: web.Request) -> Any:
        if len(self._visitors) >= MOST_VISITORS:
            raise web.HTTPServiceUnavailable(text=f"{MOST_VISITORS} consoles are open; close one.\n")
        task = asyncio.current_task()
        assert task is not None
        self._visitors.add(task)
        try:
            return await super().handle_websocket(request)
        finally:
            self._visitors.discard(task)


@web.middleware
async def _own_pages_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A site can lead its name to this address, or open a socket to it from its own page: both are refused."""
    if not _is_ours(urlsplit(f"//{request.host}").hostname):
        raise web.HTTPForbidden(text="Ask for this console by the address of its machine.\n")
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc != request.host:
        raise web.HTTPForbidden(text="This console is not for the pages of other sites.\n")
    response = await handler(request)
    if not response.prepared:
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
    return response


def _is_ours(name: str | None) -> bool:
    """An address, or this machine's name: nothing that somebody else's name server could have told."""
    if name in ("localhost", socket.gethostname().lower(), socket.getfqdn().lower()):
        return True
    try:
        ipaddress.ip_address(name or "")
    except ValueError:
        return False
    return True
