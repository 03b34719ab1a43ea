"""What a metric was in the last minutes, from range queries."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from engine.telemetry.prometheus.api import Api, Series, number
from engine.telemetry.prometheus.places import Floats, Places
from engine.telemetry.reading import PLAUSIBLE

SAMPLES_A_QUERY = 100_000
"""Some 3 MB of JSON: a larger answer would hold up the screen while it is read."""
AT_ONCE = 2
"""So that one answer is read while the server makes the next."""


async def past(
    api: Api, places: Places, metric: str, queries: Sequence[tuple[float, str]], times: Floats, step_s: float
) -> Floats:
    """(times, expected rows) of a metric; of each GPU the first of `queries`, (scale, PromQL), that has it then. NaN
    where there was no sample, or none that a sensor can mean."""
    low, high = PLAUSIBLE[metric]
    out = np.full((len(times), places.expected), np.nan)
    chunk = max(1, SAMPLES_A_QUERY // max(1, places.expected))
    gate = asyncio.Semaphore(AT_ONCE)

    async def part(scale: float, query: str, first: int) -> None:
        of = times[first : first + chunk]
        async with gate:
            answer = await api.over(
                query, float(of[0]), float(of[-1]), step_s, lambda series: _placed(series, places, of, step_s)
            )
        found = scale * answer
        with np.errstate(invalid="ignore"):
            found[~((found >= low) & (found <= high))] = np.nan
        here = out[first : first + chunk]
        here[:] = np.where(np.isnan(here), found, here)

    for scale, query in queries:
        tasks = [asyncio.ensure_future(part(scale, query, first)) for first in range(0, len(times), chunk)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
    return out


def _placed(series: list[Series], places: Places, times: Floats, step_s: float) -> Floats:
    """Series as columns; of several of one GPU the largest value counts."""
    rows: list[int] = []
    lengths: list[int] = []
    stamps: list[float] = []
    texts: list[str] = []
    for one in series:
        row = places.row(one.metric)
        if row is not None and row < places.expected:
            rows.append(row)
            lengths.append(len(one.values))
            stamps += [at for at, _ in one.values]
            texts += [text for _, text in one.values]
    out = np.full((len(times), places.expected), np.nan)
    if not texts:
        return out
    at = np.rint((np.array(stamps) - times[0]) / step_s)
    inside = (at >= 0) & (at < len(times))
    where = (at[inside].astype(np.int64), np.repeat(rows, lengths)[inside])
    np.fmax.at(out, where, np.array([number(text) for text in texts])[inside])
    return out
