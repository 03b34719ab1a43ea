"""A TCP proxy on loopback that is a bad network: late, stalled, cut without a word, reset in the middle of a line."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field


@dataclass
class Proxy:
    """`latency_s` is added each way; `open` cleared holds everything back, as a cut cable does."""

    target: int
    latency_s: float = 0.0
    port: int = 0
    accepted: int = 0
    open: asyncio.Event = field(default_factory=asyncio.Event)
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _break_after: int | None = None

    def cut(self) -> None:
        """From now on nothing passes, and nobody is told."""
        self.open.clear()

    def restore(self) -> None:
        """What was held back passes, and what comes."""
        self.open.set()

    def reset_after(self, size: int) -> None:
        """After `size` more bytes from the node the connections are reset."""
        self._break_after = size

    def reset(self) -> None:
        """Reset every connection."""
        for writer in self._writers:
            raw = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        self._writers.clear()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection both ways."""
        self.accepted += 1
        try:
            await self.open.wait()
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self._writers += [writer, back]
        for source, sink, counted in ((reader, back, False), (there, writer, True)):
            task = asyncio.create_task(self._carry(source, sink, counted))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, counted: bool) -> None:
        loop, held = asyncio.get_running_loop(), asyncio.Queue[tuple[float, bytes]]()

        async def deliver() -> None:
            while True:
                due, data = await held.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                await self.open.wait()
                sink.write(data)
                if not data:
                    return

        delivering = asyncio.create_task(deliver())
        try:
            while data := await source.read(1 << 16):
                if counted and self._break_after is not None:
                    self._break_after -= len(data)
                    if self._break_after < 0:
                        sink.write(data[: len(data) // 2])
                        self._break_after = None
                        self.reset()
                        return
                held.put_nowait((loop.time() + self.latency_s, data))
        except OSError:
            pass
        finally:
            delivering.cancel()
            sink.close()

    async def close(self) -> None:
        self.reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def proxy(target: int, latency_s: float = 0.0) -> AsyncIterator[Proxy]:
    """A proxy to a port of this machine."""
    found = Proxy(target, latency_s)
    found.open.set()
    server = await asyncio.start_server(found.accept, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()
        await found.close()
