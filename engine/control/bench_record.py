"""What a recording costs: bytes a value, gigabytes a day, and how soon a minute of it is there (`bench record`).

GPUs that train are imitated, and their readings go through the recorder itself, a second each, as fast as they can be
written. A day is then the hour that is kept whole and 23 that are thinned, from what each took in the file.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from engine.record.reading import Reader
from engine.record.recording import THIN_AFTER_S, Recorder
from engine.record.schema import BIN_S, MINUTE_TICKS, RATES_LEFT, STEPS, Floats

MINUTES, WHOLE = 12, 5
"""Minutes that are recorded, and how many of them are kept whole."""
OPENED = 5
LINKS_A_GPU = 19
"""Eighteen of NVLink and a network port."""


def recorded(gpus: int, minutes: int = MINUTES) -> dict[str, Any]:
    """Record some minutes of `gpus` GPUs into a folder of its own, which is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bench.rks"
        names = [(f"n{row // 8:04d}", row % 8) for row in range(gpus)]
        recorder = Recorder(path, "bench", names, thin_after_s=WHOLE * 60.0)
        took = []
        chance = np.random.default_rng(2)
        for second, columns in enumerate(_training(gpus, minutes * MINUTE_TICKS)):
            links = chance.normal(6.5, 0.4, (2, gpus * LINKS_A_GPU))
            began = time.perf_counter()
            recorder.write_columns(1e9 + second, columns, links, 1e9 + second - second % BIN_S)
            took.append(time.perf_counter() - began)
        opened_live = _opened(path, thin=False)
        recorder.close()
        whole, thin, linked = _bytes(path, 0), _bytes(path, 1), _bytes_of_links(path)
        size = path.stat().st_size
        opened = max(opened_live, _opened(path, thin=False), _opened(path, thin=True))
    values = gpus * len(STEPS) * MINUTE_TICKS
    hours = THIN_AFTER_S / 3600
    day = 60 * (hours * whole["bytes"] + (24 - hours) * thin["bytes"])
    in_blocks = whole["bytes"] * whole["minutes"] + thin["bytes"] * thin["minutes"]
    overhead = size / (in_blocks + linked["bytes"] * linked["rows"])
    of_links = overhead * linked["bytes"] * 60 * (hours * RATES_LEFT + 24 - hours)
    stored = values * (hours + (24 - hours) * thin["values_share"])
    return {
        "gpus": gpus,
        "metrics": len(STEPS),
        "links": gpus * LINKS_A_GPU,
        "minutes": minutes,
        "bytes_per_value": day * overhead / 60 / stored,
        "bytes_per_value_whole": whole["bytes"] / values,
        "bytes_per_value_thinned": thin["bytes"] / (values * thin["values_share"]),
        "gb_per_24h": (day * overhead + of_links) / 1e9,
        "gb_per_24h_of_links": of_links / 1e9,
        "gb_per_24h_whole": (1440 * whole["bytes"] + 24 * 3600 / BIN_S * linked["bytes"]) * overhead / 1e9,
        "open_minute_s": opened,
        "write_ms": float(np.median(took) * 1e3),
        "fold_s": float(np.max(took)),
        "how": f"{minutes} minutes recorded, those older than {WHOLE} thinned to mean, least and largest of 10 s; "
        f"a day is {hours:.0f} h of minutes as the whole ones, {24 - hours:.0f} h of minutes as the thinned ones, and "
        "what SQLite takes on top",
    }


def text(found: dict[str, Any]) -> str:
    """To read."""
    return "\n".join(
        [
            f"{found['gpus']:,} GPUs, {found['metrics']} metrics a second; {found['links']:,} links",
            f"a stored value    {found['bytes_per_value']:.2f} bytes: whole {found['bytes_per_value_whole']:.2f}, "
            f"thinned {found['bytes_per_value_thinned']:.2f}",
            f"a day             {found['gb_per_24h']:.2f} GB, links {found['gb_per_24h_of_links']:.2f} of them; "
            f"{found['gb_per_24h_whole']:.2f} GB with nothing thinned",
            f"a minute is open  in {found['open_minute_s']:.2f} s",
            f"a second written  in {found['write_ms']:.1f} ms, one that folds a minute in {found['fold_s']:.2f} s",
            found["how"],
        ]
    )


def _training(gpus: int, seconds: int) -> Iterator[Floats]:
    """Readings in the order of STEPS: whole degrees that wander, watts that swing with the steps, traffic."""
    chance = np.random.default_rng(1)
    celsius, base = chance.normal(64, 6, gpus), chance.normal(640, 20, gpus)
    memory = chance.choice([98304.0, 101376.0], gpus)
    for second in range(seconds):
        celsius += 0.03 * (64 - celsius) + chance.normal(0, 0.4, gpus)
        watts = base + 25 * np.sin(second / 2.6) + chance.normal(0, 12, gpus)
        limited = chance.random(gpus) < 0.02
        yield np.stack(
            [
                np.round(celsius),
                np.round(celsius + 9),
                watts,
                np.full(gpus, 700.0),
                np.where(limited, 1905, 1980) - 15.0 * (chance.random(gpus) < 0.2),
                np.where(chance.random(gpus) < 0.15, 99, 100.0),
                memory,
                np.where(limited, 4.0, 0.0),
                chance.normal(120, 6, gpus),
                chance.normal(120, 6, gpus),
            ]
        )


def _opened(path: Path, thin: bool) -> float:
    """The slowest of some tries to open the file and read all that one minute holds."""
    worst = 0.0
    for at in range(OPENED):
        began = time.perf_counter()
        with Reader(path) as reader:
            first = reader.start + 60 * at if thin else reader.end - 60 * (at + 1)
            found = reader.window(first, first + 60)
            links = reader.rates(first + 30)
        assert len(found.times)
        assert links is not None
        worst = max(worst, time.perf_counter() - began)
    return worst


def _bytes_of_links(path: Path) -> dict[str, float]:
    """Of a row of what links carried, and how many there are."""
    with closing(sqlite3.connect(path)) as db:
        size, rows = db.execute("select avg(length(data)), count(*) from rate").fetchone()
    return {"bytes": float(size), "rows": float(rows)}


def _bytes(path: Path, thin: int) -> dict[str, float]:
    """Of a minute in blocks: bytes, and how many values are stored for each that was read."""
    db = sqlite3.connect(path)
    words = "from minute where (step_s > 0) = ? and ticks >= 5"
    minutes, ticks = db.execute(f"select count(*), sum(ticks) {words}", (thin,)).fetchone()
    (size,) = db.execute(f"select sum(length(data)) from block where minute in (select id {words})", (thin,)).fetchone()
    db.close()
    share = (3 if thin else 1) * ticks / (minutes * MINUTE_TICKS)
    return {"bytes": size / minutes, "minutes": float(minutes), "values_share": share}
