"""One running probe: its framed lines to the store, commands to it and its answers back."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from engine.telemetry.reading import FRAME, Hello, ProbeError, Released, Result, Tick, decode
from engine.telemetry.source import SourceError
from engine.telemetry.store import Store
from engine.telemetry.streams import Reader, Writer

LINE_LIMIT = 4 << 20
NOISE_LIMIT = 64 << 20
"""Bytes without a frame after which a node that only prints garbage is given up; memory stays bounded throughout."""
HELLO_S = 30.0
RENEW_S = 5.0


class Session:
    """Reads until the probe's output ends. `noise` keeps the last unframed line, for the error message."""

    def __init__(self, node: str, reader: Reader, writer: Writer, store: Store) -> None:
        self._node, self._reader, self._writer, self._store = node, reader, writer, store
        self._buffer = bytearray()
        self._waiting: dict[str, asyncio.Future[Result]] = {}
        self._skipped = 0
        self.noise = b""
        self.greeted = False
        self.bad_records = 0
        self._leased = False

    async def run(self) -> None:
        """Feed the store until end of output. SourceError when the node never greets or prints only garbage."""
        renewing = asyncio.create_task(self._renew())
        try:
            async with asyncio.timeout(HELLO_S) as limit:
                while data := await self._reader.read(1 << 16):
                    self._take(data)
                    if self.greeted:
                        limit.reschedule(None)
        except TimeoutError:
            raise SourceError(f"the probe did not start within {HELLO_S:.0f} s{self._last_words()}") from None
        finally:
            renewing.cancel()
            self._abandon()

    def _take(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\n")) >= 0:
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._line(line)
        if len(self._buffer) > LINE_LIMIT:
            self._skip(bytes(self._buffer[:200]), len(self._buffer))
            self._buffer.clear()

    def _line(self, line: bytes) -> None:
        start = line.find(FRAME)  # a banner without a line end may stand before the frame
        if start < 0:
            self._skip(line[:200], len(line))
            return
        try:
            record = decode(line[start + 1 :])
        except ProbeError:
            self.bad_records += 1
            return
        self._skipped = 0
        if isinstance(record, Result):
            self.greeted = True  # a keeper says nothing before it is asked
            future = self._waiting.get(record.result)
            if future is not None and not future.done():
                future.set_result(record)
        elif isinstance(record, (Hello, Tick)):
            self.greeted = True
            self._store.apply(self._node, record, time.time())
        else:
            assert isinstance(record, Released)  # the limit's own reading shows it

    def _skip(self, line: bytes, size: int) -> None:
        if line.strip():
            self.noise = line
        self._skipped += size
        if self._skipped > NOISE_LIMIT:
            raise SourceError(f"the node prints garbage: {self._skipped >> 20} MiB without a record", slow=True)

    def _last_words(self) -> str:
        return f"; it printed: {self.noise.decode('utf-8', 'replace')}" if self.noise else ""

    async def command(self, command: dict[str, Any], timeout_s: float) -> Result:
        """Send one command and wait for its answer."""
        command_id = str(command["id"])
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting[command_id] = future
        try:
            self._leased = self._leased or command.get("lease_s") is not None
            self._writer.write(msgspec.json.encode(command) + b"\n")
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            return Result(command_id, "unknown", f"no answer within {timeout_s:.0f} s; it may have taken effect")
        except OSError as error:
            return Result(command_id, "unknown", f"the connection broke: {error}")
        finally:
            self._waiting.pop(command_id, None)

    async def _renew(self) -> None:
        """Keep leases alive as long as this console lives and reaches the node."""
        while True:
            await asyncio.sleep(RENEW_S)
            if self._leased:
                self._writer.write(b'{"do":"renew"}\n')

    def _abandon(self) -> None:
        for command_id, future in self._waiting.items():
            if not future.done():
                reason = "the connection was lost before the node answered; it may have taken effect"
                future.set_result(Result(command_id, "unknown", reason))
