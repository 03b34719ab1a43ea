"""The main screens as pictures: a change of any of them is seen and approved, never slipped in."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import patch

import pytest
from textual.pilot import Pilot

from engine.act.action import Stage
from engine.act.audit import Audit
from tests.parts.still import still, ticket
from tui.app import RacksideApp
from tui.looks import THEMES, Look
from tui.metrics import METRICS

Compare = Callable[..., bool]
SCREENS = {"racks": "1", "links": "2", "plans": "3", "alarms": "4", "jobs": "5", "log": "6"}


@pytest.fixture(autouse=True)
def same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")
    time.tzset()


def logged(app: RacksideApp) -> None:
    """An action that is done, in this session and in the log."""
    made = ticket(app, Stage.DONE)
    with patch("time.time", return_value=made.time + 1.0):
        Audit(app.control.audit_path).write(app.control.cluster.name, made)


def pressing(*keys: str) -> Callable[[Pilot[None]], Awaitable[None]]:
    async def press(pilot: Pilot[None]) -> None:
        for worker in [w for w in pilot.app.workers if w.name == "plans"]:
            await worker.wait()
        await pilot.press(*keys)
        await pilot.pause()

    return press


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("size", [(80, 24), (120, 36), (200, 60)], ids=lambda s: f"{s[0]}x{s[1]}")
@pytest.mark.parametrize("screen", SCREENS)
def test_screens(snap_compare: Compare, tmp_path: Path, screen: str, size: tuple[int, int], theme: str) -> None:
    app = still(tmp_path, look=Look(theme=THEMES[theme]))
    logged(app)
    assert snap_compare(app, terminal_size=size, run_before=pressing("x", SCREENS[screen]))


def test_the_smallest_terminal(snap_compare: Compare, tmp_path: Path) -> None:
    assert snap_compare(still(tmp_path), terminal_size=(20, 5), run_before=pressing("x"))


def test_a_node_that_is_down(snap_compare: Compare, tmp_path: Path) -> None:
    app = still(tmp_path, down=[1], job=False)
    assert snap_compare(app, terminal_size=(100, 30), run_before=pressing(*["down"] * 4))


@pytest.mark.parametrize("keys", ["v", "vn"], ids=["node", "all"])
def test_links_as_a_matrix(snap_compare: Compare, tmp_path: Path, keys: str) -> None:
    assert snap_compare(still(tmp_path), terminal_size=(100, 30), run_before=pressing(*keys))


@pytest.mark.parametrize("key", ["t", "m", "r", "question_mark"], ids=["throttle", "microbatch", "rebalance", "help"])
def test_panels(snap_compare: Compare, tmp_path: Path, key: str) -> None:
    assert snap_compare(still(tmp_path), terminal_size=(100, 40), run_before=pressing("x", key))


def test_an_alarm_is_shelved(snap_compare: Compare, tmp_path: Path) -> None:
    assert snap_compare(still(tmp_path), terminal_size=(100, 30), run_before=pressing("4", "j", "z"))


@pytest.mark.parametrize("times", range(1, len(METRICS)), ids=[m.key for m in METRICS[1:]])
def test_metrics(snap_compare: Compare, tmp_path: Path, times: int) -> None:
    assert snap_compare(still(tmp_path), terminal_size=(80, 24), run_before=pressing(*["c"] * times))


def test_ascii(snap_compare: Compare, tmp_path: Path) -> None:
    assert snap_compare(still(tmp_path, plain=True), terminal_size=(160, 48), run_before=pressing("x"))


def test_without_colours(snap_compare: Compare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert snap_compare(still(tmp_path), terminal_size=(100, 30), run_before=pressing("x"))
