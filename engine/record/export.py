"""A recording as a table for other programs: a row a GPU and moment; where parts are thinned, their bounds, too."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from engine.record.reading import Reader
from engine.record.schema import STEPS, Floats, RecordError

STRETCH_S = 600.0
"""So much of a recording is in memory at a time."""
BOUNDS = {"mean": "", "min": "_min", "max": "_max"}


def write(
    reader: Reader,
    out: Path,
    begin: float,
    end: float,
    metrics: Sequence[str],
    told: Callable[[float], None] | None = None,
) -> int:
    """Write `metrics` from `begin` to `end` (unix seconds) to a .csv or .parquet file; the number of rows. `told` hears
    how far it is. RecordError with a sentence when it cannot be."""
    if end < begin:
        raise RecordError("The end lies before the beginning.")
    if end < reader.start or begin > reader.end:
        raise RecordError(
            f"Nothing of {reader.path} lies there: it goes from {iso(reader.start)} to {iso(reader.end)}."
        )
    writers = {".csv": _csv, ".parquet": _parquet}
    if out.suffix not in writers:
        raise RecordError(f"{out}: what kind of table? Write a name that ends in {' or '.join(writers)}.")
    if out.exists() and out.samefile(reader.path):
        raise RecordError(f"{out} is the recording itself.")
    bounds = BOUNDS if reader.is_thin(begin, end) else {"mean": ""}
    columns = [name + bound for name in metrics for bound in bounds.values()]
    parts = _parts(reader, max(begin, reader.start), min(end, reader.end), metrics, tuple(bounds), told)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        rows = writers[out.suffix](partial, columns, parts)
        partial.replace(out)
    except OSError as error:
        raise RecordError(f"{out} cannot be written: {error.strerror}.") from None
    finally:
        partial.unlink(missing_ok=True)
    return rows


def iso(unix_s: float) -> str:
    """UTC, to the millisecond."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")


_Part = tuple[Floats, Sequence[tuple[str, int]], list[Floats]]


def _parts(
    reader: Reader,
    begin: float,
    end: float,
    metrics: Sequence[str],
    bounds: Sequence[str],
    told: Callable[[float], None] | None,
) -> Iterator[_Part]:
    """Times, GPUs, and of each column an array (t, n); a bound that is the value itself is the same array."""
    at = begin
    while at <= end:
        until = min(at + STRETCH_S, end)
        if told is not None:
            told((at - begin) / max(end - begin, 1e-9))
        last = np.nextafter(until, -np.inf) if until < end else until
        found = {of: reader.window(at, last, metrics, of=of) for of in bounds}
        mean = found["mean"]
        if len(mean.times):
            yield mean.times, mean.gpus, [found[of].metrics[name] for name in metrics for of in bounds]
        if until >= end:
            return
        at = until


def _csv(path: Path, columns: Sequence[str], parts: Iterator[_Part]) -> int:
    digits = [max(0, -int(np.floor(np.log10(STEPS[c.removesuffix("_min").removesuffix("_max")])))) for c in columns]
    rows = 0
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["time", "gpu", *columns])
        for times, gpus, values in parts:
            names = [f"{node}:{slot}" for node, slot in gpus]
            for at, time in enumerate(times):
                when = iso(time)
                cells = [_cells(column[at], places) for column, places in zip(values, digits, strict=True)]
                writer.writerows([when, *row] for row in zip(names, *cells, strict=True))
                rows += len(gpus)
    return rows


def _cells(values: Floats, digits: int) -> list[str]:
    return ["" if v != v else f"{v:.{digits}f}" for v in values.tolist()]


def _parquet(path: Path, columns: Sequence[str], parts: Iterator[_Part]) -> int:
    try:
        import pyarrow  # type: ignore[import-not-found]
        import pyarrow.parquet  # type: ignore[import-not-found]
    except ImportError:
        raise RecordError(
            "Parquet needs pyarrow, which is not installed here: pip install pyarrow, or write a .csv."
        ) from None
    rows, writer = 0, None
    try:
        for times, gpus, values in parts:
            n = len(gpus)
            table: Any = pyarrow.table(
                {
                    "time": pyarrow.array(np.repeat((times * 1e6).astype("datetime64[us]"), n)),
                    "gpu": [f"{node}:{slot}" for node, slot in gpus] * len(times),
                    **{name: v.astype(np.float32).ravel() for name, v in zip(columns, values, strict=True)},
                }
            )
            if writer is None:
                writer = pyarrow.parquet.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table)
            rows += table.num_rows
    finally:
        if writer is not None:
            writer.close()
    return rows
