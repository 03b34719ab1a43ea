"""Change numbers in a profile's text and keep everything else: order, comments, sources."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any


def number(value: float) -> str:
    """Four figures, in a form that YAML 1.1 reads as a number (a mantissa needs its point)."""
    text = f"{value:.4g}"
    mantissa, e, exponent = text.partition("e")
    if not e:
        return text
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}e{int(exponent):+03d}"


def with_numbers(text: str, values: Mapping[str, float], block: str | None = None) -> str:
    """Each `key: number` of the top level (or of one top-level block) with its new value; missing keys are added."""
    lines, inside, at = text.splitlines(), block is None, None
    left = dict(values)
    indent = "" if block is None else "  "
    for index, line in enumerate(lines):
        top = re.match(r"(\w+):", line)
        if top and block is not None:
            inside = top.group(1) == block
        if inside and line.strip():
            at = index
        found = re.match(rf"({indent}(\w+):\s*)([-+\d.eE]+)(.*)", line)
        if inside and found and found.group(2) in left:
            lines[index] = found.group(1) + number(left.pop(found.group(2))) + found.group(4)
    added = [f"{indent}{key}: {number(value)}" for key, value in left.items()]
    place = len(lines) if at is None else at + 1
    return "\n".join([*lines[:place], *added, *lines[place:]]) + "\n"


def with_inline(text: str, name: str, key: str, value: float) -> str:
    """The number of one key in the flow mapping `name: {...}` replaced."""
    return re.sub(rf"(\b{name}:\s*\{{[^}}]*\b{key}:\s*)[-+\d.eE]+", rf"\g<1>{number(value)}", text)


def with_block(text: str, name: str, value: Mapping[str, Any], comment: str) -> str:
    """The text with the top-level block `name` replaced, or added at the end; `comment` says where it is from."""
    kept, skipping = [], False
    for line in text.splitlines():
        if re.match(r"\w+:", line):
            skipping = line.startswith(f"{name}:")
        if not skipping:
            kept.append(line)
    rows = [f"{name}:".ljust(25) + f"# {comment}"] + [f"  {key}: {_flow(item)}" for key, item in value.items()]
    return "\n".join([*kept, *rows]) + "\n"


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(v) for v in value) + "]"
    return number(value) if isinstance(value, float) else str(value)
