"""The selected GPU: a number, or the word for why there is none."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from engine.control.ahead import Course
from engine.telemetry.reading import decode
from tests.parts.still import still
from tui.widgets.detail import detail, foreseen
from tui.widgets.plot import columns


def test_what_is_not_read_is_a_word_and_never_a_number(tmp_path: Path) -> None:
    control = still(tmp_path).control
    name, words = control.cluster.nodes[0].name, ["unsupported"] + ["error"] * 7
    tick = {"tick": 99, "time": 1.0, "gpus": {"power_w": words, "utilization_pct": words, "temperature_c": [2112] * 8}}
    control.store.apply(name, decode(json.dumps(tick).encode()), control.snapshot.time)  # type: ignore[arg-type]
    snapshot = control.store.publish(control.snapshot.time)
    lines = detail(control.cluster, snapshot, 0, 0, {}, 60, plain=True).plain.splitlines()
    shown = {line[:12].strip(): line[12:23].strip() for line in lines}
    assert (shown["Temperature"], shown["Power"], shown["Utilisation"]) == ("implausible", "unsupported", "unsupported")


def test_columns_are_filled_to_one_edge_and_hatched_to_the_other() -> None:
    low, high = np.array([0.0, 8.0, 12.0, 16.0, np.nan]), np.array([0.0, 16.0, 12.0, 16.0, 3.0])
    assert columns(low, high, 2, 0.0, 16.0) == [" ▒▄█ ", " ███ "]
    assert columns(low, high, 2, 0.0, 16.0, plain=True) == [" ::# ", " ### "]


def test_the_next_ten_minutes_stand_right_of_the_past(tmp_path: Path) -> None:
    times = np.array([0.0, 300.0, 600.0])
    course = Course(times, times, np.array([80.0, 82.0, 84.0]), np.array([80.0, 84.0, 88.0]), 86.0, 87.0, np.inf)
    said, *lines = foreseen(np.linspace(70.0, 80.0, 60), course, 41, plain=True).plain.splitlines()
    assert said == "in 10 min 84-88 C, limit 87 C"
    assert [line.index("|") for line in lines] == [20, 20, 20]
    assert lines[-1][21:] == "#" * 20, "all of it above the lowest line"
    assert ":" in lines[0][21:], "the band reaches the highest"
    soon = foreseen(np.array([86.0]), dataclasses.replace(course, reaches_s=130.0), 41, plain=True).plain
    assert soon.startswith("at its limit, 87 C, in 2 min\n")
