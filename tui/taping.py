"""What the console does about recordings: begins and ends one, and moves in one that is open."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

from rich.text import Text
from textual.app import App, ComposeResult

from engine.control.control import Control
from engine.control.recording import Recording
from engine.control.replay import NOTHING_DONE, Replay
from engine.control.whatif import what_if
from engine.record.schema import RecordError
from tui import choices
from tui.screens.act import ActPanel, Choice, Confirmed
from tui.screens.whatif import WhatIfScreen
from tui.widgets.timeline import TimeLine

MINUTE_S = 60.0


class Taping(App[None]):
    """A part of the console's app, which has the rest."""

    control: Control
    plain: bool

    def draw_lines(self) -> None:
        """Draw what is always there."""

    @property
    def replay(self) -> Replay | None:
        """The recording that is open, if one is."""
        return self.control if isinstance(self.control, Replay) else None

    @property
    def recording(self) -> Recording | None:
        """The recording that is being written, if one is."""
        return next((tap for tap in self.control.taps if isinstance(tap, Recording)), None)

    def time_line(self) -> ComposeResult:
        if self.replay is not None:
            yield TimeLine("time", self.plain)

    def taped(self, site: Text) -> Text:
        """The site's line with a word on what is recorded; draws the time line, too."""
        if self.replay is not None:
            self.draw_time()
        if (recording := self.recording) is not None:
            site.append(f"  REC {recording.path.name}", "bold red")
        return site

    def draw_time(self) -> None:
        r = self.replay
        if r is not None:
            for line in self.screen_stack[0].query(TimeLine):
                line.show(r.start, r.end, r.position, r.marks, r.playing, r.speed)

    def action_record(self) -> None:
        """Begin to record, or end it."""
        if self.replay is not None:
            self.notify(NOTHING_DONE, severity="warning")
            return
        if (recording := self.recording) is not None:
            recording.close()
            self.draw_lines()
            self.notify(f"{recording.path} holds {recording.seconds} seconds.", markup=False)
            return
        name = re.sub(r"[^\w.-]+", "-", self.control.cluster.name)
        path = Path.cwd() / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.rks"
        try:
            Recording(self.control, path)
        except RecordError as error:
            self.notify(str(error), severity="error", markup=False)
        else:
            self.draw_lines()
            self.notify(f"Recording to {path}; R ends it.", markup=False)

    # In a recording.

    def _moved(self, why_not: str = "") -> None:
        if why_not:
            self.notify(why_not, severity="warning")
        self.draw_time()

    def action_play(self) -> None:
        if self.replay is not None:
            self.replay.play()
            self._moved()

    def _step(self, seconds: float) -> None:
        if self.replay is not None:
            self.replay.step(seconds)
            self._moved()

    def action_second_back(self) -> None:
        self._step(-1.0)

    def action_second_on(self) -> None:
        self._step(1.0)

    def action_minute_back(self) -> None:
        self._step(-MINUTE_S)

    def action_minute_on(self) -> None:
        self._step(MINUTE_S)

    def _jump(self, by: int) -> None:
        if self.replay is not None:
            self.replay.playing = False
            self._moved(self.replay.jump(by))

    def action_previous_mark(self) -> None:
        self._jump(-1)

    def action_next_mark(self) -> None:
        self._jump(1)

    def action_slower(self) -> None:
        if self.replay is not None:
            self.replay.faster(-1)
            self._moved()

    def action_faster(self) -> None:
        if self.replay is not None:
            self.replay.faster(1)
            self._moved()

    def suppose(self, title: str, offered: Sequence[Choice], scopes: Sequence[str], chosen: int) -> None:
        """Offer actions as if the moment were now; the twin's answer to one is then shown beside what came."""
        replay = self.replay
        if replay is None:
            return
        replay.playing = False

        def told(answer: Confirmed | None) -> None:
            if answer is not None:
                self.push_screen(WhatIfScreen(what_if(replay, answer.proposal), self.plain))

        free, allowed, one, nobody = (lambda: 1.0), (lambda: ""), (lambda _: 1), (lambda _: "")
        title = f"What if, at this moment of the recording: nothing is sent\n{title}"
        supposed = [choices.supposed(choice) for choice in offered]
        self.push_screen(ActPanel(title, supposed, scopes, chosen, free, allowed, one, nobody, self.plain), told)
        self._moved()
