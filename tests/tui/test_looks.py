"""The look of a console: chosen, kept, found again; nothing in the file keeps a console from opening."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.widgets import Input

from tests.parts.still import still
from tui import looks, options
from tui.cli import main
from tui.looks import Look
from tui.plans_app import PlansApp


async def test_what_was_chosen_is_there_again(tmp_path: Path) -> None:
    first = still(tmp_path)
    async with first.run_test(size=(120, 36)) as pilot:
        await pilot.press("c", "c", "minus", "n", "v", "4")
        first.theme = "textual-light"
    looks.keep(tmp_path / "state" / "look.json", first.look)
    found = looks.load(tmp_path / "state" / "look.json")
    assert found == Look("textual-light", "alarms", "clock", 1, links_of_all=True, links_matrix=True)
    again = still(tmp_path, look=found)
    async with again.run_test(size=(120, 36)):
        assert again.look == found
        assert again.alarm_list.has_focus


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"zoom": "far"}', b"\xff\xfe", b'{"theme": 7}'])
def test_a_damaged_file_is_no_look(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "look.json"
    path.write_bytes(damage)
    assert looks.load(path) == Look()


async def test_what_this_version_does_not_know_is_passed_over(tmp_path: Path) -> None:
    app = still(tmp_path, look=Look("neon", "weather", "humour", 17))
    async with app.run_test(size=(120, 36)):
        assert app.look == Look()


def test_where_nothing_can_be_written_nothing_is_raised(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    looks.keep(tmp_path / "file" / "look.json", Look())
    assert (tmp_path / "file").read_text() == ""


async def test_every_theme_of_the_command_line_is_one(tmp_path: Path) -> None:
    assert list(looks.THEMES) == options.THEMES
    for name in looks.THEMES.values():
        app = still(tmp_path, look=Look(theme=name))
        async with app.run_test(size=(80, 24)):
            assert app.theme == name


async def test_plans_without_a_node_look_as_the_console_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    looks.keep(looks.default_path(), Look(theme="textual-light"))
    seen = []
    monkeypatch.setattr(PlansApp, "run", lambda app: seen.append(app.theme))
    assert main(["plans", "--model", "llama3-8b", "--cluster", "h100x64-400g"]) == 0
    assert seen == ["textual-light"]


async def test_the_racks_take_another_theme_at_once(tmp_path: Path) -> None:
    app = still(tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        grounds = lambda: {s.style.bgcolor.name for s in app.racks.render_line(1) if s.style and s.style.bgcolor}  # noqa: E731
        assert grounds() == set(), "the terminal's own"
        app.theme = "textual-light"
        await pilot.pause()
        assert grounds() == {app.racks.rich_style.bgcolor.name}  # type: ignore[union-attr]


async def test_reduced_motion_has_no_blinking_cursor(tmp_path: Path) -> None:
    app = still(tmp_path, still=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("g")
        assert app.animation_level == "none"
        assert not app.screen.query_one(Input).cursor_blink
