"""The log of every session, as a pane: newest first, one told in full, a way to where it was done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.act.action import Outlook, Stage, Ticket
from engine.act.audit import Audit
from tests.parts.still import NOON, still
from tui.widgets.log import actions, place_of


def done(app: Any, id: str, at: float, node: str = "n02", operator: str = "night@desk") -> Ticket:
    """An action that another session logged."""
    number = [n.name for n in app.control.cluster.nodes].index(node)
    proposal = app.control.propose_throttle(f"{node} GPU 3", [(number, 3)], 100.0)
    measured = Outlook(2.7, 388_000.0, 77.0, 20_100.0)
    ticket = Ticket(id, at, operator, proposal, Stage.DONE, measured=measured)
    Audit(app.control.audit_path).write(app.control.cluster.name, ticket)
    return ticket


def rows(app: Any) -> list[str]:
    return str(app.log_list.text).splitlines()


async def test_other_sessions_entries_appear_while_the_console_is_open(tmp_path: Path) -> None:
    app = still(tmp_path)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("6")
        assert rows(app) == ["Log of actions", "Nothing was done here yet."]
        done(app, "first", NOON)
        done(app, "second", NOON + 5, node="n03")
        app.draw_lines()
        await pilot.pause()
        assert ["n03 GPU 3" in row or "n02 GPU 3" in row for row in rows(app)].count(True) == 2
        assert "n03 GPU 3" in rows(app)[1]
        assert "night@desk" in rows(app)[1]
        assert any(row.startswith("  measured   step 2.70 s, 388k tok/s, hottest 77 C") for row in rows(app))


def test_an_action_is_listed_once_with_its_stages() -> None:
    first: dict[str, Any] = {"id": "a", "time": 1.0, "stage": "pending", "at": 1.0}
    log = [first, {**first, "stage": "done", "at": 2.0}, {"id": "b", "time": 3.0, "stage": "done", "at": 3.5}]
    log += [{**log[1], "measured": {"step_s": 2.0}}, {**first, "stage": "undone", "at": 4.0}]
    one, two = actions(log)
    assert (one["id"], one["stage"], one["measured"]) == ("a", "undone", {"step_s": 2.0})
    assert one["stages"] == {"pending": 1.0, "done": 2.0, "undone": 4.0}
    assert (two["id"], two["stages"]) == ("b", {"done": 3.5})


async def test_enter_goes_to_the_gpu_and_a_filter_limits(tmp_path: Path) -> None:
    app = still(tmp_path)
    done(app, "first", NOON, node="n02")
    done(app, "second", NOON + 5, node="n03")
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("6", "j")
        assert app.log_list.chosen is not None
        assert app.log_list.chosen["id"] == "first"
        await pilot.press("enter")
        assert (app.racks.cursor, app.pane) == ((1, 3), "gpu")
        await pilot.press("6", "slash", *"n03", "enter")
        assert "n03 GPU 3" in rows(app)[1]
        assert not any("n02" in row for row in rows(app))
        await pilot.press("slash", *["backspace"] * 3, *"nothing such", "enter")
        assert rows(app)[1] == "No entry holds these words; / and enter show all."


async def test_the_cursor_stays_with_its_entry_while_others_come(tmp_path: Path) -> None:
    app = still(tmp_path)
    for n in range(40):
        done(app, f"a{n}", NOON + n)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("6", "pagedown", "down")
        assert app.log_list.chosen is not None
        assert app.log_list.chosen["id"] == "a28"
        done(app, "later", NOON + 100)
        app.draw_lines()
        assert app.log_list.chosen["id"] == "a28"
        await pilot.press("end")
        assert app.log_list.chosen["id"] == "a0"
        assert app.panes["log"].scroll_y > 0
        await pilot.press("home")
        assert app.log_list.chosen["id"] == "later"
        await pilot.press("escape")
        assert app.pane == "gpu"


async def test_whatever_stands_in_the_log_is_drawn(tmp_path: Path) -> None:
    """Another version's entries, or somebody's hand in the file."""
    app = still(tmp_path)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("6")
        odd: list[Any] = [{"time": "x", "predicted": 3, "measured": []}, {"asked": {"limits_w": {"n1": None}}}]
        app.log_list.show([{}, {"id": [], "stage": {}, "title": "odd"}, *odd, {"title": "\x1b]52;c;x\x07", "stage": 5}])
        assert app.log_list.text.count("None - ") == 3
        assert "\x1b" not in app.log_list.text


def test_the_place_of_an_entry() -> None:
    assert place_of({"asked": {"limits_w": {"n2": {"5": 600.0}}}}, ["n1", "n2"]) == (1, 5)
    assert place_of({"asked": {"pids": {"n2": [3]}}}, ["n1", "n2"]) == (1, 0)
    assert place_of({"asked": {"job": "x", "nodes": ["n1"]}}, ["n1", "n2"]) == (0, 0)
    assert place_of({"asked": {"job": "x"}}, ["n1", "n2"]) is None
