"""This very machine: the same readers, as processes of their own, so that a driver that hangs freezes no screen."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

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
        process = await self._start(sys.executable, "-u", "-c", BOOTSTRAP)
        heard = Overheard(_output(process), self._others)
        await self._follow(process, Session(self.name, heard, _input(process), store), probe_payload(*self._named))
        if heard.instead:
            skip = "" if heard.instead.startswith("the module") else TOOLS[0]
            process = await self._start("sh", "-s")
            keeper = Keeper(self.name, self._python)
            session = ShellSession(self.name, _output(process), store, self._interval_s, heard.instead, keeper)
            await self._follow(process, session, shell_payload(*self._named, skip))
            if session.state.refusal:
                raise SourceError(session.state.refusal, slow=True)

    async def _python(self) -> tuple[Reader, Writer, Callable[[], None]]:
        """This interpreter, that waits for a program."""
        process = await self._start(sys.executable, "-u", "-c", BOOTSTRAP)
        return _output(process), _input(process), _input(process).close

    @property
    def _named(self) -> tuple[float, str]:
        return self._interval_s, self.name

    async def _others(self, trouble: str) -> bool:
        names = TOOLS if trouble.startswith("the module") else AMD_TOOLS
        return any(shutil.which(name, path=_path()) for name in names)

    async def _start(self, *command: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C", "PATH": _path()},
            start_new_session=True,  # Ctrl+C belongs to the screen; a reader ends at the end of its input
        )

    async def _follow(
        self, process: asyncio.subprocess.Process, session: Session | ShellSession, payload: bytes
    ) -> None:
        """Feed the store until the reader's output ends."""
        try:
            _input(process).write(payload)
            self._session = session
            await session.run()
        finally:
            self._session = None
            _input(process).close()
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


def _output(process: asyncio.subprocess.Process) -> asyncio.StreamReader:
    assert process.stdout is not None
    return process.stdout


def _input(process: asyncio.subprocess.Process) -> asyncio.StreamWriter:
    assert process.stdin is not None
    return process.stdin


def _path() -> str:
    """Where tools are looked for: a service's PATH is often bare."""
    return f"{os.environ.get('PATH', '')}:/usr/bin:/usr/local/bin:/bin:/usr/sbin:/opt/rocm/bin"
