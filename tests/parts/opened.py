"""The console's app under a Pilot, on a real inventory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from textual.pilot import Pilot

from engine.act.action import Stage
from engine.act.audit import Audit
from engine.control.connect import sources
from engine.control.control import Control
from engine.profile import catalog
from tests.parts.screen import text_of
from tests.parts.waiting import until
from tui.app import RacksideApp


@dataclass
class Opened:
    """The app under a Pilot."""

    app: RacksideApp
    pilot: Pilot[None]

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def live(self) -> None:
        await until(lambda: "1/1" in text_of(self.app, "#site"), 30)

    async def job(self) -> None:
        def there() -> bool:
            job = self.app.control.jobs.current
            return job is not None and job.attached and bool(job.step_s) and len(job.ranks) == job.world_size

        await self.live()
        await until(there, 60)

    async def shows(self, text: str, selector: str) -> None:
        await until(lambda: text in text_of(self.app, selector), 20, f"{text!r} in {selector}")

    async def acts(self, key: str, title: str) -> None:
        """Arm, open the key's panel, see its title, confirm, wait for it to be done."""
        await self.press("a", key)
        await self.shows(title, "#panel-body")
        await self.press("enter")
        await self.ended(Stage.DONE)

    def said(self) -> str:
        return " | ".join(n.message for n in self.app._notifications)

    async def ended(self, stage: Stage) -> None:
        tickets = lambda: self.app.control.tickets  # noqa: E731
        await until(lambda: tickets() and all(t.stage.ended for t in tickets()), 60)
        assert tickets()[-1].stage is stage, tickets()[-1].line


@asynccontextmanager
async def opened(
    inventory: Path, size: tuple[int, int] = (100, 30), read_only: bool = False, **more: object
) -> AsyncIterator[Opened]:
    cluster = catalog.cluster(str(inventory))
    control = Control(
        cluster,
        sources(cluster),
        catalog.thermal_policy("margin"),
        Audit(inventory.with_name("audit.jsonl")),
        "ops@test",
        read_only,
    )
    app = RacksideApp(control, **more)  # type: ignore[arg-type]
    async with app.run_test(size=size, notifications=True) as pilot:
        yield Opened(app, pilot)
