"""Every key, pressed: on a real node behind sshd with a real job behind its hook."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.act.action import Stage
from tests.parts.jobs import attached, training
from tests.parts.nvml import FakeNvml
from tests.parts.opened import opened
from tests.parts.screen import racks, text_of
from tests.parts.waiting import until
from tui.actions import ACTIONS
from tui.app import PANES, RacksideApp
from tui.metrics import METRICS
from tui.screens.act import ActPanel
from tui.screens.help import HelpScreen
from tui.screens.leave import LeaveScreen
from tui.widgets.elevation import Elevation

pytestmark = pytest.mark.usefixtures("quick_retries")


async def test_t_throttles_after_arming_and_u_takes_it_back(inventory: Path, nvml: FakeNvml) -> None:
    async with opened(inventory) as c:
        await c.live()
        await c.press("t")
        assert isinstance(c.app.screen, ActPanel)
        await c.shows("Power limit of n1 GPU 0 to 600 W", "#panel-body")
        await c.shows("READ-ONLY: a arms", "#panel-body")
        await c.press("enter")
        assert isinstance(c.app.screen, ActPanel), "enter sends nothing while read-only"
        await c.press("a", "left", "down")
        await c.shows("Power limit of n1 to 550 W", "#panel-body")
        await c.shows("8 GPUs on 1 node", "#panel-body")
        await c.press("enter")
        await c.ended(Stage.DONE)
        assert nvml.limits() == dict.fromkeys(range(8), 550000)
        await c.shows("done", "#action")
        await c.press("u")
        await c.shows("Undo: Power limit of n1 to 550 W", "#panel-body")
        await c.press("enter")
        await c.ended(Stage.DONE)
        assert nvml.limits() == dict.fromkeys(range(8), 700000)
        await c.press("u")
        assert "Nothing of this session is in force" in c.said()


async def test_the_panels_value_moves_both_ways_and_stops_at_the_ends(inventory: Path) -> None:
    async with opened(inventory) as c:
        await c.live()
        await c.press("t", *["l"] * 4)
        await c.shows("already as high as the board allows", "#panel-body")
        await c.press(*["l"] * 9)
        await c.shows("SM clock of n1 GPU 0", "#panel-body")
        await c.press(*["h"] * 15, *["j"] * 5)
        await c.shows("Power limit of rack r1 to 500 W", "#panel-body")
        await c.press("k", "k", "k", "escape")
        assert not isinstance(c.app.screen, ActPanel)
        assert c.app.control.tickets == ()


async def test_m_halves_the_microbatch(inventory: Path, hooks: Path) -> None:
    async with training("train_light", hooks, steps=100000, step_s=0.02), opened(inventory) as c:
        await c.job()
        await c.acts("m", "Microbatch of job from 4 to 2")
        await until(lambda: "microbatch 2 x 8" in text_of(c.app, "#job"))
        await c.shows("at step", "#action")


async def test_p_pauses_the_job_and_resumes_it(inventory: Path, hooks: Path) -> None:
    async with training("train_light", hooks, steps=100000, step_s=0.02), opened(inventory) as c:
        await c.job()
        await c.acts("p", "Pause job for 60 s")
        paused = lambda: c.app.control.jobs.current.paused_until is not None  # type: ignore[union-attr]  # noqa: E731
        await until(paused)
        await c.shows("paused", "#job")
        await c.press("p")
        await c.shows("Resume job", "#panel-body")
        await c.press("enter")
        await until(lambda: not paused())


async def test_a_job_that_another_holds_is_taken_with_a_reason(inventory: Path, hooks: Path) -> None:
    async with (
        training("train_light", hooks, steps=100000, step_s=0.02) as job,
        attached(job.socket, "ann@desk") as ann,
        opened(inventory) as c,
    ):
        await c.job()
        assert (await ann.does("first", "microbatch", microbatch=2)).state == "applied"
        await until(lambda: c.app.control.jobs.current.holder == "ann@desk")  # type: ignore[union-attr]
        await c.press("a", "m")
        await c.shows("ann@desk holds job since", "#panel-body")
        await c.press("enter")
        assert isinstance(c.app.screen, ActPanel), "enter sends nothing while another holds the job"
        await c.press("S", *"asleep", "enter")
        await c.shows("enter confirms", "#panel-body")
        await c.press("enter")
        await c.ended(Stage.DONE)
        assert c.app.control.tickets[-1].steal == "asleep"


async def test_r_moves_work_off_the_hot_gpu(inventory: Path, hooks: Path, nvml: FakeNvml) -> None:
    nvml.write(8, gpu0_temperature=86, gpu1_temperature=50)
    async with training("train_light", hooks, steps=100000, step_s=0.02), opened(inventory) as c:
        await c.job()
        await c.acts("r", "Move 1 microbatch of job from hot to cold ranks")
        await until(lambda: "microbatch 4 x 3-5" in text_of(c.app, "#job"))


async def test_m_and_r_without_a_job_say_so(inventory: Path) -> None:
    async with opened(inventory) as c:
        await c.live()
        await c.press("m", "r", "s")
        assert "There is no job to act on" in c.said()
        assert "There is no other job" in c.said()
        assert not isinstance(c.app.screen, ActPanel)


async def test_s_selects_the_next_job(inventory: Path, hooks: Path) -> None:
    async with (
        training("train_light", hooks, name="one", steps=100000, step_s=0.02),
        training("train_light", hooks, name="two", steps=100000, step_s=0.02),
        opened(inventory) as c,
    ):
        await until(lambda: sum(s.attached for s in c.app.control.jobs.statuses.values()) == 2, 60)
        await until(lambda: "(+1, s)" in text_of(c.app, "#job"))
        before = text_of(c.app, "#job").split()[0]
        await c.press("s")
        assert {before, text_of(c.app, "#job").split()[0]} == {"one", "two"}


async def test_a_arms_for_a_stated_time_and_ends_it(inventory: Path) -> None:
    async with opened(inventory) as c:
        assert text_of(c.app, "#site").startswith("READ-ONLY")
        await c.press("a")
        assert text_of(c.app, "#site").startswith(("ARMED 300 s", "ARMED 299 s"))
        await c.press("a")
        assert text_of(c.app, "#site").startswith("READ-ONLY")


async def test_a_read_only_console_stays_read_only(inventory: Path) -> None:
    async with opened(inventory, read_only=True) as c:
        await c.live()
        await c.press("a")
        assert "started with --read-only" in c.said()
        await c.press("t", "a")
        await c.shows("started with --read-only", "#panel-body")
        await c.press("enter")
        assert c.app.control.tickets == ()


async def test_panes_by_number_and_tab(inventory: Path) -> None:
    async with opened(inventory) as c:
        await c.live()
        for key, name in zip("23451", ("links", "plans", "alarms", "jobs", "gpu"), strict=True):
            await c.press(key)
            assert [p for p in PANES if c.app.query_one(f"#pane-{p}").display] == [name]
        await c.press("tab", "tab")
        assert c.app.pane == "links"
        await c.shows("GPU 0 nvlink", "#body-links")
        await c.press("n")
        assert text_of(c.app, "#body-links").startswith("Links, GB/s each way")
        await c.press("n")
        assert text_of(c.app, "#body-links").startswith("Links of n1")


async def test_v_shows_links_as_a_matrix_and_back(inventory: Path) -> None:
    async with opened(inventory) as c:
        await c.live()
        assert c.app.links.text == "", "what nobody sees is not drawn"
        await c.press("v")
        assert c.app.pane == "links"
        await c.shows("GPU 0", "#body-links")
        assert text_of(c.app, "#body-links").startswith("Links of n1, share of peak")
        await c.press("n")
        assert text_of(c.app, "#body-links").startswith("Links, share of peak")
        await c.press("n", "v")
        await c.shows("GPU 0 nvlink", "#body-links")


async def test_c_goes_round_the_metrics(inventory: Path) -> None:
    async with opened(inventory) as c:
        await c.live()
        seen = []
        for _ in METRICS:
            seen.append(text_of(c.app, "#legend").split("  ")[0].rsplit(" ", 1)[0])
            await c.press("c")
        assert len(set(seen)) == len(METRICS)
        assert c.app.query_one(Elevation).metric is METRICS[0]
        assert " 61 " in racks(c.app)


async def test_the_cursor_goes_everywhere_and_x_finds_the_hottest(inventory: Path, nvml: FakeNvml) -> None:
    nvml.write(8, gpu6_temperature=77)
    async with opened(inventory) as c:
        await c.live()
        await until(lambda: "77" in racks(c.app))
        cursor = lambda: c.app.query_one(Elevation).cursor  # noqa: E731
        for key, slot in (("right", 1), ("l", 2), ("down", 6), ("j", 6), ("left", 5), ("h", 4), ("up", 0), ("k", 0)):
            await c.press(key)
            assert cursor() == (0, slot), key
        await c.press("end")
        assert cursor() == (0, 7)
        await c.press("home")
        assert cursor() == (0, 0)
        await c.press("x")
        assert cursor() == (0, 6)
        await c.shows("n1 GPU 6", "#body-gpu")
        assert "[ 77]" in racks(c.app)


async def test_plus_and_minus_zoom(inventory: Path, nvml: FakeNvml) -> None:
    nvml.write(8, gpu6_temperature=77)
    async with opened(inventory) as c:
        await c.live()
        await until(lambda: "77" in racks(c.app))
        await c.press("minus")
        assert "66666676" in racks(c.app)
        await c.press("minus", "minus", "right")
        assert racks(c.app).split() == ["r1", "7"], "the node by its hottest GPU"
        await c.press("plus", "x", "plus", "plus")
        assert "[ 77]" in racks(c.app)


async def test_g_goes_to_a_gpu_by_name(inventory: Path) -> None:
    async with opened(inventory) as c:
        await c.live()
        await c.press("g", *"N9")
        await c.shows("No node is called so", "#panel-body")
        await c.press("enter", "backspace", *"1:5", "enter")
        assert c.app.query_one(Elevation).cursor == (0, 5)
        await c.press("g", "escape")
        assert c.app.query_one(Elevation).cursor == (0, 5)


async def test_the_jobs_pane_tells_how_it_steps_and_what_actions_would_do(
    inventory: Path, hooks: Path, nvml: FakeNvml
) -> None:
    nvml.write(8, gpu0_temperature=86, gpu1_temperature=50)
    async with training("train_light", hooks, steps=100000, step_s=0.02), opened(inventory) as c:
        await c.job()
        await c.press("5")
        await c.shows("microbatch  4 x 4 a rank, global batch 32", "#body-jobs")
        await c.shows("stragglers  none", "#body-jobs")
        await c.shows("r 1 a rank  0.", "#body-jobs")


async def test_y_copies_what_the_pane_shows(inventory: Path) -> None:
    async with opened(inventory) as c:
        await c.live()
        await c.press("2")
        await c.shows("GPU 0 nvlink", "#body-links")
        await c.press("y")
        assert "GPU 0 nvlink" in c.app.clipboard
        assert "in the clipboard" in c.said()


async def test_slash_limits_links_and_alarms(inventory: Path, nvml: FakeNvml) -> None:
    nvml.write(8, gpu6_temperature=88)
    async with opened(inventory) as c:
        await c.live()
        await until(lambda: c.app.control.alarms, 30)
        await c.press("2", "slash", *"gpu 3", "enter")
        await until(lambda: text_of(c.app, "#body-links").count("nvlink") == 1)
        assert "/gpu 3" in text_of(c.app, "#body-links")
        assert "None." in text_of(c.app, "#body-alarms")
        await c.press("slash", *["backspace"] * 5, "enter")
        await until(lambda: text_of(c.app, "#body-links").count("nvlink") == 8)
        await c.press("slash", *"nothing", "enter")
        await c.shows("No link here holds 'nothing'", "#body-links")
        await c.press("slash", "escape")
        assert c.app.wanted == "nothing"


async def test_a_click_puts_the_cursor(inventory: Path) -> None:
    async with opened(inventory) as c:
        await c.live()
        await c.pilot.click(Elevation, offset=(13, 3))
        assert c.app.query_one(Elevation).cursor == (0, 6)


async def test_help_lists_every_action_and_closes(inventory: Path) -> None:
    async with opened(inventory, size=(100, 50), keys={"throttle": "f5"}) as c:
        await c.press("question_mark")
        assert isinstance(c.app.screen, HelpScreen)
        shown = text_of(c.app, "#panel-body")
        assert all(a.help in shown for a in ACTIONS)
        assert "f5" in shown
        await c.press("escape")
        assert not isinstance(c.app.screen, HelpScreen)


async def test_own_keys_replace_ours(inventory: Path) -> None:
    async with opened(inventory, keys={"throttle": "f5"}) as c:
        await c.live()
        await c.press("t")
        assert not isinstance(c.app.screen, ActPanel)
        await c.press("f5")
        assert isinstance(c.app.screen, ActPanel)


async def test_the_palette_runs_every_action(inventory: Path) -> None:
    async with opened(inventory) as c:
        await c.live()
        names = {command.title for command in c.app.get_system_commands(c.app.screen)}
        assert {a.title for a in ACTIONS} <= names
        await c.press("ctrl+p", *"Throttle")
        await c.pilot.pause()
        await until(lambda: c.app.screen.query("OptionList"), 10)
        await c.press("enter")
        await until(lambda: isinstance(c.app.screen, ActPanel), 10)


@pytest.mark.parametrize("key", ["q", "ctrl+q", "ctrl+c"])
async def test_leaving_with_nothing_held_is_at_once(inventory: Path, key: str) -> None:
    async with opened(inventory) as c:
        await c.live()
        await c.press(key)
        assert c.app._exit


async def test_leaving_with_limits_held_asks_first_and_gives_them_back(inventory: Path, nvml: FakeNvml) -> None:
    async with opened(inventory) as c:
        await c.live()
        await c.press("a", "t", "enter")
        await c.ended(Stage.DONE)
        await c.press("q")
        assert isinstance(c.app.screen, LeaveScreen)
        await c.shows("holds down the power limit of 1 GPU.", "#panel-body")
        await c.press("escape")
        assert not isinstance(c.app.screen, LeaveScreen)
        await c.press("q", "y")
    await until(lambda: nvml.limits() == {0: 700000}, what="the limit given back")


@pytest.mark.parametrize("size", [(20, 5), (40, 10), (80, 24), (200, 60), (400, 100)])
async def test_any_size_shows_the_racks_and_the_state(inventory: Path, size: tuple[int, int]) -> None:
    async with opened(inventory, size=size) as c:
        await c.live()
        figures = lambda: "61" in racks(c.app) or "66666666" in racks(c.app)  # noqa: E731
        await until(figures)
        await c.pilot.resize_terminal(80, 24)
        await c.pilot.resize_terminal(*size)
        for key in ("t", "escape", "question_mark", "escape", "2", "3", "4"):
            await c.press(key)
        assert figures()


async def test_a_narrow_screen_names_what_the_cursor_is_on_while_nothing_is_wrong(
    inventory: Path, nvml: FakeNvml
) -> None:
    """Nodes as dots have no names, and no pane stands beside them."""
    nvml.write(8, gpu1_temperature=50)
    async with opened(inventory, size=(20, 5)) as c:
        await c.live()
        name = c.app.control.cluster.nodes[0].name
        await c.shows(f"{name} GPU 0 61 C  No alarms.", "#alarm")
        c.app.racks.cursor = (0, 1)
        await c.shows(f"{name} GPU 1 50 C  No alarms.", "#alarm")
        await c.pilot.resize_terminal(80, 24)
        await until(lambda: text_of(c.app, "#alarm") == "No alarms.", what="the pane beside the racks tells it")


async def test_ascii_mode_writes_ascii_alone(inventory: Path, nvml: FakeNvml) -> None:
    nvml.write(8, temperature="!3", gpu1_temperature=50)
    async with opened(inventory, size=(160, 50), plain=True) as c:
        await c.live()
        await until(lambda: "50" in racks(c.app))
        for pane in ("#site", "#job", "#legend", "#body-gpu", "#body-links", "#body-plans", "#body-alarms"):
            assert text_of(c.app, pane).isascii(), pane
        assert racks(c.app).isascii()


def test_every_action_has_a_method_and_one_key() -> None:
    keys = [a.keys for a in ACTIONS]
    assert len(set(keys)) == len(keys)
    assert all(hasattr(RacksideApp, f"action_{a.id}") for a in ACTIONS)
