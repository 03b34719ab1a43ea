"""The probe as a process on a driver stand-in, its records read and commands sent."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from engine.telemetry.loader import BOOTSTRAP, probe_payload
from engine.telemetry.reading import FRAME
from tests.parts.nvml import FakeNvml


class Running:
    """A probe as a process: `record` waits for the next record that has a key, `send` writes a command."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def record(self, key: str) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(15):
            while line := await self.process.stdout.readline():
                if line.startswith(FRAME):
                    record: dict[str, Any] = json.loads(line[1:])
                    if key in record:
                        return record
        raise AssertionError(f"the probe ended before a record with '{key}'")

    def send(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")


@asynccontextmanager
async def probe(nvml: FakeNvml | None, interval_s: float = 0.1, node: str = "n") -> AsyncIterator[Running]:
    environment = {**os.environ, **(nvml.environment if nvml else {})}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-u",
        "-c",
        BOOTSTRAP,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environment,
        limit=1 << 22,
    )
    assert process.stdin is not None
    process.stdin.write(probe_payload(interval_s, node))
    try:
        yield Running(process)
    finally:
        if process.returncode is None:
            process.stdin.close()
            await asyncio.wait_for(process.wait(), 10)
