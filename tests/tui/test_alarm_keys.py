"""The keys of the alarms, pressed, and the command that does the same: on a real node behind sshd."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parts.nvml import FakeNvml
from tests.parts.opened import opened
from tests.parts.waiting import until
from tui.screens.shelve import ShelvePanel
from tui.widgets.elevation import Elevation

pytestmark = pytest.mark.usefixtures("quick_retries")


async def test_an_alarm_is_seen_shelved_and_gone_to(inventory: Path, nvml: FakeNvml) -> None:
    async with opened(inventory) as c:
        nvml.write(8, gpu6_temperature=88, gpu3_temperature=86)
        await c.live()
        await until(lambda: len([a for a in c.app.control.alarms if a.key.startswith("heat:")]) == 2, 30)
        await c.press("space")
        assert c.app.control.alarms[0].by == "", "the first press only shows the list"
        await c.shows("new", "#body-alarms")
        first = c.app.control.alarms[0].key
        await c.press("space")
        (seen,) = [a for a in c.app.control.alarms if a.by]
        assert (seen.key, seen.by) == (first, "ops@test")
        await c.press("home", "enter")
        await until(lambda: c.app.query_one(Elevation).cursor[1] in (3, 6))
        assert c.app.pane == "gpu"
        await c.press("4", "end", "z")
        assert isinstance(c.app.screen, ShelvePanel)
        await c.press("enter")
        await c.shows("Say why", "#panel-body")
        await c.press("down", *"fan", "enter")
        (shelf,) = c.app.control.alarming.shelved
        assert (shelf.reason, round(shelf.until - c.app.control.snapshot.time, -2)) == ("fan", 4 * 3600)
        await c.shows("Shelved", "#body-alarms")
        await c.press("end", "z")
        assert c.app.control.alarming.shelved == ()
        await until(lambda: shelf.key in c.app.alarm_list.shown, 30, "it is listed again")
        await c.press("asterisk")
        seen = lambda: {a.key for a in c.app.control.alarms if a.by}  # noqa: E731
        await until(lambda: {first, shelf.key} <= seen())
        await c.shows("seen", "#alarm")


async def test_what_a_filter_hides_is_not_acknowledged(inventory: Path, nvml: FakeNvml) -> None:
    async with opened(inventory) as c:
        nvml.write(8, gpu6_temperature=88, gpu3_temperature=86)
        await c.live()
        await until(lambda: len([a for a in c.app.control.alarms if a.key.startswith("heat:")]) == 2, 30)
        await c.press("4", "slash", *"GPU 3 at", "enter")
        await until(lambda: c.app.alarm_list.shown == ["heat:n1:3"])
        await c.press("asterisk")
        assert {a.key for a in c.app.control.alarms if a.by} == {"heat:n1:3"}


async def test_the_list_moves_with_arrows_and_leaves_with_escape(inventory: Path, nvml: FakeNvml) -> None:
    async with opened(inventory, size=(100, 24)) as c:
        nvml.write(8, gpu6_temperature=88, gpu3_temperature=86)
        await c.live()
        await until(lambda: len(c.app.control.alarms) >= 2, 30)
        await c.press("4")
        shown = c.app.alarm_list
        assert shown.chosen is c.app.control.alarms[0]
        for key, at in (("down", 1), ("k", 0), ("j", 1), ("up", 0), ("end", -1)):
            await c.press(key)
            assert shown.chosen is not None
            every = [a.key for a in c.app.control.alarms]
            assert shown.chosen.key == every[at], key
        await c.press("escape", "right")
        assert (c.app.pane, c.app.query_one(Elevation).cursor) == ("gpu", (0, 1))


async def test_a_read_only_console_acknowledges_nothing(inventory: Path, nvml: FakeNvml) -> None:
    async with opened(inventory, read_only=True) as c:
        nvml.write(8, gpu6_temperature=88)
        await c.live()
        await until(lambda: c.app.control.alarms, 30)
        await c.press("4", "space", "asterisk", "z")
        assert "acknowledges nothing" in c.said()
        assert not any(a.by for a in c.app.control.alarms)
        assert not isinstance(c.app.screen, ShelvePanel)


async def command(inventory: Path, *words: str) -> tuple[int, Any, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tui.cli", "alarms", "--cluster", str(inventory), *words, stdout=-1, stderr=-1
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode or 0, json.loads(out) if out.startswith(b"{\n") else out.decode(), err.decode()


async def test_the_command_lists_acknowledges_and_shelves(
    inventory: Path, nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    nvml.write(8, gpu6_temperature=88, gpu3_temperature=86)
    code, told, _ = await command(inventory, "--json")
    assert code == 1
    assert {"heat:n1:6", "heat:n1:3"} <= {a["key"] for a in told["alarms"] if a["state"] == "new"}
    assert await command(inventory, "--acknowledge", "all") == (0, "", "")
    assert await command(inventory, "--shelve", "heat:n1:3", "--reason", "fan ordered") == (0, "", "")
    code, told, _ = await command(inventory, "--json")
    assert code == 0
    assert {a["state"] for a in told["alarms"]} == {"acknowledged"}
    assert [(s["key"], s["reason"]) for s in told["shelved"]] == [("heat:n1:3", "fan ordered")]
    _, story, _ = await command(inventory, "--log")
    assert "fan ordered" in story
    assert story.count("raised") >= 2
    assert await command(inventory, "--unshelve", "heat") == (0, "", "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--acknowledge", "heat:n9"), "'heat:n9' is no alarm of the log; there is none that a console has seen"),
        (("--shelve", "x", "--reason", "y"), "'x' is no alarm of the log"),
        (("--unshelve", "x"), "'x' is not one shelved alarm; there is none"),
    ],
)
async def test_a_key_that_is_none_is_a_sentence(
    inventory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], says: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    code, _, err = await command(inventory, *words)
    assert (code, says in err) == (2, True), err
