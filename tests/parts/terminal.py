"""A real terminal: tmux with a program in it, keys sent, the screen read as text."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.parts.missing import program

RACKSIDE = (sys.executable, "-m", "tui.cli")


@dataclass
class Terminal:
    """One tmux server with one window; the shell in it stays when the program ends."""

    socket: Path
    width: int
    height: int
    environment: Mapping[str, str]

    def tmux(self, *arguments: str) -> str:
        command = [program("tmux"), "-S", str(self.socket), "-f", os.devnull, *arguments]
        # The environment as Python knows it: readline, under pytest, has put a fixed COLUMNS into the C library's.
        return subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True, env=dict(os.environ)
        ).stdout

    def open(self) -> None:
        set_ = [f"{k}={v}" for k, v in self.environment.items()]
        shell = ["env", *set_, "PS1=ready> ", "/bin/sh"]
        self.tmux("new-session", "-d", "-x", str(self.width), "-y", str(self.height), shlex.join(shell))
        self.tmux("set-option", "-g", "default-terminal", "tmux-256color")
        self.until("ready>")

    def type(self, line: str) -> None:
        self.tmux("send-keys", "-l", line)
        self.tmux("send-keys", "Enter")

    def keys(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def screen(self) -> str:
        return self.tmux("capture-pane", "-p")

    def coloured(self) -> str:
        """The screen with its escape sequences."""
        return self.tmux("capture-pane", "-p", "-e")

    def state(self, variable: str) -> str:
        """A tmux format variable, such as cursor_flag or alternate_on."""
        return self.tmux("display-message", "-p", f"#{{{variable}}}").strip()

    def resize(self, width: int, height: int) -> None:
        self.tmux("resize-window", "-x", str(width), "-y", str(height))

    def until(self, *texts: str, timeout_s: float = 60) -> str:
        """The screen, once every text stands on it."""
        return self.when(lambda shown: all(t in shown for t in texts), f"{texts}", timeout_s)

    def when(self, holds: Callable[[str], bool], what: str, timeout_s: float = 60) -> str:
        end = time.monotonic() + timeout_s
        while not holds(shown := self.screen()):
            if time.monotonic() > end:
                raise AssertionError(f"within {timeout_s} s the screen did not show {what}:\n{shown}")
            time.sleep(0.05)
        return shown

    def close(self) -> None:
        subprocess.run([program("tmux"), "-S", str(self.socket), "kill-server"], capture_output=True, timeout=30)


@pytest.fixture
def make_terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Open terminals of a size, with more environment; all are closed at the end."""
    program("tmux")
    opened: list[Terminal] = []

    def make(width: int = 80, height: int = 24, **environment: str) -> Terminal:
        base = {"XDG_STATE_HOME": str(tmp_path / "state"), "LC_ALL": "C.UTF-8"}
        terminal = Terminal(tmp_path / f"tmux{len(opened)}", width, height, base | environment)
        opened.append(terminal)
        terminal.open()
        return terminal

    yield make
    for terminal in opened:
        terminal.close()
