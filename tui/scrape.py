"""`rackside export --prometheus`: the console's engine without a screen, as a scrape target."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from engine.control import scrape
from engine.profile import ProfileError, catalog
from tui.start import control_of


def export(given: Any) -> int:
    """Serve until ctrl-c."""
    if given.cluster is None:
        raise ProfileError("Which cluster to read is missing: --cluster C.")
    host, port = scrape.address(given.listen or scrape.DEFAULT)
    control = control_of(catalog.cluster(given.cluster), "margin", read_only=True)

    async def run() -> None:
        async with control.running(), scrape.serving(control, host, port) as taken:
            shown = f"[{host}]" if ":" in host else host
            print(f"rackside: serving http://{shown}:{taken}/metrics, ctrl-c ends", file=sys.stderr, flush=True)
            async for _ in control.events():
                pass

    asyncio.run(run())
    return 0
