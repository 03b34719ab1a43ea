"""Limits on a node that is read through its vendor's tool: a program beside the reader holds them, from the first
command on, as long as the connection lives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from engine.telemetry.loader import probe_payload
from engine.telemetry.reading import Result
from engine.telemetry.session import Session
from engine.telemetry.source import SourceError
from engine.telemetry.store import Store
from engine.telemetry.streams import Reader, Writer

Begin = Callable[[], Awaitable[tuple[Reader, Writer, Callable[[], None]]]]
"""Starts Python on the node: its output, its input, and what ends it."""


class Keeper:
    """One node's; `begin` is called at the first command, and again when the program has ended."""

    def __init__(self, node: str, begin: Begin) -> None:
        self._node, self._begin = node, begin
        self._session: Session | None = None
        self._running: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def command(self, command: dict[str, Any], boards: Mapping[int, str], timeout_s: float) -> Result:
        """Send a command; `boards` are the PCI addresses of the GPUs by the indexes that the console uses."""
        try:
            async with self._starting:
                session = self._session or await self._start()
            told = {str(index): bus for index, bus in boards.items()}
            return await session.command({**command, "boards": told}, timeout_s)
        except (SourceError, OSError) as error:
            return Result(str(command["id"]), "failed", f"no program there holds limits: {error}")

    async def _start(self) -> Session:
        reader, writer, end = await self._begin()
        writer.write(probe_payload(1.0, self._node, keeper=True))
        session = self._session = Session(self._node, reader, writer, Store([]))
        self._running = asyncio.create_task(self._run(session, end), name=f"keeper {self._node}")
        return session

    async def _run(self, session: Session, end: Callable[[], None]) -> None:
        try:
            await session.run()
        except (SourceError, OSError):
            pass  # the command that waits is told so
        finally:
            self._session = None
            end()

    async def close(self) -> None:
        """End it: what it holds is given back by the node."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
