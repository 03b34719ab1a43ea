"""How a console looks, and that it looks so again: theme, pane, metric, zoom, kept from one session to the next."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import msgspec

THEMES = {"dark": "textual-dark", "light": "textual-light", "terminal": "ansi-dark", "terminal-light": "ansi-light"}
"""By the names that the command line has; the last two use the terminal's own sixteen colours. Textual's others can be
had from the palette."""


class Look(msgspec.Struct, frozen=True):
    """`metric` and `pane` by their names, `zoom` by its number or None for whatever fits; `theme` is Textual's name."""

    theme: str = THEMES["dark"]
    pane: str = "gpu"
    metric: str = "temperature"
    zoom: int | None = None
    links_of_all: bool = False
    links_matrix: bool = False


def default_path() -> Path:
    """$XDG_STATE_HOME/rackside/look.json, or the same under ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "rackside" / "look.json"


def load(path: Path) -> Look:
    """The look that was kept. A file that is missing, damaged or another version's is no reason not to open."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Look)
    except (OSError, msgspec.MsgspecError):
        return Look()


def keep(path: Path, look: Look) -> None:
    """Write it, whole or not at all. Where that is not possible, nothing is lost but the look."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        fresh.write_bytes(msgspec.json.encode(look))
        fresh.replace(path)
