"""Real training jobs as processes, and a console's client attached to their hooks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.job import CommandState, Greeting, JobClient, StepEvent
from engine.job.protocol import Message
from tests.parts.waiting import until


@dataclass
class TrainingJob:
    """A trainer's process. `folder` holds its hook's socket."""

    process: asyncio.subprocess.Process
    folder: Path
    name: str

    @property
    def socket(self) -> Path:
        return self.folder / f"{self.name}.sock"

    async def finished(self, timeout_s: float = 90) -> None:
        assert await asyncio.wait_for(self.process.wait(), timeout_s) == 0


@asynccontextmanager
async def training(trainer: str, folder: Path, name: str = "job", **options: Any) -> AsyncIterator[TrainingJob]:
    """Run `python -m engine.job.example.<trainer>`; it is killed at the end if it still runs."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    arguments = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        f"engine.job.example.{trainer}",
        f"--job={name}",
        f"--hook-directory={folder}",
        *arguments,
        start_new_session=True,
    )
    try:
        yield TrainingJob(process, folder, name)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
        await process.wait()


@dataclass
class Attached:
    """A client with everything it was told."""

    client: JobClient
    greeting: Greeting
    told: list[Message] = field(default_factory=list)

    @property
    def step(self) -> int:
        return max((m.step for m in self.told if isinstance(m, StepEvent)), default=self.greeting.step)

    async def reaches(self, step: int, timeout_s: float = 60) -> None:
        await until(lambda: self.step >= step, timeout_s, f"step {step}")

    async def does(self, command_id: str, do: str, **values: Any) -> CommandState:
        return await self.client.submit({"id": command_id, "do": do, **values}, 30)


@asynccontextmanager
async def attached(socket: Path, operator: str = "test", timeout_s: float = 60) -> AsyncIterator[Attached]:
    """Attach to a hook as soon as it is there."""
    await until(socket.exists, timeout_s, f"{socket} appears")
    reader, writer = await asyncio.open_unix_connection(str(socket))
    client = JobClient(reader, writer)
    found = Attached(client, await client.open(operator))

    async def listen() -> None:
        async for message in client.messages():
            found.told.append(message)

    task = asyncio.create_task(listen())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        client.close()


def saved(path: Path, rank: int) -> dict[str, Any]:
    """What a light rank wrote at its end."""
    found: dict[str, Any] = json.loads(Path(f"{path}.{rank}").read_text())
    return found
