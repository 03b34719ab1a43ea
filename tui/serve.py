"""`rackside serve`: a console that can only look, in a browser."""

from __future__ import annotations

import ipaddress
import shlex
import sys
from typing import Any

from engine.control import scrape
from engine.control.connect import sources
from engine.profile import ProfileError, catalog

DEFAULT = "127.0.0.1:8000"


def serve(given: Any) -> int:
    """Serve until ctrl-c. ProfileError with a sentence for what is wrong, before anything listens."""
    host, port = scrape.address(given.listen or DEFAULT)
    cluster = catalog.cluster(given.cluster)
    sources(cluster)
    try:
        from tui.web import Consoles
    except ImportError as error:
        raise ProfileError(
            f"A console in a browser needs textual-serve ({error}): pip install 'rackside[serve]'."
        ) from None
    server = Consoles(command(given), host, port, f"rackside: {cluster.name}", said(host, port))
    try:
        server.serve()
    except OSError as error:
        raise ProfileError(f"{host}:{port} cannot be listened on: {error.strerror or error}.") from None
    return 0


def command(given: Any) -> str:
    """What each visitor gets: a console that can never be armed."""
    words = [sys.executable, "-m", "tui.cli", "console", "--cluster", given.cluster, "--read-only"]
    return shlex.join([*words, *(["--ascii"] if given.ascii else [])])


def said(host: str, port: int) -> str:
    """Where it is, and who can see it."""
    shown = f"[{host}]" if ":" in host else host
    loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    who = "everybody on this machine" if loopback else "everybody who reaches this address"
    return f"rackside: http://{shown}:{port}, read-only; there is no login: {who} can look. ctrl-c ends"
