"""Power and temperature over time, from a recording or from somebody's CSV, laid over the rows of a cluster."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.record import reading
from engine.record.schema import RecordError

Floats = npt.NDArray[np.float64]
COLUMNS = ("time", "gpu", "power", "temperature")


@dataclass(frozen=True)
class Trace:
    """`times` (t,) in seconds; `temperature_c`, `power_w`, `power_limit_w` (t, n), NaN where nothing was read."""

    times: Floats
    temperature_c: Floats
    power_w: Floats
    power_limit_w: Floats


def read(path: Path, gpus: Sequence[tuple[str, int]]) -> Trace:
    """Read a file for these GPUs, (node, slot). RecordError with a sentence when it is none, or knows none of them."""
    if not path.is_file():
        raise RecordError(f"There is no file {path}.")
    with path.open("rb") as file:
        is_sqlite = file.read(15) == b"SQLite format 3"
    return _recorded(path, gpus) if is_sqlite else _csv(path, gpus)


def _recorded(path: Path, gpus: Sequence[tuple[str, int]]) -> Trace:
    found = reading.read(path, ("temperature_c", "power_w", "power_limit_w"))
    rows = {gpu: row for row, gpu in enumerate(found.gpus)}
    ours = [row for row, gpu in enumerate(gpus) if gpu in rows]
    theirs = [rows[gpus[row]] for row in ours]
    if not ours:
        told = ", ".join(dict.fromkeys(node for node, _ in found.gpus))
        raise RecordError(f"{path} is of other nodes ({told}) than the cluster's.")

    def laid(name: str) -> Floats:
        out = np.full((len(found.times), len(gpus)), np.nan)
        out[:, ours] = found.metrics[name][:, theirs]
        return out

    return Trace(found.times, laid("temperature_c"), laid("power_w"), laid("power_limit_w"))


def _csv(path: Path, gpus: Sequence[tuple[str, int]]) -> Trace:
    """Columns time, gpu, power, temperature in any order; `gpu` is node:slot, or a number where there is one node or
    GPUs are numbered through; `time` in seconds or ISO 8601."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RecordError(f"{path} cannot be read as CSV: {error}.") from None
    names = _named(rows[0] if rows else {}, path)
    places = {gpu: row for row, gpu in enumerate(gpus)}
    found: dict[float, dict[int, tuple[float, float]]] = {}
    for number, row in enumerate(rows, 2):
        where = f"{path}:{number}"
        place = _place(row[names["gpu"]], gpus, places, where)
        values = (_number(row[names["power"]], where), _number(row[names["temperature"]], where))
        found.setdefault(_moment(row[names["time"]], where), {})[place] = values
    times = np.array(sorted(found))
    watts, celsius = np.full((len(times), len(gpus)), np.nan), np.full((len(times), len(gpus)), np.nan)
    for at, time in enumerate(times):
        for place, (power, temperature) in found[float(time)].items():
            watts[at, place], celsius[at, place] = power, temperature
    return Trace(times, celsius, watts, np.full_like(watts, np.nan))


def _named(first: Mapping[str | None, str], path: Path) -> dict[str, str]:
    """Which column is which: by its name's beginning, so that `power_w` and `temperature.gpu` do."""
    out = {}
    for wanted in COLUMNS:
        match = next((n for n in first if n and n.strip().lower().startswith(wanted)), None)
        if match is None:
            told = ", ".join(str(n) for n in first) or "nothing"
            raise RecordError(f"{path}: there is no column '{wanted}'; a trace has {', '.join(COLUMNS)}, this {told}.")
        out[wanted] = match
    return out


def _place(text: str | None, gpus: Sequence[tuple[str, int]], places: Mapping[tuple[str, int], int], where: str) -> int:
    words = re.fullmatch(r"\s*(?:(.+?)(?::|/| GPU ))?(\d+)\s*", text or "")
    if words:
        node, slot = words.group(1), int(words.group(2))
        row = places.get((node, slot)) if node else slot
        if row is not None and row < len(gpus):
            return row
    raise RecordError(
        f"{where}: '{text}' is no GPU of the cluster; write node:slot, such as {gpus[0][0]}:{gpus[0][1]}."
    )


def _moment(text: str | None, where: str) -> float:
    try:
        return float(text or "")
    except ValueError:
        pass
    try:
        return datetime.fromisoformat((text or "").strip().replace("/", "-")).timestamp()
    except ValueError:
        raise RecordError(f"{where}: '{text}' is no time; write seconds or 2026-01-31 12:00:00.") from None


def _number(text: str | None, where: str) -> float:
    """A number with or without its unit; NaN for what sensors say when they have nothing."""
    words = re.match(r"\s*([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)", text or "")
    if words:
        return float(words.group(1))
    if (text or "").strip().strip("[]").lower() in ("", "n/a", "nan", "not supported", "unknown error"):
        return float("nan")
    raise RecordError(f"{where}: '{text}' is no number.")
