"""A console's side of one hook: greet, listen, command. Works over any pair of streams, an SSH channel as well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import msgspec

from engine.job.protocol import LINE_LIMIT, PROTOCOL, CommandState, Greeting, Message, ProtocolError, decode_line


class Reader(Protocol):
    """What is read: asyncio.StreamReader and asyncssh.SSHReader in bytes both do."""

    async def read(self, n: int, /) -> bytes: ...


class Writer(Protocol):
    """What is written to: asyncio.StreamWriter and asyncssh.SSHWriter in bytes both do."""

    def write(self, data: bytes, /) -> None: ...
    def close(self) -> None: ...


class JobClient:
    """One attached hook. `open` first; then iterate `messages` on one task and `submit` from others."""

    def __init__(self, reader: Reader, writer: Writer) -> None:
        self._reader, self._writer = reader, writer
        self._buffer = bytearray()
        self._waiting: list[tuple[str, asyncio.Future[CommandState], Callable[[CommandState], None]]] = []
        self._closed = False

    async def open(self, operator: str, timeout_s: float = 10.0) -> Greeting:
        """Speak first and return the hook's greeting. ProtocolError when nothing sensible answers."""
        self._send({"hello": PROTOCOL, "operator": operator})
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._line()
        except TimeoutError:
            raise ProtocolError(f"the job's socket did not answer within {timeout_s:.0f} s") from None
        except OSError as error:
            raise ProtocolError(f"the connection to the job's socket broke: {error}") from None
        if line is None:
            raise ProtocolError("the job's socket closed before it greeted")
        greeting = decode_line(line)
        if not isinstance(greeting, Greeting):
            raise ProtocolError("the job's socket did not begin with a greeting")
        return greeting

    async def messages(self) -> AsyncIterator[Message]:
        """Everything the hook sends, until it closes; commands in flight then end as unknown."""
        try:
            while (line := await self._line()) is not None:
                message = decode_line(line)
                if isinstance(message, CommandState):
                    self._settle(message)
                yield message
        except (OSError, asyncio.IncompleteReadError) as error:
            raise ProtocolError(f"the connection to the job's socket broke: {error}") from None
        finally:
            self._abandon()

    async def submit(
        self, command: dict[str, Any], timeout_s: float, progress: Callable[[CommandState], None] = lambda _: None
    ) -> CommandState:
        """Send a command (its `id` makes it act once) and wait for its end; a time-out is unknown, not failed."""
        command_id = str(command["id"])
        if self._closed:
            return CommandState(id=command_id, state="unknown", reason="the connection to the job was lost")
        future: asyncio.Future[CommandState] = asyncio.get_running_loop().create_future()
        waiting = (command_id, future, progress)  # several may wait for one command: it is sent again, or asked for
        self._waiting.append(waiting)
        try:
            self._send(command)
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            reason = f"the job did not reach the step within {timeout_s:.0f} s"
            return CommandState(id=command_id, state="unknown", reason=reason)
        except OSError as error:
            return CommandState(id=command_id, state="unknown", reason=f"the connection to the job broke: {error}")
        finally:
            self._waiting.remove(waiting)

    async def ask(self, command_id: str, timeout_s: float) -> CommandState:
        """Where a command of an earlier connection stands; waits for its end if it is still scheduled."""
        if self._closed:
            return CommandState(id=command_id, state="unknown", reason="the connection to the job was lost")
        future: asyncio.Future[CommandState] = asyncio.get_running_loop().create_future()
        waiting = (command_id, future, lambda _: None)
        self._waiting.append(waiting)
        try:
            self._send({"ask": command_id})
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            return CommandState(id=command_id, state="unknown", reason="the job did not answer")
        finally:
            self._waiting.remove(waiting)

    def close(self) -> None:
        """Let go of the hook; the job goes on."""
        self._abandon()
        self._writer.close()

    def _send(self, message: dict[str, Any]) -> None:
        self._writer.write(msgspec.json.encode(message) + b"\n")

    async def _line(self) -> bytes | None:
        """The next line, None at the end. The bound is ours: a stream's readline may hand out parts of a line."""
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > LINE_LIMIT:
                raise ProtocolError(f"the job's socket sent a line of over {LINE_LIMIT >> 10} KiB")
            data = await self._reader.read(1 << 16)
            if not data:
                return None
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def _settle(self, state: CommandState) -> None:
        for command_id, future, progress in list(self._waiting):
            if command_id != state.id or future.done():
                continue
            if state.ended:
                future.set_result(state)
            else:
                progress(state)

    def _abandon(self) -> None:
        self._closed = True
        for command_id, future, _ in self._waiting:
            if not future.done():
                reason = "the job or the way to it was lost before it answered; it may or may not have taken effect"
                future.set_result(CommandState(id=command_id, state="unknown", reason=reason))
