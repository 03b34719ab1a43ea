"""What a recording says besides readings: whose it is, and what else happened, as far as it was written down."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.record.schema import RecordError


@dataclass(frozen=True, slots=True)
class Told:
    """An event: a job's `step`, an `alarm`, a `ticket`. `subject` is the job, the alarm's key or the action's id."""

    time: float
    kind: str
    subject: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Story:
    """The cluster's name, and its events in their order."""

    cluster: str
    events: tuple[Told, ...]

    def of(self, kind: str) -> list[Told]:
        return [event for event in self.events if event.kind == kind]


def story(path: Path) -> Story:
    """RecordError with a sentence when the file is no recording. Events that cannot be understood are left out."""
    try:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        db.row_factory = sqlite3.Row
        try:
            told = db.execute("select value from meta where key = 'cluster'").fetchone()
            rows = db.execute("select * from event order by time, id").fetchall()
        finally:
            db.close()
    except (sqlite3.Error, ValueError) as error:
        raise RecordError(f"{path} is no recording that can be read: {error}.") from None
    events = []
    for row in rows:
        try:
            data = json.loads(row["data"])
        except ValueError:
            continue
        if isinstance(data, dict):
            subject = str(row["subject"]) if "subject" in row.keys() else ""  # noqa: SIM118  (a Row holds values)
            events.append(Told(float(row["time"]), str(row["kind"]), subject, data))
    return Story(str(told[0]) if told else "", tuple(events))
