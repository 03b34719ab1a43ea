"""A reader as a process of this machine. It is told to end by the end of its input, and never killed."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress


class Child:
    """`output` is read, `input` written; what it says on stderr is dropped. It may be stuck in a driver for longer than
    anybody waits, and ends by itself when the driver lets go; asyncio's own subprocess raises when it outlives its
    loop."""

    def __init__(self, command: tuple[str, ...], environment: Mapping[str, str]) -> None:
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=nothing,
            env=environment,
            start_new_session=True,  # ctrl+c belongs to the screen
        )
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        threading.Thread(target=self._reap, name=f"reap {command[0]}", daemon=True).start()

    @classmethod
    async def start(cls, *command: str, environment: Mapping[str, str]) -> Child:
        """OSError when it does not start."""
        child = cls(command, environment)
        await child._connect()
        return child

    async def _connect(self) -> None:
        loop, process = self._loop, self._process
        assert process.stdin is not None
        assert process.stdout is not None
        self.output = asyncio.StreamReader(loop=loop)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(self.output, loop=loop), process.stdout)
        transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        self.input = transport

    def _reap(self) -> None:
        self._process.wait()
        with suppress(RuntimeError):  # nobody waits any more
            self._loop.call_soon_threadsafe(self._ended.set)

    async def end(self, patience_s: float) -> None:
        """Close its input, and wait until it has ended, but no longer than that."""
        self.input.close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), patience_s)
