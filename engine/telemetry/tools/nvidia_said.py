"""The sentences that nvidia-smi prints instead of, or between, readings."""

from __future__ import annotations

import re

from engine.telemetry.text import clean
from engine.telemetry.tools.cell import bus_id, label, whole

MISMATCH = "driver/library version mismatch: the NVIDIA kernel module and library differ; reboot the node"
UNNAMED = "a GPU it does not name"
_HANDLE = re.compile(r"unable to determine the device handle for gpu", re.I)
_LOST = re.compile(r"gpu is lost|fallen off the bus", re.I)
_INDEX = re.compile(r"\bgpu:?\s*(\d{1,4})\b(?!:[0-9a-f])", re.I | re.A)
_TROUBLE = re.compile(
    r"failed to initialize nvml|nvidia-smi has failed|no devices were found|couldn't find libnvidia-ml"
    r"|nvml library version|driver not loaded|gpu access blocked"
    r"|is not a valid field to query|nvidia-smi\S*: (?:command )?not found"
    r"|nvidia-smi.*(?:no such file|permission denied)",
    re.I,
)
_REFUSED = re.compile(r"field \"?([\w.]{1,80})\"? is not a valid field to query", re.I)
_GPU = re.compile(r"GPU\s+(\d{1,4}):\s*(.*?)\s*\(UUID:\s*([^()]*)\)\s*", re.I | re.A)


def lost(line: str) -> str | None:
    """The GPU that the line says cannot be reached, by bus id or `index n`; None for any other line."""
    line = line[:4096]
    if not _HANDLE.search(line) and not _LOST.search(line):
        return None
    found = bus_id(line)
    if found is not None:
        return found
    index = _INDEX.search(line)
    return f"index {int(index[1])}" if index else UNNAMED


def named(lost_gpus: list[str]) -> list[str]:
    """Without the unnamed one, where another line names it: the sentence may go on over two lines."""
    names = [name for name in lost_gpus if name != UNNAMED]
    return names or lost_gpus


def trouble(line: str) -> str | None:
    """The sentence, where a line says that nothing of the node can be read."""
    if "driver/library version mismatch" in line.lower():
        return MISMATCH
    return clean(line.strip()) if _TROUBLE.search(line[:4096]) else None


def refused(line: str) -> str | None:
    """The field that this driver's nvidia-smi does not know: ask again without it."""
    found = _REFUSED.search(line[:4096])
    return found[1] if found else None


def gpu_line(line: str) -> tuple[int, str | None, str | None] | None:
    """Index, name and uuid of a line `GPU 0: NVIDIA … (UUID: GPU-…)`."""
    found = _GPU.fullmatch(line.strip())
    index = whole(found[1]) if found else None
    return None if found is None or index is None else (index, label(found[2]), label(found[3]))
