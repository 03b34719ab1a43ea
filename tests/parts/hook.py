"""A hook in this process, and a raw connection to its socket."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rackside_hook import Hook


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "hooks"
    place.mkdir(mode=0o700)
    return place


@pytest.fixture
def hook(folder: Path) -> Iterator[Hook]:
    with Hook("job", microbatch=4, global_batch=32, directory=str(folder), tokens_per_sample=128) as made:
        yield made


class Line:
    """A raw connection, for saying what a client would not."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10)
        self.socket.connect(str(path))
        self.lines = self.socket.makefile("rb")

    def say(self, message: Any) -> None:
        self.socket.sendall((message if isinstance(message, bytes) else json.dumps(message).encode()) + b"\n")

    def hear(self) -> dict[str, Any]:
        line = self.lines.readline()
        return json.loads(line) if line else {}

    def greet(self) -> dict[str, Any]:
        self.say({"hello": 1, "operator": "raw"})
        return self.hear()
