"""A user's own keys, validated by us: here keys act on live jobs, so a clash or a typo is refused, not swallowed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from textual.keys import Keys

from engine.profile import ProfileError, document
from tui.actions import actions

NAMED = {key.value for key in Keys} | {"question_mark", "space", "slash", "comma", "full_stop", "minus", "plus"}
RESERVED = {"enter", "escape", "ctrl+c", "ctrl+p", "ctrl+q", "up", "down", "left", "right", "home", "end", *"hjkl"}


def load_keys(path: str | None) -> dict[str, str]:
    """Read `action: key` pairs from a YAML file; ProfileError names what is wrong. No file: no changes."""
    if path is None:
        return {}
    data = document.load_plain(Path(path).expanduser())
    if not isinstance(data, dict):
        raise ProfileError(f"{path}: a key map is a list of 'action: key' lines.")
    return check({str(k): str(v) for k, v in data.items()}, path)


def check(keys: Mapping[str, str], label: str) -> dict[str, str]:
    """Refuse unknown actions, keys that no keyboard sends, reserved keys, and two actions on one key."""
    known = {a.id: a.keys for a in actions(replay=True)}
    for action, key in keys.items():
        if action not in known:
            close = difflib.get_close_matches(action, known, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"actions: {', '.join(known)}."
            raise ProfileError(f"{label}: there is no action '{action}'; {hint}")
        if key in RESERVED:
            raise ProfileError(f"{label}: {action}: the key '{key}' is reserved for moving and confirming.")
        if not _exists(key):
            raise ProfileError(f"{label}: {action}: there is no key '{key}'; write a letter, f5, ctrl+t or the like.")
    owner: dict[str, str] = {}
    for action, key in {**known, **keys}.items():
        if key in owner:
            raise ProfileError(f"{label}: the key '{key}' would do both {owner[key]} and {action}; move one of them.")
        owner[key] = action
    return dict(keys)


def _exists(key: str) -> bool:
    if len(key) == 1:
        return key.isprintable() and not key.isspace()
    last = key.rpartition("+")[2]
    return key in NAMED or (key.startswith(("ctrl+", "alt+", "shift+")) and (len(last) == 1 or last in NAMED))
