"""JSON among other lines: tools print warnings before it on standard output, and shells their banners."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from engine.telemetry.tools.cell import lines

LARGEST = 64 * 2**20
_TRIES = 32
_PLACES = (re.compile(r"^[ \t]*([\[{])", re.M), re.compile(r"(\{|\[\s*\{)"))


def embedded(text: str) -> tuple[Any, list[str]]:
    """The first JSON object, or list of objects, in a text, and the lines around it. None where there is none."""
    decoder = json.JSONDecoder()
    for start in _starts(text) if len(text) <= LARGEST else ():
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value)):
            return value, _said(text[:start]) + _said(text[end:])
    return None, _said(text)


def flat(value: Any, most: int = 20_000) -> dict[str, Any]:
    """What an object holds by "section/key" in small letters; a value with its unit stays one, as do lists."""
    found: dict[str, Any] = {}
    stack: list[tuple[str, Any]] = [("", value)]
    while stack and len(found) < most:
        path, item = stack.pop()
        if isinstance(item, dict) and "value" not in item:
            inner = [(f"{path}/{str(key)[:80].lower()}".lstrip("/"), part) for key, part in item.items()]
            stack += [part for part in reversed(inner) if part[0].count("/") < 8]
        else:
            found.setdefault(path, item)
    return found


def _starts(text: str) -> Iterator[int]:
    for pattern in _PLACES:
        for count, found in enumerate(pattern.finditer(text)):
            if count == _TRIES:
                break
            yield found.start(1)


def _said(text: str) -> list[str]:
    return [line for line in lines(text) if line.strip()]
