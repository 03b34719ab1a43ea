"""The console's end of a job's socket."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.job.client import JobClient
from engine.job.protocol import ProtocolError


class _Cut:
    """A way to the socket that is lost before the hook has greeted."""

    async def read(self, n: int, /) -> bytes:
        raise ConnectionResetError(104, "Connection reset by peer")

    def write(self, data: bytes) -> None:
        """Sent, as far as one can tell here."""


async def test_a_way_that_is_lost_before_the_greeting_is_a_sentence() -> None:
    cut: Any = _Cut()
    async with asyncio.timeout(5):
        with pytest.raises(ProtocolError, match=r"the connection to the job's socket broke: .*reset by peer"):
            await JobClient(cut, cut).open("somebody")
