"""A recording of some minutes of the still console: readings that move, a job that steps, an alarm, an action."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from engine.act.action import Stage
from engine.act.alarm import Priority, Raised
from engine.control.control import Control
from engine.control.events import JobChanged, Published, TicketChanged
from engine.control.recording import Recording
from engine.telemetry.snapshot import Snapshot
from tests.parts.still import NOON, still, ticket

ALARM_AT, ACTION_AT, GONE_AT = 40, 100, 160


def warmer(first: Snapshot, second: int) -> Snapshot:
    """The snapshot `second` seconds later; n02 GPU 3 warms by a degree in ten seconds, powers swing."""
    columns = {name: values.copy() for name, values in first.gpus.columns.items()}
    columns["temperature_c"][11] = 55 + second // 10
    columns["power_w"] += 10 * np.sin(second / 3)
    gpus = replace(first.gpus, columns=MappingProxyType(columns))
    return replace(first, version=first.version + second, time=NOON + 30 + second, gpus=gpus)


def recorded(folder: Path, seconds: int = 200, **more: float) -> Path:
    """Write it; the file's path. It begins at NOON + 30."""
    path, made = folder / "run.rks", folder / "made"
    made.mkdir()
    app = still(made)
    control: Control = app.control
    recording = Recording(control, path, clock=lambda: control.snapshot.time, **more)  # type: ignore[arg-type]
    first, job = control.snapshot, control.jobs.current
    assert job is not None
    for second in range(seconds):
        control.snapshot = warmer(first, second)
        step = replace(job, step=job.step + second, loss=2.0 - second / 1000, last_step=control.snapshot.time)
        control.jobs.statuses[job.key] = step
        control._tell(JobChanged(step))
        raised = [Raised("heat:n02:3", Priority.CRITICAL, "n02 GPU 3 is hot", "n02", 11)]
        control.alarming.look(raised if ALARM_AT <= second < GONE_AT else [], control.snapshot.time)
        if second == ACTION_AT:
            made_ticket = replace(ticket(app, Stage.PENDING), time=control.snapshot.time)
            for stage in (Stage.PENDING, Stage.ACKNOWLEDGED, Stage.DONE):
                control.tickets = (replace(made_ticket, stage=stage),)
                control._tell(TicketChanged(control.tickets[0]))
        control._tell(Published(control.snapshot))
        recording._thread.submit(lambda: None).result()
    recording.close()
    assert not recording.lost, recording.trouble
    return path
