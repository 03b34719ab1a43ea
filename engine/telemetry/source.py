"""Where telemetry comes from: one object a node, that feeds the store and carries commands the other way."""

from __future__ import annotations

import random
from typing import Any, Protocol

from engine.telemetry.reading import Result
from engine.telemetry.store import Store
from engine.telemetry.streams import Reader, Writer


class SourceError(Exception):
    """No way to the node now. The text is a sentence; `slow` asks for a long wait before the next try."""

    def __init__(self, text: str, slow: bool = False) -> None:
        super().__init__(text)
        self.slow = slow


class NodeSource(Protocol):
    """A node, however it is reached."""

    name: str

    async def run(self, store: Store) -> None:
        """Feed the store for ever; troubles become node states, never exceptions."""

    async def command(self, command: dict[str, Any], timeout_s: float) -> Result:
        """Send a command to the node's probe. A broken connection or a time-out is "unknown", not failed."""

    async def open_job_socket(self, path: str) -> tuple[Reader, Writer]:
        """A byte stream to a Unix socket on the node. SourceError when there is no way."""


class Backoff:
    """Waits between tries: full jitter, so that a rack that comes back does not come back all at once."""

    FIRST_S, MOST_S, SLOW_S = 0.5, 30.0, 30.0

    def __init__(self) -> None:
        self._tries = 0

    def reset(self) -> None:
        self._tries = 0

    def next_s(self, slow: bool) -> float:
        """Seconds to wait before the next try; trouble that a person must mend is retried slowly."""
        if slow:
            return random.uniform(self.SLOW_S / 2, self.SLOW_S)
        self._tries += 1
        return random.uniform(self.FIRST_S / 2, min(self.MOST_S, self.FIRST_S * 2.0**self._tries))
