"""The page of a recording: whole, by itself, and safe to open whatever nodes and jobs are called."""

from __future__ import annotations

import json
import sqlite3
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from engine.record.recording import Recorder
from tests.parts.still import NOON, still
from tui.chart import chart
from tui.cli import main

EVIL = "<script>alert('x')</script>&\"<img src=x onerror=y>"


class Page(HTMLParser):
    """What tags a page has, and what a reader reads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.words += data


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two minutes of 32 GPUs, one of which is never read; for some seconds nothing is."""
    first, path = still(tmp_path).control.snapshot, tmp_path / "run.rks"
    recorder = Recorder(path, EVIL, [(f"n{i:02d}", slot) for i in range(1, 5) for slot in range(8)])
    for second in range(120):
        columns = {name: values.copy() for name, values in first.gpus.columns.items()}
        columns["temperature_c"][3] += second / 10
        columns["temperature_c"][7] = np.nan
        if 40 <= second < 50:
            columns["temperature_c"][:] = columns["power_w"][:] = np.nan
        gpus = replace(first.gpus, columns=MappingProxyType(columns))
        recorder.write(replace(first, time=NOON + second, gpus=gpus))
    recorder.close()
    return path


def tell(path: Path, kind: str, second: float, data: dict[str, Any] | str) -> None:
    """An event, as the file has it."""
    text = data if isinstance(data, str) else json.dumps(data)
    with sqlite3.connect(path) as db:
        db.execute("insert into event (time, kind, data) values (?, ?, ?)", (NOON + second, kind, text))


def made(path: Path) -> Page:
    out = path.with_name("out") / "report.html"
    assert main(["report", str(path), "-o", str(out)]) == 0
    return Page(out.read_text())


def test_what_is_missing_is_said(recorded: Path) -> None:
    page = made(recorded)
    for sentence in ("No step of a job", "No alarm", "No action"):
        assert f"{sentence} is in this recording." in page.words
    assert "4 nodes, 32 GPUs; 2 min from" in page.words
    assert "GPUs whose power was not read are not in the sum." in page.words


def test_plots_alarms_actions_and_their_effects(recorded: Path) -> None:
    for second in range(0, 120, 3):
        tell(recorded, "step", second, {"step": second, "step_s": 2.5 + second / 100})
    tell(recorded, "alarm", 30, {"what": "raised", "text": "n01 GPU 3 is hot", "key": "heat:n01:3", "priority": 1})
    tell(recorded, "alarm", 35, {"what": "acknowledged", "key": "heat:n01:3", "by": "ops@here"})
    action = {
        "id": "t1",
        "time": NOON + 60,
        "title": "Power limit of n01 to 600 W",
        "operator": "ops@here",
        "predicted": {"before": {"step_s": 2.5, "peak_c": 84.0, "power_w": 20000.0}, "after": {"step_s": 2.7}},
    }
    tell(recorded, "ticket", 60, action | {"stage": "sent"})
    tell(recorded, "ticket", 70, action | {"stage": "done", "measured": {"step_s": 2.71, "power_w": 18500.0}})
    page = made(recorded)
    assert "step 2.50 s, hottest 84.0 C, power 20.0 kW" in page.words
    assert "step 2.71 s, power 18.5 kW" in page.words
    assert page.words.count("Power limit of n01 to 600 W") == 4, "once in the table, and in the title of three marks"
    assert "n01 GPU 3 is hot" in page.words
    assert "ops@here" in page.words
    assert "3.67 s at most" in page.words


def test_nothing_from_elsewhere_and_nothing_that_runs(recorded: Path) -> None:
    tell(recorded, "alarm", 30, {"what": EVIL, "text": EVIL, "by": EVIL})
    tell(recorded, "job", 1, {"name": EVIL})
    tell(recorded, "step", 2, {"step_s": 2.0})
    tell(recorded, "ticket", 60, {"id": "1", "title": EVIL, "stage": EVIL, "reason": EVIL, "operator": EVIL})
    page = made(recorded)
    assert not page.tags & {"script", "img", "link", "iframe", "a", "object", "embed", "image", "use"}
    assert not {a for a in page.attributes if a.startswith("on")} | page.attributes & {"src", "href", "xlink:href"}
    assert page.words.count(EVIL) >= 6, "it is there to be read"


def test_events_that_are_not_what_they_should_be_are_survived(recorded: Path) -> None:
    for kind in ("step", "alarm", "ticket", "job", "else"):
        for data in ("{", "[]", "null", {}, {"step_s": "x", "time": None, "predicted": 3, "measured": []}):
            tell(recorded, kind, 5, data)
    tell(recorded, "step", 6, '{"step_s": NaN}')
    assert "No step of a job is in this recording." in made(recorded).words


@pytest.mark.parametrize("text", [None, "no recording\n" * 99])
def test_mistakes_are_sentences(tmp_path: Path, text: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.rks"
    if text is not None:
        path.write_text(text)
    assert main(["report", str(path), "-o", str(tmp_path / "x.html")]) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("n", [1, 2, 900, 5000])
@pytest.mark.parametrize("level", [0.0, 1e-9, 83.0, -4e6])
def test_a_line_stays_in_its_frame(n: int, level: float) -> None:
    values = level * (1 + np.arange(n) / n / 10)
    values[n // 2 + 1 : n // 2 + 3] = np.nan
    svg = chart(NOON + np.arange(float(n)), values, "C", [(NOON, "<b>"), (0.0, "before")], peak=True)
    root = ET.fromstring(svg)
    for line in root.iter("polyline"):
        points = [tuple(map(float, p.split(","))) for p in line.attrib["points"].split()]
        assert all(64 <= x <= 948 and 12 - 0.1 <= y <= 212 + 0.1 for x, y in points)
    assert len(list(root.iter("title"))) == 1


def test_each_job_has_its_own_plot(recorded: Path) -> None:
    """Where the file says whose an event is."""
    with sqlite3.connect(recorded) as db:
        for job, seconds in (("a", 2.0), ("b", 7.0)):
            row = "insert into event (time, kind, subject, data) values (?, ?, ?, ?)"
            db.execute(row, (NOON, "job", job, json.dumps({"name": f"pretrain-{job}"})))
            for at in range(60):
                db.execute(row, (NOON + at, "step", job, json.dumps({"step_s": seconds})))
    words = made(recorded).words
    assert "pretrain-a: 2.00 s in the median" in words
    assert "pretrain-b: 7.00 s in the median" in words
