"""The Plans screen in the console: all plans for the job that runs, itself among them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot

from tests.parts.screen import text_of
from tests.parts.still import still
from tests.parts.waiting import until
from tests.tui.test_snapshots import same_everywhere  # noqa: F401  # for every test here
from tui.app import RacksideApp
from tui.looks import THEMES, Look
from tui.screens.plans import PlansScreen

Compare = Callable[..., bool]


async def finds(pilot: Pilot[None]) -> PlansScreen:
    """The screen that f opens, once it has found all."""
    await pilot.press("f")
    screen = pilot.app.screen
    assert isinstance(screen, PlansScreen)
    await until(lambda: screen.board.found, 60, "plans are found")
    await until(lambda: all(row in screen._seconds for row in screen.board.pins), 30, "pins are predicted")
    await pilot.pause()
    return screen


def after(*keys: str) -> Callable[[Pilot[None]], Awaitable[None]]:
    async def press(pilot: Pilot[None]) -> None:
        await finds(pilot)
        await pilot.press(*keys)
        await pilot.pause()

    return press


@pytest.mark.parametrize("theme", ["dark", "light"])
@pytest.mark.parametrize("size", [(80, 24), (120, 36), (200, 60)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_all_plans_of_the_job(snap_compare: Compare, tmp_path: Path, size: tuple[int, int], theme: str) -> None:
    app = still(tmp_path, look=Look(theme=THEMES[theme]))
    assert snap_compare(app, terminal_size=size, run_before=after("j", "space"))


def test_the_jobs_own_plan_beside_another(snap_compare: Compare, tmp_path: Path) -> None:
    assert snap_compare(still(tmp_path), terminal_size=(80, 24), run_before=after("home", "space", "tab"))


async def test_the_running_plan_is_one_of_them_with_what_is_measured(tmp_path: Path) -> None:
    app = still(tmp_path)
    async with app.run_test(size=(160, 44)) as pilot:
        screen = await finds(pilot)
        (own,) = screen.board.pins
        job = app.control.jobs.current
        assert job is not None
        assert own.label.startswith("now: ")
        assert own.measured_s == job.step_s
        assert own.plan.global_batch == job.global_batch
        assert {row.plan.global_batch for row in screen.board.rows} == {job.global_batch}
        assert own in screen.board.rows
        assert f"{job.step_s:.2f}" in text_of(app, "#pins")
        await until(lambda: "as now: n04 GPU 5 is held at" in text_of(app, "#head"), 20)


async def test_escape_goes_back_and_f_finds_it_as_it_was_left(tmp_path: Path) -> None:
    app = still(tmp_path)
    async with app.run_test(size=(120, 36)) as pilot:
        screen = await finds(pilot)
        await pilot.press("s", "home", "space", "escape")
        assert not isinstance(app.screen, PlansScreen)
        again = await finds(pilot)
        assert again is not screen
        assert again.board is screen.board
        assert len(again.board.pins) == 2
        assert again.board.sort == 1
        await pilot.press("q")
        assert not isinstance(app.screen, PlansScreen)


async def test_no_key_of_the_console_acts_from_there(tmp_path: Path) -> None:
    """There t, m, p and a are nothing; a letter that slips must not open what stops a job."""
    app = still(tmp_path)
    async with app.run_test(size=(120, 36)) as pilot:
        screen = await finds(pilot)
        for key in ("t", "m", "r", "p", "u", "a", "4", "z", "R", "tab"):
            await pilot.press(key)
            assert app.screen is screen, key
        assert not app.control.arming.left_s
        assert app.pane == "gpu"
        assert screen.scroll.display, "tab is the screen's own: pinned plans"


async def test_after_another_microbatch_plans_are_searched_anew(tmp_path: Path) -> None:
    app = still(tmp_path)
    async with app.run_test(size=(120, 36)) as pilot:
        first = await finds(pilot)
        await pilot.press("escape")
        assert app.searched is not None
        app.searched = app.searched.__class__(app.searched.job, 99, app.searched.now, app.searched.board)
        assert (await finds(pilot)).board is not first.board


async def test_without_a_job_it_says_what_compares(tmp_path: Path) -> None:
    app: RacksideApp = still(tmp_path, job=False)
    async with app.run_test(size=(120, 36), notifications=True) as pilot:
        await pilot.press("f")
        assert "rackside plans --model M --cluster C" in " ".join(n.message for n in app._notifications)
        assert not isinstance(app.screen, PlansScreen)


async def test_ctrl_q_leaves_the_console_from_there(tmp_path: Path) -> None:
    app = still(tmp_path)
    async with app.run_test(size=(120, 36)) as pilot:
        await finds(pilot)
        await pilot.press("ctrl+q")
        await until(lambda: not app.is_running, 20)
