"""One cell of a tool's output as a reading: a number in its metric's unit, or the word for why there is none."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from engine.telemetry.reading import PLAUSIBLE, Reading
from engine.telemetry.text import clean

# To the unit that ends the metric's name. amd-smi and rocm-smi write MB and GB for what they count in 1024s.
_UNITS: dict[str, dict[str, float]] = {
    "c": {"c": 1, "°c": 1},
    "w": {"w": 1, "mw": 1e-3, "uw": 1e-6, "kw": 1e3},
    "mhz": {"mhz": 1, "ghz": 1e3, "khz": 1e-3, "hz": 1e-6},
    "mib": {"mib": 1, "mb": 1, "gib": 1024, "gb": 1024, "kib": 2**-10, "kb": 2**-10, "b": 2**-20, "bytes": 2**-20},
    "pct": {"%": 1},
    "j": {"j": 1, "mj": 1e-3, "uj": 1e-6, "kj": 1e3},
}
_NUMBER = re.compile(r"\(?\s*([-+]?\d{1,18}(?:\.\d{0,18})?(?:e[-+]?\d{1,2})?)\s*([a-z°%]{0,8})\s*\)?", re.I | re.A)
_HEX = re.compile(r"0x[0-9a-f]{1,16}", re.I)
_WORDS = (
    ("n/a", "absent"),
    ("none", "absent"),
    ("null", "absent"),
    ("no data", "absent"),
    ("not found", "absent"),
    ("unknown error", "error"),
    ("not supported", "unsupported"),
    ("unsupported", "unsupported"),
    ("not available", "unsupported"),
    ("requested functionality has been deprecated", "unsupported"),
    ("gpu is lost", "lost"),
    ("gpu requires reset", "error"),
    ("insufficient permissions", "error"),
    ("err!", "error"),
)
_BUS = re.compile(r"(?<![0-9a-f])(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-9a-f])(?![0-9a-f])", re.I)
# GT/s of a PCIe lane, by generation.
_GENERATIONS = {2.5: 1.0, 5.0: 2.0, 8.0: 3.0, 16.0: 4.0, 32.0: 5.0, 64.0: 6.0}
_YES = ("yes", "active", "enabled", "true", "1")
_NO = ("no", "not active", "disabled", "false", "0")


def lines(text: str, longest: int = 4096) -> list[str]:
    """The lines of a text, each at most `longest` characters: no tool prints longer ones, other things may."""
    return [line[:longest].rstrip("\r") for line in text.split("\n")]


def reading(metric: str, value: Any, unit: str = "") -> Reading:
    """`value`, text or a number, in the unit of `metric`; `unit` holds where the text names none."""
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return "error"
    if isinstance(value, int | float):
        return _scaled(metric, _finite(value), unit)
    if not isinstance(value, str):
        return "error"
    text = _bare(value)
    if _HEX.fullmatch(text):
        return float(int(text, 16))
    found = _NUMBER.fullmatch(text)
    return _scaled(metric, float(found[1]), found[2] or unit) if found else word(text)


def number(value: Any) -> float | None:
    """A number without a unit, or one whose unit does not matter, such as `16x` lanes."""
    found = reading("", value)
    return found if isinstance(found, float) else None


def whole(text: str) -> int | None:
    """A small non-negative whole number: an index, an id."""
    return int(text) if re.fullmatch(r"\s*\d{1,9}\s*", text, re.A) else None


def flag(text: str) -> Reading:
    """Yes and no, as 1 and 0."""
    said = _bare(text).lower()
    return 1.0 if said in _YES else 0.0 if said in _NO else word(text)


def switch(text: str | None) -> bool | None:
    """Enabled or disabled; None for anything else."""
    said = None if text is None else flag(text)
    return bool(said) if isinstance(said, float) else None


def word(text: str) -> str:
    """The state that a text in a number's place names; what nobody knows is an error."""
    said = _bare(text).lower()
    if not said:
        return "blank"
    if not said.strip("-"):
        return "absent"
    return next((state for begin, state in _WORDS if said.startswith(begin)), "error")


def label(value: Any, limit: int = 80) -> str | None:
    """A name to show, or None where the tool says that there is none."""
    if not isinstance(value, str):
        return None
    said = _bare(value).lower()
    if not said or any(said.startswith(begin) for begin, _ in _WORDS) or not said.strip("-"):
        return None
    return clean(value.strip(), limit) or None


def bus_id(text: str) -> str | None:
    """The PCI bus id in a text, in capitals and with a domain of four digits: tools print one id in several ways."""
    found = _BUS.search(text[:4096])
    if found is None:
        return None
    domain = int(found[1] or "0", 16)
    return f"{domain:04X}:{found[2]}:{found[3]}.{found[4]}".upper()


def pcie_generation(speed: float | None) -> float | None:
    """Of a lane's speed in GT/s, or in MT/s as some releases print it."""
    return None if speed is None else _GENERATIONS.get(speed / 1000 if speed > 1000 else speed)


def first(readings: Iterable[Reading]) -> Reading:
    """The first number; where there is none, the first reason why."""
    found = list(readings)
    numbers = (r for r in found if isinstance(r, float))
    return next(numbers, next((r for r in found if r is not None), None))


def total(readings: Iterable[Reading]) -> Reading:
    """The sum of what counts; parts that a GPU does not have do not, one that cannot be read spoils it."""
    found = [r for r in readings if r is not None]
    bad = next((r for r in found if r in ("error", "lost")), None)
    numbers = [r for r in found if isinstance(r, float)]
    return bad or (math.fsum(numbers) if numbers else first(found))


def torn(metric: str, value: Reading) -> bool:
    """Whether a number is none that this sensor can mean."""
    low, high = PLAUSIBLE[metric]
    return isinstance(value, float) and not low <= value <= high


def junction_first(junction: Reading, edge: Reading) -> tuple[Reading, int]:
    """The junction's temperature, else the edge's, and how many torn readings were left out on the way."""
    left_out = 0
    kept: list[Reading] = []
    for value in (junction, edge):
        if isinstance(first(kept), float):
            break
        left_out += torn("temperature_c", value)
        kept.append("implausible" if torn("temperature_c", value) else value)
    return first(kept), left_out


def _bare(text: str) -> str:
    text = text.strip()
    return text[1:-1].strip() if len(text) > 1 and text[0] == "[" and text[-1] == "]" else text


def _finite(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _scaled(metric: str, value: float, unit: str) -> Reading:
    if not math.isfinite(value):
        return "error"
    known = _UNITS.get(metric.rpartition("_")[2])
    if known is None or not unit:
        return value
    factor = known.get(unit.strip().lower())
    return "error" if factor is None else value * factor
