"""Take the README's pictures again from the running demo: python -m tests.pictures.take"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

from engine.control.planning import Question
from engine.control.spaces import FRONT, TOP, asked
from engine.profile import catalog
from engine.sim.cluster import simulated
from tests.parts.waiting import until
from tui.options import DEMO_CLUSTER, DEMO_MODEL, DEMO_PLAN
from tui.plans_app import PlansApp
from tui.screenshot import headless
from tui.start import control_of

FOLDER = Path(__file__).parent
HOT_C = 84.0


async def take() -> None:
    """Let the rack heat up until the clogged heatsink shows, then look and open the panels."""
    names = (catalog.cluster(DEMO_CLUSTER), catalog.model(DEMO_MODEL), catalog.plan(DEMO_PLAN))
    async with (
        simulated(*names) as cluster,
        headless(control_of(cluster, "margin", read_only=False), (110, 32)) as (app, pilot),
    ):
        await until(lambda: (app.control.snapshot.gpus["temperature_c"] > HOT_C).any(), 300, "the rack is hot")
        for name, keys in (("console", "x"), ("links", "2"), ("plans", "3"), ("rebalance", "1r")):
            await pilot.press(*keys)
            await pilot.pause(1.2)
            app.save_screenshot(f"{name}.svg", str(FOLDER))


async def take_planning() -> None:
    """The planner's own screen, which needs no rack: two plans of the front pinned."""
    question = Question("llama3-70b", ("h100x64-400g",), pareto=FRONT, top=TOP)
    app = PlansApp(asked(question))
    async with app.run_test(size=(160, 44)) as pilot:
        await until(lambda: app.plans.board.rows, 60, "plans are found")
        await pilot.press("space", "j", "j", "space")
        await pilot.pause(1.2)
        app.save_screenshot("planning.svg", str(FOLDER))


if __name__ == "__main__":
    os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp()
    asyncio.run(take())
    asyncio.run(take_planning())
