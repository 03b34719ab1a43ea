"""The console on a recording: a time line, keys that move in it, and what would have come of an action."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from engine.control.replay import Replay
from engine.record.reading import Reader
from tests.parts.opened import Opened
from tests.parts.recorded import ACTION_AT, ALARM_AT, recorded
from tests.parts.screen import text_of
from tests.parts.still import NOON, still
from tests.parts.waiting import until
from tests.tui.test_snapshots import pressing, same_everywhere  # noqa: F401
from tui.actions import ACTIONS, REPLAY_ACTIONS, actions
from tui.app import RacksideApp
from tui.screens.act import ActPanel
from tui.screens.help import HelpScreen
from tui.screens.whatif import WhatIfScreen
from tui.widgets import timeline

BEGAN = NOON + 30


@asynccontextmanager
async def replaying(folder: Path, seconds: int = 200, **more: object) -> AsyncIterator[tuple[Opened, Replay]]:
    replay = Replay(recorded(folder, seconds))
    app = RacksideApp(replay, **more)  # type: ignore[arg-type]
    async with app.run_test(size=(110, 34), notifications=True) as pilot:
        yield Opened(app, pilot), replay


def at(replay: Replay) -> int:
    return round(replay.position - BEGAN)


async def test_keys_move_in_time(tmp_path: Path) -> None:
    async with replaying(tmp_path) as (c, replay):
        assert text_of(c.app, "#time").startswith("PAUSED 1x")
        for keys, there in (
            (["right_square_bracket"] * 3, 3),
            (["left_square_bracket"], 2),
            (["right_curly_bracket"], 62),
            (["left_curly_bracket"] * 2, 0),
            (["semicolon"], ALARM_AT + 2),
            (["semicolon"], ACTION_AT),
            (["comma"], ALARM_AT + 2),
        ):
            await c.press(*keys)
            assert at(replay) == there, keys
        await c.shows("n02 GPU 3 is hot", "#alarm")
        await c.shows("0:00:42/0:03:19", "#time")
        await c.press("semicolon", "semicolon")
        assert "There is no alarm or action after this moment." in c.said()
        await c.shows("Power limit of n04 to 600 W", "#action")


async def test_it_plays_and_pauses(tmp_path: Path) -> None:
    async with replaying(tmp_path) as (c, replay):
        await c.press("greater_than_sign", "greater_than_sign", "full_stop")
        await c.shows("PLAYS  60x", "#time")
        await until(lambda: at(replay) > 30)
        await c.press("full_stop", "less_than_sign")
        await c.shows("PAUSED 10x", "#time")
        there = replay.position
        await c.press("right_square_bracket")
        assert replay.position == there + 1


async def test_nothing_acts_in_it(tmp_path: Path) -> None:
    async with replaying(tmp_path) as (c, replay):
        await c.press("right_curly_bracket", "a")
        assert "This is a recording: nothing can be done in it." in c.said()
        await c.press("4", "space")
        assert "It acknowledges nothing" in c.said()
        await c.press("R", "t", "enter", "escape")
        assert replay.tickets == ()
        assert not replay.arming.left_s


async def test_what_if_shows_the_twin_beside_what_came(tmp_path: Path) -> None:
    async with replaying(tmp_path) as (c, replay):
        await c.press("right_curly_bracket", "x", "w")
        assert isinstance(c.app.screen, ActPanel)
        await c.shows("What if, at this moment of the recording: nothing is sent", "#panel-body")
        await c.press("down", "down", "enter")
        await until(lambda: isinstance(c.app.screen, WhatIfScreen))
        shown = text_of(c.app, "#panel-body")
        assert "hottest GPU" in shown
        assert "10 min" in shown
        assert len(c.app.screen.found.rows) == 8
        await c.press("escape")
        assert replay.tickets == ()


@pytest.mark.parametrize(
    ("keys", "title"),
    [
        (["t", "down", "left"], "Power limit of n04 to 550 W"),
        (["m"], "Microbatch of pretrain-8b from 2 to 1"),
    ],
)
async def test_every_key_that_acts_asks_what_if(tmp_path: Path, keys: list[str], title: str) -> None:
    async with replaying(tmp_path) as (c, replay):
        await c.press("right_curly_bracket", *keys)
        assert isinstance(c.app.screen, ActPanel)
        asked = text_of(c.app, "#panel-body")
        assert "nothing is sent" in asked
        assert "Leased" not in asked
        assert title in asked
        await c.press("enter")
        await until(lambda: isinstance(c.app.screen, WhatIfScreen))
        assert title in text_of(c.app, "#panel-body")
        await c.press("escape", "r")
        await c.shows("nothing is sent", "#panel-body")
        assert replay.tickets == ()


async def test_its_keys_are_offered_in_a_recording_alone(tmp_path: Path) -> None:
    folder = tmp_path / "live"
    folder.mkdir()
    live = still(folder)
    async with live.run_test(size=(110, 34)) as pilot:
        assert not live.query("#time")
        titles = {command.title for command in live.get_system_commands(live.screen)}
        assert not titles & {a.title for a in REPLAY_ACTIONS}
        await pilot.press("full_stop", "w")
        assert len(live.screen_stack) == 1
    async with replaying(tmp_path, 5) as (c, _):
        titles = {command.title for command in c.app.get_system_commands(c.app.screen)}
        assert {a.title for a in (*ACTIONS, *REPLAY_ACTIONS)} <= titles
        await c.press("question_mark")
        assert isinstance(c.app.screen, HelpScreen)
        assert all(a.help in text_of(c.app, "#panel-body") for a in REPLAY_ACTIONS)


def test_every_action_has_a_method_and_one_key() -> None:
    keys = [a.keys for a in actions(replay=True)]
    assert len(set(keys)) == len(keys)
    assert all(hasattr(RacksideApp, f"action_{a.id}") for a in REPLAY_ACTIONS)


async def test_a_live_console_records_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = still(tmp_path)
    async with app.run_test(size=(110, 34), notifications=True) as pilot:
        c = Opened(app, pilot)
        await c.press("R")
        await c.shows("REC h200x32-400g-", "#site")
        assert app.recording is not None
        path = app.recording.path
        app.recording._take(app.control.snapshot)
        await c.press("R")
        assert "holds 1 seconds" in c.said()
    with Reader(path) as reader:
        assert len(reader.window(reader.start, reader.end, ()).times) == 1
        assert reader.newest(1e12, "job")
        assert reader.newest(1e12, "alarm")


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("plain", [False, True])
def test_the_time_line_fits(width: int, plain: bool) -> None:
    marks = [(10.0, "alarm"), (10.0, "action"), (90.0, "action"), (500.0, "alarm")]
    text = timeline.text(0.0, 100.0, 50.0, marks, True, 10.0, width, plain).plain
    assert text.startswith("PLAYS  10x")
    assert len(text) <= max(width, 44)
    assert text.isascii() or not plain
    if width >= 80:
        assert (text.count("!"), text.count("*")) == (2, 1)


def test_replay_screen(snap_compare: Callable[..., bool], tmp_path: Path) -> None:
    app = RacksideApp(Replay(recorded(tmp_path)))
    keys = ["semicolon", "semicolon", *["right_square_bracket"] * 5]
    assert snap_compare(app, terminal_size=(110, 34), run_before=pressing(*keys))


def test_what_if_screen(snap_compare: Callable[..., bool], tmp_path: Path) -> None:
    app = RacksideApp(Replay(recorded(tmp_path)))
    keys = ["right_curly_bracket", "x", "w", "down", "down", "enter"]
    assert snap_compare(app, terminal_size=(110, 34), run_before=pressing(*keys))


def test_the_command_opens_in_a_terminal(tmp_path: Path) -> None:
    path = recorded(tmp_path, 20)
    began = time.monotonic()
    script = f"{sys.executable} -m tui.cli replay {path}"
    with subprocess.Popen(["script", "-qec", script, "/dev/null"], stdin=-1, stdout=-1, stderr=-2) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        seen = b""
        while b"PAUSED" not in seen:
            assert time.monotonic() - began < 60
            seen += process.stdout.read1()  # type: ignore[attr-defined]
        process.stdin.write(b"q")
        process.stdin.flush()
        process.communicate(timeout=30)
    assert process.returncode == 0
