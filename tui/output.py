"""What commands print and write: JSON, files with the folders above them, and how far long work has come."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.profile import ProfileError


def write(targets: Mapping[Path, str]) -> list[str]:
    """Write each file, with the folders above it; their names."""
    try:
        for target, text in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ProfileError(f"{error.filename}: cannot be written: {error.strerror}.") from None
    return [str(target) for target in targets]


def printed(value: Any) -> str:
    """JSON as every command prints it."""
    return json.dumps(_finite(value), indent=1)


def line_of(value: Any) -> str:
    """JSON on one line, for what comes one after the other."""
    return json.dumps(_finite(value))


def progress(text: str = "") -> None:
    """One line that is written over by the next, and cleared by an empty one; only on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _finite(value: Any) -> Any:
    """NaN has no place in JSON: it becomes null."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
