"""The console without a terminal, and pictures of it: `rackside screenshot`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from textual.pilot import Pilot
from textual.worker import WorkerCancelled

from engine.control.control import Control
from engine.profile import ProfileError, catalog
from engine.telemetry.snapshot import NodeState
from tui import plan_keys
from tui.app import PANES, RacksideApp
from tui.output import write
from tui.start import control_of

SEARCH = "search"
SCREENS = ("racks", *PANES, SEARCH)
"""`racks` is the console as it opens, SEARCH all plans for its job; the others are its panes."""
SAMPLES = 3
"""Links have a rate, and plots a line, from the second reading on."""
LOOK_S = 0.05


def screenshot(given: Any) -> int:
    """Write the picture; nodes that do not answer in time are drawn as what they are, and named."""
    if given.screen not in SCREENS:
        raise ProfileError(f"There is no screen '{given.screen}'; there are {', '.join(SCREENS)}.")
    control = control_of(catalog.cluster(given.cluster), "margin", read_only=True)

    async def run() -> tuple[str, list[str]]:
        async with headless(control, given.size, given.ascii) as (app, pilot):
            missing = await settled(app, pilot, given.wait)
            return await picture(app, pilot, given.screen), missing

    svg, missing = asyncio.run(run())
    write({Path(given.output).expanduser(): svg})
    if missing:
        print(f"rackside: not live after {given.wait} s: {', '.join(missing)}", file=sys.stderr)
    return 0


@asynccontextmanager
async def headless(
    control: Control, size: tuple[int, int], plain: bool = False
) -> AsyncIterator[tuple[RacksideApp, Pilot[None]]]:
    """The console at work on `control`, on a screen of `size` that nobody sees."""
    app = RacksideApp(control, plain=plain)
    async with app.run_test(size=size) as pilot:
        yield app, pilot


async def settled(app: RacksideApp, pilot: Pilot[None], longest_s: float) -> list[str]:
    """Wait until every node has been read a few times; the names of those that have not."""
    end = time.monotonic() + longest_s

    def missing() -> list[str]:
        seen = {n.name for n in app.control.snapshot.nodes if n.state is NodeState.LIVE and n.samples >= SAMPLES}
        return [n.name for n in app.control.cluster.nodes if n.name not in seen]

    while (names := missing()) and time.monotonic() < end:
        await pilot.pause(LOOK_S)
    return names


async def picture(app: RacksideApp, pilot: Pilot[None], screen: str) -> str:
    """The console as SVG with one of SCREENS shown; ProfileError where there is nothing to search for."""
    if screen == SEARCH:
        if refused := plan_keys.search(app):
            raise ProfileError(refused)
        await pilot.pause()
    else:
        await app.run_action(f"pane_{PANES[0] if screen == 'racks' else screen}")
    for worker in [w for w in app.workers if w.name in ("plans", "search")]:
        with suppress(WorkerCancelled):  # a newer one has taken its place
            await worker.wait()
    await pilot.pause()
    return app.export_screenshot(title="rackside")
