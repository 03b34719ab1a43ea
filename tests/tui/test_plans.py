"""The Plans screen without a node: a real search behind it, its keys, its pictures."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml
from textual.pilot import Pilot

from engine.control import planning
from engine.control.planning import Answer, Progress, Question
from engine.control.spaces import FRONT, TOP, asked
from engine.profile import catalog
from tests.parts.screen import text_of
from tests.parts.waiting import until
from tests.tui.test_snapshots import same_everywhere  # noqa: F401  # for every test here
from tui.board import COLUMNS, PINS
from tui.cli import main
from tui.plans_app import PlansApp
from tui.screens.export import ExportPanel
from tui.widgets.scatter import Point, scatter

Compare = Callable[..., bool]
QUESTION = Question("llama3-70b", ("h100x64-400g",), pareto=FRONT, top=TOP)


async def searched(app: PlansApp) -> None:
    await until(lambda: app.plans.board.found, 60, "the search has answered")


@asynccontextmanager
async def opened(size: tuple[int, int] = (100, 40), question: Question = QUESTION) -> AsyncIterator[Pilot[None]]:
    async with PlansApp(asked(question)).run_test(size=size, notifications=True) as pilot:
        await searched(app_of(pilot))
        await pilot.pause()
        yield pilot


def app_of(pilot: Pilot[None]) -> PlansApp:
    assert isinstance(pilot.app, PlansApp)
    return pilot.app


def pressing(*keys: str) -> Callable[[Pilot[None]], Awaitable[None]]:
    async def press(pilot: Pilot[None]) -> None:
        app = app_of(pilot)
        await searched(app)
        await pilot.pause()
        await pilot.press(*keys)
        await until(lambda: all(row in app.plans._seconds for row in app.plans.board.pins), 30, "pins are predicted")
        await pilot.pause()

    return press


@pytest.mark.parametrize("size", [(80, 24), (200, 60), (20, 5)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_plans(snap_compare: Compare, size: tuple[int, int]) -> None:
    keys = ("space", "j", "j", "space", "j")
    assert snap_compare(PlansApp(asked(QUESTION)), terminal_size=size, run_before=pressing(*keys))


def test_pinned_side_by_side(snap_compare: Compare) -> None:
    keys = ("space", "j", "j", "space", "tab")
    assert snap_compare(PlansApp(asked(QUESTION)), terminal_size=(80, 24), run_before=pressing(*keys))


def test_ascii_and_no_colours(snap_compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    keys = ("space", "j", "j", "space", "tab", "y")
    app = PlansApp(asked(QUESTION), plain=True)
    assert snap_compare(app, terminal_size=(160, 48), run_before=pressing(*keys))


async def test_s_and_figures_sort_and_the_cursor_stays_with_its_plan() -> None:
    async with opened() as pilot:
        board = app_of(pilot).plans.board
        chosen = board.cursor
        await pilot.press("s")
        joules = [r.metrics["tokens_per_joule"] for r in board.shown]
        assert joules == sorted(joules, reverse=True)
        assert board.cursor is chosen
        await pilot.press("S")
        assert [r.metrics["tokens_per_joule"] for r in board.shown] == joules[::-1]
        step = [c.metric for c in COLUMNS].index("iteration_s") + 1
        await pilot.press(str(step), "home")
        assert board.cursor is board.shown[0]
        assert board.cursor.metrics["iteration_s"] == min(r.metrics["iteration_s"] for r in board.rows)


async def test_a_click_on_a_heading_sorts_and_on_a_plan_goes_there() -> None:
    async with opened() as pilot:
        app = app_of(pilot)
        heading = app.plans.table.text.splitlines()[0]
        await pilot.click("#table", offset=(heading.index("free") + 2, 0))
        assert COLUMNS[app.plans.board.sort].head == "free"
        await pilot.press("home")
        await pilot.click("#table", offset=(10, 3))
        assert app.plans.board.at == 2


async def test_slash_filters_by_all_words_and_escape_clears() -> None:
    async with opened() as pilot:
        app = app_of(pilot)
        await pilot.press("slash", *"tp4 mb2", "enter")
        assert 0 < len(app.plans.board.shown) < len(app.plans.board.rows)
        assert all("TP4" in r.label and "mb2" in r.label for r in app.plans.board.shown)
        assert app.focused is app.plans.table
        await pilot.press("slash", *"nothing")
        assert "No plan's name holds these words." in text_of(app, "#table")
        await pilot.press("escape")
        assert len(app.plans.board.shown) == len(app.plans.board.rows)


async def test_pins_have_letters_and_an_end() -> None:
    async with opened() as pilot:
        app = app_of(pilot)
        await pilot.press("space", *["j", "space"] * len(PINS))
        assert len(app.plans.board.pins) == len(PINS)
        assert "no more stand side by side" in " ".join(n.message for n in app._notifications)
        await pilot.press("home", "space")
        assert len(app.plans.board.pins) == len(PINS) - 1


async def test_the_parts_of_a_pinned_plan_are_its_step() -> None:
    async with opened() as pilot:
        app = app_of(pilot)
        await pilot.press("space", "tab")
        row = app.plans.board.cursor
        assert row is not None
        await until(lambda: row in app.plans._seconds, 20)
        assert sum(app.plans._seconds[row]) == pytest.approx(row.metrics["iteration_s"], rel=1e-3)
        await until(lambda: "matrix products" in text_of(app, "#pins"), 20)


def written(folder: Path) -> list[tuple[str, str]]:
    return [(path.name, path.read_text()) for path in folder.iterdir()]


@pytest.mark.parametrize(
    ("downs", "read"), [(0, yaml.safe_load), (1, str), (2, yaml.safe_load), (3, str), (4, json.loads)]
)
async def test_e_writes_each_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, downs: int, read: Callable[[str], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    async with opened() as pilot:
        await pilot.press("e", *["down"] * downs, "enter")
        await pilot.pause()
        told = " ".join(n.message for n in pilot.app._notifications)
    ((name, text),) = written(tmp_path)
    assert read(text)
    assert f"written to {name}" in told


async def test_a_file_that_exists_is_never_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").write_text("mine")
    async with opened() as pilot:
        await pilot.press("e")
        panel = pilot.app.screen
        assert isinstance(panel, ExportPanel)
        panel.file.value = "x"
        await pilot.press("enter")
        assert "x exists; choose another name." in text_of(pilot.app, "#panel-body")
        panel.file.value = "x/y"
        await pilot.press("enter")
        assert "cannot be written" in text_of(pilot.app, "#panel-body")
        assert (tmp_path / "x").read_text() == "mine"


async def test_escape_stops_the_search_and_keeps_what_it_found() -> None:
    """The search goes on only when the test lets it: nothing depends on how fast it is."""
    told, go_on = threading.Event(), threading.Event()

    def find(question: Question, progress: Progress | None) -> list[Answer]:
        def slow(cluster: str, tried: int, seconds: float, done: float) -> None:
            assert progress is not None
            progress(cluster, tried, seconds, done)
            told.set()
            go_on.wait(30)
            progress(cluster, tried, seconds, done)

        return planning.plans(question, slow)

    app = PlansApp(asked(QUESTION, find=find))
    async with app.run_test() as pilot:
        await until(told.is_set, 30)
        await until(lambda: "searching" in text_of(app, "#head"), 20)
        await pilot.press("escape")
        go_on.set()
        await until(lambda: app.plans.board.found, 30)
        assert app.plans.board.found is not None
        assert not app.plans.board.found.complete
        assert app.plans.board.rows
        await until(lambda: "stopped at" in text_of(app, "#head"), 20)


async def test_a_plan_given_stands_pinned_beside_them() -> None:
    plan = catalog.plan("compute-bound")
    app = PlansApp(asked(QUESTION, plan))
    async with app.run_test(size=(120, 36)):
        await searched(app)
        assert [r.label.startswith("compute-bound: TP") for r in app.plans.board.pins] == [True]
        assert app.plans.board.pins[0] in app.plans.board.rows


async def test_nothing_left_says_what_emptied_the_space() -> None:
    question = Question("llama3-70b", ("h100x64-400g",), where=("temperature_c<20",), pareto=FRONT)
    async with opened(question=question) as pilot:
        await until(lambda: "none after it" in text_of(pilot.app, "#table"), 20)
        await pilot.press("space", "e", "s", "tab", "y", "j")


async def test_help_and_quit() -> None:
    async with opened() as pilot:
        await pilot.press("question_mark")
        assert "pin the plan" in text_of(pilot.app, "#panel-body")
        await pilot.press("escape", "q")
        await until(lambda: not pilot.app.is_running, 20)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--model", "nothing"], "There is no model named 'nothing'"),
        (["--cluster", "nothing"], "nothing"),
        (["--plan", "nothing"], "nothing"),
        (["--where", "speed<3"], "There is no 'speed' to constrain"),
    ],
)
def test_mistakes_are_sentences(more: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plans", "--model", "llama3-70b", "--cluster", "h100x64", *more]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("size", [(24, 6), (40, 9), (80, 11), (150, 40)], ids=str)
def test_a_plot_fits_its_frame(size: tuple[int, int], plain: bool) -> None:
    points = [Point(x * 1e4, 1.2 - x / 10, "front" if x % 2 else "other") for x in range(9)]
    lines = scatter([*points, Point(0.0, 0.0, "cursor")], "tokens/s", "tokens/J", *size, plain=plain).plain.split("\n")
    assert len(lines) <= size[1]
    assert max(map(len, lines)) <= size[0]
    assert not plain or "".join(lines).isascii()


def test_one_point_or_none_is_no_error() -> None:
    assert "X" in scatter([Point(1.0, 1.0, "cursor")], "x", "y", 40, 10, plain=True).plain
    assert scatter([], "x", "y", 40, 10).plain == "No plan to plot."
