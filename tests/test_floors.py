"""The floors of the house, and a start that loads nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_imports_go_one_way() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_version_and_help_load_nothing_heavy(option: str) -> None:
    code = (
        "import sys; from tui.cli import main\n"
        f"try: main(['{option}'])\nexcept SystemExit: pass\n"
        "print(sorted({'numpy', 'textual', 'rich', 'asyncssh', 'asyncio', 'yaml', 'msgspec'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["console"], "the following arguments are required: --cluster"),
        (["console", "--cluster", "h200x33"], "h200x32"),
        (["console", "--cluster", "h200x32"], "no address"),
        (["demo", "--seconds", "-1"], "seconds must be between 0.001 and 86400"),
        (["demo", "--headless", "--cluster", "mi250x32"], "does not have"),
        (["demo", "--headless", "--plan", "nothing"], "nothing"),
        (["profiles", "cluster", "/nonexistent.yaml"], "/nonexistent.yaml"),
        (["nonsense"], "invalid choice: 'nonsense'"),
    ],
)
def test_what_a_user_gets_wrong_is_a_sentence(arguments: list[str], says: str) -> None:
    command = [sys.executable, "-m", "tui.cli", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_not_known_yet_is_no_figure_and_no_library_complains() -> None:
    command = [sys.executable, "-m", "tui.cli", "demo", "--headless", "--seconds", "0.001"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, ""), "no node answered in a millisecond"
    assert "no temperature yet" in done.stdout
    assert "nan" not in done.stdout
