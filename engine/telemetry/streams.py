"""Byte streams as this program needs them: asyncio's and asyncssh's both fit."""

from __future__ import annotations

from typing import Protocol


class Reader(Protocol):
    """Reads up to n bytes; empty at the end."""

    async def read(self, n: int, /) -> bytes: ...


class Writer(Protocol):
    """Writes without waiting."""

    def write(self, data: bytes, /) -> None: ...
    def close(self) -> None: ...
