"""This very machine: the same probe, as a process of its own, so that a driver that hangs freezes no screen."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

from engine.telemetry.loader import BOOTSTRAP, probe_payload
from engine.telemetry.reading import Result
from engine.telemetry.session import Session
from engine.telemetry.snapshot import NodeState
from engine.telemetry.source import Backoff, SourceError
from engine.telemetry.store import Store
from engine.telemetry.streams import Reader, Writer
from engine.telemetry.text import clean


class LocalSource:
    """Runs the probe with this interpreter."""

    def __init__(self, name: str, interval_s: float) -> None:
        self.name = name
        self._interval_s = interval_s
        self._session: Session | None = None

    async def run(self, store: Store) -> None:
        """Restart the probe whenever it ends."""
        backoff = Backoff()
        while True:
            store.set_state(self.name, NodeState.CONNECTING, "starting the probe", time.time())
            try:
                await self._once(store)
                backoff.reset()
                reason = "the probe ended"
            except (SourceError, OSError) as error:
                reason = clean(str(error), 300)
            store.set_state(self.name, NodeState.DOWN, reason, time.time())
            await asyncio.sleep(backoff.next_s(slow=False))

    async def _once(self, store: Store) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-u",
            "-c",
            BOOTSTRAP,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,  # Ctrl+C belongs to the screen; the probe ends at the end of its input
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(probe_payload(self._interval_s, self.name))
            self._session = Session(self.name, process.stdout, process.stdin, store)
            await self._session.run()
        finally:
            self._session = None
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), 3)
            except TimeoutError:
                pass  # stuck in the driver: never killed, it ends by itself when the driver lets go

    async def command(self, command: dict[str, Any], timeout_s: float) -> Result:
        """Send a command to the probe."""
        if self._session is None:
            return Result(str(command["id"]), "failed", "the probe is not running on this machine")
        return await self._session.command(command, timeout_s)

    async def open_job_socket(self, path: str) -> tuple[Reader, Writer]:
        """Connect to a hook's socket."""
        try:
            return await asyncio.open_unix_connection(path)
        except OSError as error:
            raise SourceError(f"the job's socket {clean(path)} does not open: {error.strerror}") from None
