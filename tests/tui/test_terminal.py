"""The demo in a real terminal: keys pressed, the screen read, the terminal clean afterwards."""

from __future__ import annotations

import json
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.act.alarm import Event, Priority, What
from engine.act.alarmlog import AlarmLog
from tests.parts.missing import program
from tests.parts.sshd import Sshd
from tests.parts.terminal import RACKSIDE, Terminal

MakeTerminal = Callable[..., Terminal]
ROOT = Path(__file__).parents[2]
DEMO = shlex.join([*RACKSIDE, "demo"])


def step_of(shown: str) -> int:
    found = re.search(r"step (\d+)", shown)
    return int(found[1]) if found else -1


def test_the_whole_loop_in_a_terminal(make_terminal: MakeTerminal, tmp_path: Path) -> None:
    """See, predict, act, verify, take back: throttle a node, halve the microbatch, leave."""
    t = make_terminal(100, 30)
    t.type(DEMO)
    t.until("READ-ONLY", "4/4 nodes", "32 GPUs", "llama3-8b-demo", "tok/s")
    t.when(lambda shown: step_of(shown) >= 1, "a step of the job")

    t.keys("t")
    t.until("Power limit of n04 GPU 0 to 600 W", "Predicted, once settled", "step time", "a arms this console")
    t.keys("a", "Down")
    t.until("Power limit of n04 to 600 W", "enter confirms")
    t.keys("Enter")
    t.until("Power limit of n04 to 600 W - done", "ARMED")
    t.until("limit 600 W")

    t.keys("m")
    t.until("Microbatch of llama3-8b-demo from 2 to 1", "32 ranks at one step")
    t.keys("Enter")
    t.until("This touches 4 nodes")
    t.keys("y")
    t.until("from 2 to 1 - done at step", "microbatch 1 x 8")

    t.keys("u")
    t.until("Undo: Microbatch of llama3-8b-demo from 2 to 1", "enter confirms")
    t.keys("Enter")
    t.until("This touches 4 nodes")
    t.keys("y")
    t.until("microbatch 2 x 4")

    t.keys("q")
    t.until("holds down the power limit of 8 GPUs")
    t.keys("y")
    t.until("ready>")
    assert (t.state("alternate_on"), t.state("cursor_flag"), t.state("mouse_any_flag")) == ("0", "1", "0")
    assert "Traceback" not in t.screen()

    log = [json.loads(line) for line in (tmp_path / "state/rackside/audit.jsonl").read_text().splitlines()]
    assert [(e["action"], e["stage"]) for e in log if e["stage"] in ("done", "undone", "failed", "unknown")] == [
        ("throttle", "done"),
        ("microbatch", "done"),
        ("microbatch", "done"),
        ("microbatch", "undone"),
    ]


@pytest.mark.parametrize("fixed", [{}, {"COLUMNS": "80", "LINES": "24"}], ids=["plain", "exported size"])
def test_any_size_and_a_resize_on_the_way(make_terminal: MakeTerminal, fixed: dict[str, str]) -> None:
    t = make_terminal(80, 24, **fixed)
    t.type(DEMO)
    t.until("4/4 nodes", "n04 GPU 0", "q Quit")
    for width, height, texts in (
        (20, 5, ["RO 4/4", "n04"]),
        (200, 60, ["Links of n04", "Plans for llama3-8b-demo", "Alarms", "q Quit"]),
        (40, 12, ["RO 4/4", "n04"]),
        (80, 24, ["READ-ONLY", "n04 GPU 0", "q Quit"]),
    ):
        t.resize(width, height)
        t.until(*texts)
    t.keys("q")
    t.until("ready>")
    assert t.state("alternate_on") == "0"


def test_over_ssh_in_tmux(make_terminal: MakeTerminal, make_sshd: Callable[..., Sshd], tmp_path: Path) -> None:
    """As operators reach it: tmux here, OpenSSH in between, the console there; a resize crosses as well."""
    server = make_sshd()
    t = make_terminal(80, 24)
    login = [program("ssh"), "-F", "none", "-tt", "-o", f"UserKnownHostsFile={server.known_hosts}"]
    login += ["-i", str(server.identity), "-p", str(server.port), f"{server.user}@127.0.0.1"]
    # A login has an environment of its own: without this it would take the look that this user last left.
    there = f"LC_ALL=C.UTF-8 XDG_STATE_HOME={shlex.quote(str(tmp_path / 'there'))}"
    t.type(shlex.join([*login, f"cd {shlex.quote(str(ROOT))} && {there} {DEMO}"]))
    t.until("READ-ONLY", "4/4 nodes", "n04 GPU 0", "q Quit")
    t.resize(160, 45)
    t.until("Links of n04", "Plans for llama3-8b-demo")
    t.keys("q")
    t.until("ready>", "closed")
    assert (t.state("alternate_on"), t.state("cursor_flag"), t.state("mouse_any_flag")) == ("0", "1", "0")


def test_a_demo_is_a_new_rack(make_terminal: MakeTerminal, tmp_path: Path) -> None:
    """What stands on a rack of the same name is not the demo's, and the demo's alarms are not that rack's."""
    log = tmp_path / "state/rackside/alarms.jsonl"
    log.parent.mkdir(parents=True)
    standing = Event(time.time(), "heat:n03:5", What.RAISED, Priority.CRITICAL, "n03 GPU 5 is hot", "n03")
    AlarmLog(log, "h200x32-400g").write(standing)
    before = log.read_bytes()
    t = make_terminal(80, 24)
    t.type(DEMO)
    t.until("4/4 nodes", "tok/s")
    t.keys("4")
    shown = t.until("Alarms", "4/4 nodes")
    assert "n03 GPU 5 is hot" not in shown
    t.until("n04 GPU 5 reaches")  # the clogged heatsink's own
    t.keys("q")
    t.until("ready>")
    assert log.read_bytes() == before


def test_a_walk_through_the_whole_console(make_terminal: MakeTerminal, tmp_path: Path) -> None:
    """Every pane, every way of looking, and what is kept for the next time."""
    t = make_terminal(100, 30)
    t.type(f"cd {shlex.quote(str(tmp_path))}")  # where a recording goes
    t.type(f"{DEMO} --theme light")
    t.until("4/4 nodes", "tok/s", "n04 GPU 0")
    t.keys("x")
    t.until("[", "to slowdown", "limit 87 C")
    for keys, texts in (
        ("2", ["Links of n04", "GB/s each way"]),
        ("v", ["share of peak", "ports"]),
        ("n", ["Links, share of peak"]),
        ("v", ["Links, GB/s each way"]),
        ("3", ["Plans for llama3-8b-demo", "tok/s"]),
        ("4", ["Alarms", "None in this session"]),
        ("5", ["measured"]),
        ("6", ["Log of actions", "Nothing was done here yet"]),
        ("Tab", ["n04 GPU"]),
        ("?", ["What every console, command and guard did"]),
    ):
        t.keys(keys)
        t.until(*texts)
    t.keys("q")
    t.until("q Quit")
    for title in ("Power", "SM clock", "Utilisation", "Memory", "Settles at", "Limit in", "Throttle", "Temperature"):
        t.keys("c")
        t.when(lambda shown, title=title: title in shown.splitlines()[1][:24], title)  # type: ignore[misc]
    t.keys("-")
    t.when(lambda shown: "* n04" not in shown, "a character a GPU")
    t.keys("+")
    t.until("* n04")
    t.keys("g")
    t.until("n03 or n03:5")
    t.type("n02:3")
    t.until("n02 GPU 3")
    t.keys("2")
    t.until("GB/s each way")
    t.keys("/")
    t.until("nothing shows all")
    t.type("mlx5_1")
    t.until("  /mlx5_1", "READ-ONLY")
    t.keys("y")
    t.until("in the clipboard")
    t.keys("R")
    t.until("REC ")
    t.keys("R")
    t.when(lambda shown: "REC " not in shown, "that it records no more")
    assert len(list(tmp_path.glob("*.rks"))) == 1
    t.keys("C-p")
    t.until("Search for commands")
    t.keys("Escape")
    t.when(lambda shown: "Search for commands" not in shown, "no palette")
    t.keys("6")
    t.until("Log of actions")
    t.keys("q")
    t.until("ready>")
    assert "Traceback" not in t.screen()
    t.type(DEMO)
    t.until("Log of actions", "4/4 nodes")
    kept = json.loads((tmp_path / "state/rackside/look.json").read_text())
    assert (kept["pane"], kept["theme"]) == ("log", "textual-light")
    t.keys("q")
    t.until("ready>")


def colours(shown: str) -> set[str]:
    """The kinds of colour in a captured screen: true, 256 or basic."""
    found = set()
    for codes in re.findall(r"\x1b\[([0-9;]*)m", shown):
        found |= {"true"} if re.search(r"[34]8;2;", codes) else set()
        found |= {"256"} if re.search(r"[34]8;5;", codes) else set()
        found |= {"basic"} if re.search(r"(^|;)(3[0-7]|4[0-7]|9[0-7]|10[0-7])(;|$)", codes) else set()
    return found


def test_no_color_shows_figures_without_colour(make_terminal: MakeTerminal) -> None:
    t = make_terminal(80, 24, NO_COLOR="1")
    t.type(DEMO)
    t.until("4/4 nodes", "32 GPUs", "n04 GPU 0")
    shown = t.coloured()
    greys = re.findall(r"[34]8;2;(\d+);(\d+);(\d+)", shown)
    assert all(len(set(rgb)) == 1 for rgb in greys), "nothing but greys"
    palette = {int(n) for n in re.findall(r"[34]8;5;(\d+)", shown)}
    assert all(n >= 232 or n in {0, 7, 8, 15, 16, 231} for n in palette), "of 256 colours only its greys"
    assert "basic" not in colours(shown)


def test_sixteen_colours_are_enough(make_terminal: MakeTerminal) -> None:
    t = make_terminal(80, 24, TERM="xterm-color", COLORTERM="")
    t.type(DEMO)
    t.until("4/4 nodes", "32 GPUs", "n04 GPU 0")
    assert colours(t.coloured()) == {"basic"}


def test_plain_ascii(make_terminal: MakeTerminal) -> None:
    t = make_terminal(80, 24)
    t.type(f"{DEMO} --ascii")
    shown = t.until("4/4 nodes", "n04 GPU 0", "llama3-8b-demo")
    assert shown.isascii(), [c for c in shown if not c.isascii()]


@pytest.mark.parametrize("keys", [("C-c",), ("C-q",)])
def test_other_ways_out_leave_a_clean_terminal_too(make_terminal: MakeTerminal, keys: tuple[str, ...]) -> None:
    t = make_terminal()
    t.type(DEMO)
    t.until("4/4 nodes")
    t.keys(*keys)
    t.until("ready>")
    assert (t.state("alternate_on"), t.state("cursor_flag"), t.state("mouse_any_flag")) == ("0", "1", "0")


def test_keys_faster_than_screens_open(make_terminal: MakeTerminal) -> None:
    """A pasted line reaches the console as keys, all at once: panels open, close and act before they are drawn."""
    t = make_terminal()
    t.type(DEMO)
    t.until("4/4 nodes", "tok/s")
    storm = "tmrtu?a1t2mu3rm4cxsn hjkl t?l t\x1b" * 12
    t.tmux("send-keys", "-l", storm)
    t.keys("Escape")
    t.keys("Escape")
    t.until("4/4 nodes")
    t.keys("1", "x")
    t.until("to slowdown", "q Quit")
    assert "Traceback" not in t.screen()


def test_leaving_while_a_panel_opens(make_terminal: MakeTerminal) -> None:
    t = make_terminal()
    t.type(DEMO)
    t.until("4/4 nodes", "tok/s")
    t.tmux("send-keys", "-l", "qtqm?")
    t.until("ready>")
    assert "Error" not in t.screen()
    assert "NoMatches" not in t.screen()


def test_suspended_and_taken_up_again(make_terminal: MakeTerminal) -> None:
    t = make_terminal()
    t.type("set -m")
    t.type(DEMO)
    t.until("4/4 nodes", "tok/s")
    t.keys("C-z")
    t.when(lambda _: t.state("alternate_on") == "0", "the shell's own screen")
    t.type("fg")
    t.when(lambda shown: t.state("alternate_on") == "1" and "4/4 nodes" in shown, "the console again")
    t.keys("q")
    t.until("ready>")
