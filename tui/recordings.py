"""The commands about recordings: record, replay, and export --recording."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from engine.control.recording import Recording
from engine.profile import ProfileError, catalog
from engine.record import export as tables
from engine.record.reading import Reader
from engine.record.schema import STEPS, RecordError
from tui.output import progress


def record(given: Any) -> int:
    """Record what the nodes read, their jobs, alarms and actions, until the time is up or ctrl-c."""
    from tui.heat import follow
    from tui.start import control_of

    cluster, path = catalog.cluster(given.cluster), Path(given.output).expanduser()
    control = control_of(cluster, "margin", read_only=True)
    try:
        recording = Recording(control, path, given.whole * 60, int(given.most_gb * 1e9))
    except RecordError as error:
        raise ProfileError(str(error)) from None

    said = ""

    def trouble() -> None:
        """Say what is wrong when it begins, and when it is over."""
        nonlocal said
        if recording.trouble != said:
            progress()
            words = recording.trouble or f"{path}: it is written again, {recording.lost} seconds are missing."
            print(f"rackside: {words}", file=sys.stderr, flush=True)
            said = recording.trouble

    async def run() -> None:
        async with control.running():
            await follow(control, given.seconds or float("inf"), trouble)

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        pass
    finally:
        recording.close()
    trouble()
    print(f"wrote {path}" + (f"; {recording.lost} seconds could not be written" if recording.lost else ""))
    return 1 if recording.lost or recording.trouble else 0


def export(given: Any) -> int:
    """A recording as a table: a row a GPU and moment, a column a metric."""
    if given.plan or given.prometheus or given.cluster or given.listen:
        raise ProfileError("--recording takes -o, --from, --to and --metrics alone.")
    if given.output is None:
        raise ProfileError("Where to is missing: -o FILE, a .csv or a .parquet.")
    path, out = Path(given.recording).expanduser(), Path(given.output).expanduser()
    names = tuple(given.metrics or STEPS)
    unknown = [name for name in names if name not in STEPS]
    if unknown:
        raise ProfileError(f"There is no metric {unknown[0]}; a recording has {', '.join(STEPS)}.")
    try:
        with Reader(path) as reader:
            begin = moment(given.begin, reader.start) if given.begin else reader.start
            end = moment(given.to, reader.start) if given.to else reader.end
            rows = tables.write(reader, out, begin, end, names, lambda at: progress(f"{at:.0%}"))
    except RecordError as error:
        raise ProfileError(str(error)) from None
    finally:
        progress()
    print(f"wrote {out}: {rows:,} rows")
    return 0


def replay(given: Any) -> int:
    """Open the console on a recording."""
    from engine.control.replay import Replay
    from tui.start import show

    try:
        replayed = Replay(Path(given.recording).expanduser())
    except RecordError as error:
        raise ProfileError(str(error)) from None
    return show(replayed, given)


def moment(text: str, start: float) -> float:
    """A time that somebody wrote: seconds after the start, a time of the start's day, or all of it."""
    if re.fullmatch(r"\+\d+(\.\d+)?", text):
        return start + float(text)
    day = time.strftime("%Y-%m-%d", time.localtime(start))
    for words in (text, f"{day}T{text}"):
        try:
            return datetime.fromisoformat(words).timestamp()
        except ValueError:
            continue
    raise ProfileError(f"'{text}' is no time; write 12:30, 2026-01-31T12:30:00, or +600 for seconds after the start.")
