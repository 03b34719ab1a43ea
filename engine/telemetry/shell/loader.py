"""How the shell reader gets onto a node, and when: where Python or NVML is missing and a tool is there."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable
from pathlib import Path

from engine.telemetry.loader import CONSOLE
from engine.telemetry.reading import FRAME, Hello, ProbeError, decode
from engine.telemetry.streams import Reader
from engine.telemetry.tools import nvidia_smi

SCRIPT = Path(__file__).parent.parent / "probe" / "rackside_shell.sh"
TOOLS = ("nvidia-smi", "amd-smi", "rocm-smi")
AMD_TOOLS = TOOLS[1:]
PLACES = '"$PATH:/usr/bin:/usr/local/bin:/bin:/usr/sbin:/opt/rocm/bin"'
RETRY_S = 10.0
POLL_S = 2.0
"""AMD's tools take about a second each time: they are not asked more often."""
SIDE_S = 10.0

GREETING_LIMIT = 4 << 20


def shell_command() -> str:
    """The remote command; the script follows over standard input. Plain enough for sh, bash, fish and csh."""
    return f"exec env LC_ALL=C PATH={PLACES} sh -s"


def look_command(names: tuple[str, ...]) -> str:
    """A command that succeeds where one of these programs is there."""
    tests = " || ".join(f"command -v {name} >/dev/null" for name in names)
    return f"exec env LC_ALL=C PATH={PLACES} sh -c '{tests}'"


def shell_payload(interval_s: float, node: str, skip: str = "") -> bytes:
    """What goes to standard input: the reader's settings, then the reader."""
    settings = {
        "interval_s": f"{interval_s:g}",
        "interval_ms": f"{max(100, round(interval_s * 1000))}",
        "poll_s": f"{max(1, math.ceil(max(POLL_S, interval_s)))}",
        "retry_s": f"{RETRY_S:g}",
        "side_every": f"{max(1, round(SIDE_S / max(0.1, interval_s)))}",
        "console": f"{CONSOLE}-{hashlib.sha256(node.encode()).hexdigest()[:12]}",
        "skip": skip,
        "new_fields": ",".join(nvidia_smi.NEW_FIELDS),
        "old_fields": ",".join(nvidia_smi.OLD_FIELDS),
    }
    return "".join(f"{name}='{value}'\n" for name, value in settings.items()).encode() + SCRIPT.read_bytes()


class Overheard:
    """The Python probe's output on its way to a session, that ends at once when the probe greets without NVML and
    something else can read the GPUs there: `instead` then says why."""

    def __init__(self, reader: Reader, others: Callable[[str], Awaitable[bool]]) -> None:
        self._reader, self._others = reader, others
        self._begun: bytearray | None = bytearray()
        self.instead = ""

    async def read(self, n: int, /) -> bytes:
        data = await self._reader.read(n)
        if self._begun is not None and data:
            self._begun += data
            trouble, heard = _greeting(bytes(self._begun))
            self._begun = None if heard or len(self._begun) > GREETING_LIMIT else self._begun
            if trouble and await self._others(trouble):
                self.instead = trouble
                return b""
        return data


def _greeting(said: bytes) -> tuple[str, bool]:
    """What keeps NVML from being there, from a greeting; and whether there was a greeting already."""
    for line in said.split(b"\n")[:-1]:
        start = line.find(FRAME)
        if start < 0:
            continue
        try:
            record = decode(line[start + 1 :])
        except ProbeError:
            continue
        trouble = record.trouble or "" if isinstance(record, Hello) else ""
        missing = trouble.startswith(
            ("no NVIDIA driver is loaded", "NVML does not start", "the module that reads NVML")
        )
        return trouble if missing else "", True
    return "", False
