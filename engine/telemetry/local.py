"""This very machine: the same readers, as processes of their own, so that a driver that hangs freezes no screen."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

from engine.telemetry.child import Child
from engine.telemetry.keeper import Keeper
from engine.telemetry.loader import BOOTSTRAP, probe_payload
from engine.telemetry.reading import Result
from engine.telemetry.session import Session
from engine.telemetry.shell.loader import AMD_TOOLS, TOOLS, Overheard, shell_payload
from engine.telemetry.shell.reader import ShellSession
from engine.telemetry.snapshot import NodeState
from engine.telemetry.source import Backoff, SourceError
from engine.telemetry.store import Store
from engine.telemetry.streams import Reader, Writer
from engine.telemetry.text import clean

PROBE = (sys.executable, "-u", "-c", BOOTSTRAP)
PATIENCE_S = 3.0


class LocalSource:
    """Runs the probe with this interpreter, or the shell reader where only AMD's tools are."""

    def __init__(self, name: str, interval_s: float) -> None:
        self.name = name
        self._interval_s = interval_s
        self._session: Session | ShellSession | None = None

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
        """The probe; where NVML is not there, the tools that are."""
        child = await _started(*PROBE)
        heard = Overheard(child.output, self._others)
        await self._follow(child, Session(self.name, heard, child.input, store), probe_payload(*self._named))
        if heard.instead:
            skip = "" if heard.instead.startswith("the module") else TOOLS[0]
            child = await _started("sh", "-s")
            keeper = Keeper(self.name, self._python)
            session = ShellSession(self.name, child.output, store, self._interval_s, heard.instead, keeper)
            await self._follow(child, session, shell_payload(*self._named, skip))
            if session.state.refusal:
                raise SourceError(session.state.refusal, slow=True)

    async def _python(self) -> tuple[Reader, Writer, Callable[[], None]]:
        """This interpreter, that waits for a program."""
        child = await _started(*PROBE)
        return child.output, child.input, child.input.close

    @property
    def _named(self) -> tuple[float, str]:
        return self._interval_s, self.name

    async def _others(self, trouble: str) -> bool:
        names = TOOLS if trouble.startswith("the module") else AMD_TOOLS
        return any(shutil.which(name, path=_path()) for name in names)

    async def _follow(self, child: Child, session: Session | ShellSession, payload: bytes) -> None:
        """Feed the store until the reader's output ends."""
        try:
            child.input.write(payload)
            self._session = session
            await session.run()
        finally:
            self._session = None
            await child.end(PATIENCE_S)

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


async def _started(*command: str) -> Child:
    return await Child.start(*command, environment={**os.environ, "LC_ALL": "C", "PATH": _path()})


def _path() -> str:
    """Where tools are looked for: a service's PATH is often bare."""
    return f"{os.environ.get('PATH', '')}:/usr/bin:/usr/local/bin:/bin:/usr/sbin:/opt/rocm/bin"
