"""What was done on this cluster, by whom, and what came of it: every session's actions, the newest first."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text
from textual.containers import VerticalScroll
from textual.geometry import Region

from engine.telemetry.text import clean
from tui.widgets.figures import clock, large, number
from tui.widgets.lines import STAGE_STYLE
from tui.widgets.listing import Listing

Entry = Mapping[str, Any]
LONGEST = 400


class Log(Listing):
    """Up and down move the cursor; what it stands on is told in full."""

    def __init__(self, id: str, plain: bool = False) -> None:
        super().__init__(id, plain)
        self._entries: list[Entry] = []
        self._wanted = ""
        self._key: object = None

    def show(self, entries: Sequence[Entry], wanted: str = "") -> None:
        """`entries` as the audit log has them, oldest first, a line for each change of an action; `wanted` limits the
        actions to those that hold these words."""
        self._wanted = wanted
        self._entries = [e for e in reversed(actions(entries)) if wanted.lower() in _words(e).lower()]
        self.fill(lambda w, _: self._text(max(20, w or 60)))

    @property
    def chosen(self) -> Entry | None:
        """What the cursor stands on: it stays there while others come; at the top it goes with the newest."""
        return next((e for e in self._entries if e.get("id") == self._key), next(iter(self._entries), None))

    def action_move(self, by: int) -> None:
        chosen = self.chosen
        if chosen is not None:
            at = max(0, min(len(self._entries) - 1, self._entries.index(chosen) + by))
            self._key = self._entries[at].get("id") if at else None
            self.refill()
            if isinstance(self.parent, VerticalScroll):
                self.parent.scroll_to_region(Region(0, at, 1, 2 + len(_story(self._entries[at]))), animate=False)

    def _text(self, width: int) -> Text:
        text, chosen = Text(), self.chosen if self.has_focus else None
        text.append("Log of actions", "bold")
        text.append(f"  /{self._wanted}" if self._wanted else "", "bold cyan")
        text.append("  enter goes there" if chosen is not None else "", "dim")
        text.append("\n")
        for entry in self._entries:
            style = _style(entry)
            line = Text(f"{_when(entry)} {_words(entry)}", f"{style} reverse" if entry is chosen else style)
            line.truncate(width, overflow="ellipsis")
            text.append_text(line)
            text.append("\n")
            if entry is chosen:
                for told in _story(entry):
                    text.append(f"  {clean(told)}\n", "dim")
        if not self._entries:
            said = "No entry holds these words; / and enter show all." if self._wanted else "Nothing was done here yet."
            text.append(f"{said}\n", "dim")
        return text


def actions(entries: Sequence[Entry]) -> list[Entry]:
    """Each action once, in the order in which they were confirmed: as it stands now, with what was measured of it and,
    as `stages`, when it came to which."""
    found: dict[str, dict[str, Any]] = {}
    for place, entry in enumerate(entries):
        known = found.get(key := str(entry.get("id", place)), {})
        stages = {**known.get("stages", {}), str(entry.get("stage")): entry.get("at")}
        found[key] = {**entry, "measured": entry.get("measured") or known.get("measured"), "stages": stages}
    return list(found.values())


def _when(entry: Entry) -> str:
    """The day, too: a log reaches back over nights."""
    return time.strftime("%m-%d %H:%M:%S", time.localtime(_float(entry.get("time")) or 0))


def _style(entry: Entry) -> str:
    return next((style for stage, style in STAGE_STYLE.items() if stage.value == entry.get("stage")), "")


def _words(entry: Entry) -> str:
    """One line: what, how far, who, why."""
    reason = entry.get("reason")
    said = f"{entry.get('title')} - {entry.get('stage')}, {entry.get('operator')}{f': {reason}' if reason else ''}"
    return clean(said, LONGEST)


def _story(entry: Entry) -> list[str]:
    """What was expected of it, and what came."""
    told = [f"id {entry.get('id')}" + (f", undoes {entry.get('undoes')}" if entry.get("undoes") else "")]
    times = [(stage, _float(at)) for stage, at in entry.get("stages", {}).items()]
    came = ", ".join(f"{stage} {clock(at)}" for stage, at in times if at is not None)
    told += [came] if came else []
    predicted, measured = entry.get("predicted"), entry.get("measured")
    if isinstance(predicted, Mapping):
        before, after = (_outlook(predicted.get(name)) for name in ("before", "after"))
        told += [f"before     {before}", f"predicted  {after}"] if before or after else []
    if found := _outlook(measured):
        told.append(f"measured   {found}")
    return told


def _outlook(found: object) -> str:
    if not isinstance(found, Mapping):
        return ""
    step, tokens, peak = (_float(found.get(name)) for name in ("step_s", "tokens_per_s", "peak_c"))
    told = [f"step {number(step, 2, 's')}" if step is not None else ""]
    told += [f"{large(tokens)} tok/s" if tokens is not None else ""]
    told += [f"hottest {number(peak, 0, 'C')}" if peak is not None else ""]
    return ", ".join(word for word in told if word)


def _float(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def place_of(entry: Entry, nodes: Sequence[str]) -> tuple[int, int] | None:
    """Number of the first node that the action names, and a GPU of it."""
    asked = entry.get("asked")
    named = asked if isinstance(asked, Mapping) else {}
    for of in (named.get("limits_w"), named.get("clocks_mhz"), named.get("pids"), named.get("nodes")):
        for node in of if isinstance(of, Mapping | Sequence) else ():
            if node in nodes:
                gpus = of.get(node) if isinstance(of, Mapping) and of is not named.get("pids") else None
                first = next(iter(gpus), 0) if isinstance(gpus, Mapping) else 0
                return nodes.index(node), int(first) if str(first).isdecimal() else 0
    return None
