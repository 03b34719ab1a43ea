"""The only async glue to the engine: runs the control and turns its events into messages."""

from __future__ import annotations

from textual.app import App

from engine.control.control import Control
from engine.control.events import JobChanged, Published
from tui.messages import JobArrived, SnapshotArrived, TicketArrived


async def carry(control: Control, app: App[None]) -> None:
    """Run the control for as long as the app lives."""
    async with control.running():
        async for event in control.events():
            if isinstance(event, Published):
                app.post_message(SnapshotArrived(event.snapshot))
            elif isinstance(event, JobChanged):
                app.post_message(JobArrived(event.job))
            else:
                app.post_message(TicketArrived(event.ticket))
