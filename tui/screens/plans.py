"""Every plan that fits, as points and as a table, over the whole terminal: in the console, or without a node."""

from __future__ import annotations

import asyncio
import threading
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical, VerticalScroll
from textual.events import Resize
from textual.screen import ModalScreen
from textual.widgets import Input

from engine.control import planning
from engine.control.spaces import Space
from engine.profile import ProfileError
from tui.board import COLUMNS, Board, Row, row_of, rows_of
from tui.offline import PARTS
from tui.screens.export import ExportPanel
from tui.screens.panel import Panel
from tui.widgets.footer import Keys
from tui.widgets.pane import Pane
from tui.widgets.pinned import Pinned, pinned
from tui.widgets.ranking import Ranking
from tui.widgets.scatter import Point, scatter

VERTICAL = (("tokens_per_joule", "tokens/J"), ("headroom_gib", "GiB free"))
LOOK_S = 0.1

KEYS = (
    ("arrows j k", "move; page up, page down, home, end; or click on a plan"),
    ("s  S  1-8", "sort by the next column; turn round; by this column"),
    ("/", "keep plans whose name holds all words, such as tp4 mb2"),
    ("space", "pin the plan, or take it off"),
    ("tab  v", "points, or pinned plans side by side; [ and ] scroll"),
    ("y", "tokens/J or free memory on the vertical axis"),
    ("e", "export: megatron, nemo, torchtitan, deepspeed or yaml"),
    ("escape", "stop the search: what was found so far stays"),
    ("?  q", "this help; leave"),
)
WORDS = """
TP, PP, CP, EP, DP: tensor, pipeline, context, expert, data parallel.
mb: microbatch. v: chunks a stage. z: ZeRO stage. bare: no overlap.
sel, alt, rec: selective, every other layer, full recompute.
free: GiB left a GPU. C: hottest GPU. bub, comm: shares of the step.
Front: none is as good in tokens/s, tokens/J and free memory at once."""


class PlansHelp(Panel[None]):
    BINDINGS: ClassVar[list[BindingType]] = [("escape,q,question_mark", "dismiss", "close")]

    def on_mount(self) -> None:
        text = Text()
        text.append("Plans\n", "bold")
        for key, words in KEYS:
            text.append(f"  {key:<12}", "bold cyan")
            text.append(f"{words}\n")
        text.append(WORDS, "dim")
        self.body.draw(text)


class PlansScreen(ModalScreen[str]):
    """One search, and what is made of its answer. Gives back why there is none, or nothing. All that keys change is in
    `board`: with one that was searched before, the screen is as it was left. `inside` a console, escape leaves."""

    DEFAULT_CSS = """
    PlansScreen {
        layout: vertical;
        background: $background;
        #head, #said { height: 1; text-wrap: nowrap; text-overflow: ellipsis; }
        #head { background: $panel; }
        #plans { height: 1fr; layout: vertical; }
        #upper { height: 3fr; }
        #table { height: 2fr; }
        #pins-scroll { height: 1fr; scrollbar-size-vertical: 1; }
        #plot { height: 1fr; text-wrap: nowrap; }
        #pins, #table { text-wrap: nowrap; }
        #words { height: 1; border: none; padding: 0; }
    }
    PlansScreen.-wide {
        #plans { layout: horizontal; }
        #upper { width: 1fr; height: 1fr; padding: 0 3 0 0; }
        #table { width: 88; height: 1fr; }
    }
    PlansScreen.-short {
        #upper, Footer { display: none; }
    }
    """
    HORIZONTAL_BREAKPOINTS: ClassVar[list[tuple[int, str]]] = [(0, "-usual"), (140, "-wide")]  # type: ignore[misc]
    VERTICAL_BREAKPOINTS: ClassVar[list[tuple[int, str]]] = [(0, "-short"), (16, "-usual")]  # type: ignore[misc]
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "sort(1)", "Sort"),
        Binding("S", "reverse", "Turn round", show=False),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("space", "pin", "Pin"),
        Binding("tab,v", "view", "Pinned", priority=True, key_display="tab"),
        Binding("y", "axis", "Axis"),
        Binding("left_square_bracket", "scroll_pins(-4)", "up", show=False),
        Binding("right_square_bracket", "scroll_pins(4)", "down", show=False),
        Binding("e", "export", "Export"),
        Binding("escape", "stop", "Stop", show=False),
        Binding("question_mark", "help", "Help", key_display="?"),
        Binding("q", "leave", "Leave"),
        Binding("ctrl+q,ctrl+c", "app.leave", "Quit", show=False),
        Binding("ctrl+z", "app.suspend_process", "Suspend", show=False),
        *(Binding(str(at), f"sort_by({at - 1})", c.head, show=False) for at, c in enumerate(COLUMNS, 1)),
    ]

    def __init__(self, space: Space, board: Board, plain: bool, inside: bool) -> None:
        super().__init__()
        self.space, self.board, self.plain, self._inside = space, board, plain, inside
        self._halt = threading.Event()
        self._done = (0, 0.0)
        self._axis, self._pins_shown = 0, False
        self._seconds: dict[Row, tuple[float, ...]] = {}
        self._words = ""
        self.head, self.said = Pane("head", self.plain), Pane("said", self.plain)
        self.plot, self.pins = Pane("plot", self.plain), Pane("pins", self.plain)
        self.table = Ranking(self.board, "table", self.plain)
        self.scroll = VerticalScroll(self.pins, id="pins-scroll", can_focus=False)
        self.words = Input(
            placeholder="words of a plan's name, such as tp4 mb2; enter keeps, escape clears", id="words"
        )

    def compose(self) -> ComposeResult:
        yield self.head
        with Container(id="plans"):
            yield Vertical(self.plot, self.scroll, id="upper")
            yield self.table
        yield self.said
        yield self.words
        yield Keys(show_command_palette=False)

    def on_mount(self) -> None:
        self.words.display = False
        self.table.focus()
        self._arrange()
        self._draw()
        self.set_interval(LOOK_S, self._draw_head)
        if self.board.found is None:
            self.run_worker(self._search(), name="search", exit_on_error=True)
        for row in self.board.pins:
            self.run_worker(self._breakdown(row), exit_on_error=True)

    def on_unmount(self) -> None:
        self._halt.set()

    def on_resize(self, event: Resize) -> None:
        self._arrange(event.size.width, event.size.height)
        self.call_after_refresh(self._draw)

    # The search, off the loop.

    async def _search(self) -> None:
        given = []
        try:
            for one in self.space.given:
                row = row_of(one, await asyncio.to_thread(self.space.predict, one.plan))
                given.append(row)
                self._pin(row)
            gpus, found = await asyncio.to_thread(self.space.find, self._told)
        except ProfileError as error:
            self.dismiss(str(error))
            return
        self.board.fill(gpus, found, [*given, *rows_of(found)])
        self._draw()

    def _told(self, cluster: str, tried: int, seconds: float, done: float) -> None:
        """On the search's thread: it answers an interrupt with what it has found so far."""
        self._done = (tried, done)
        if self._halt.is_set():
            raise KeyboardInterrupt

    def _pin(self, row: Row) -> None:
        self.board.pins.append(row)
        self.run_worker(self._breakdown(row), exit_on_error=True)

    async def _breakdown(self, row: Row) -> None:
        if row not in self._seconds:
            found = await asyncio.to_thread(self.space.predict, row.plan)
            self._seconds[row] = tuple(float(getattr(found.breakdown, name)) for name, _, _ in PARTS)
            self._draw()

    # Drawing.

    def _arrange(self, width: int = 0, height: int = 0) -> None:
        """Points and pins together where there is room, else one of them."""
        width, height = width or self.size.width, height or self.size.height
        both = width >= 140 and height >= 36
        self.plot.display = both or not self._pins_shown
        self.scroll.display = both or self._pins_shown

    def _draw(self) -> None:
        self._draw_head()
        found = self.board.found
        said = "" if found is None else "No plan's name holds these words." if self.board.rows else found.empty
        if found and found.nearest and not found.plans:
            said += f"\nNearest to holding: {planning.label(found.nearest.plan)}"
        self.table.show(said)
        self.plot.fill(self._plot)
        pins = [Pinned(row, self._seconds.get(row)) for row in self.board.pins]
        self.pins.fill(lambda width, _: pinned(pins, width or self.size.width, self.plain))
        row = self.board.cursor
        self.said.draw(self._of_cursor(row) if row else Text(""))

    def _of_cursor(self, row: Row) -> Text:
        m = row.metrics
        text = Text()
        text.append(f"{row.label}: ", "bold")
        text.append(f"{m['tokens_per_s']:,.0f} tokens/s, {m['tokens_per_joule']:.2f} tokens/J, ")
        text.append(f"{m['headroom_gib']:.1f} GiB free")
        if row.measured_s:
            text.append(f"; measured {row.measured_s:.2f} s a step, predicted {m['iteration_s']:.2f}")
        return text

    def _draw_head(self) -> None:
        text = Text()
        text.append(f"Plans: {self.space.title}", "bold")
        found = self.board.found
        if found is None:
            tried, done = self._done
            text.append(f"  searching: {tried:,} tried, {done:.0%}; escape stops", "yellow")
        else:
            column = COLUMNS[self.board.sort]
            stopped = "" if found.complete else f", stopped at {self._done[1]:.0%}"
            text.append(f"  {self.board.gpus} GPUs, {found.tried:,} tried{stopped}, {len(self.board.shown)} shown")
            text.append(f" by {column.head}{' turned round' if self.board.reverse else ''}", "dim")
            text.append(f"  /{self.board.filter}" if self.board.filter else "", "yellow")
            text.append(f"  as now: {'; '.join(self.space.told)}" if self.space.told else "", "yellow")
        self.head.draw(text)

    def _plot(self, width: int, height: int) -> Text:
        metric, name = VERTICAL[self._axis]
        if self.board.found is None and not self.board.shown:
            return Text("")
        points = []
        for row in {id(r): r for r in (*self.board.shown, *self.board.pins)}.values():
            mark = self.board.letter(row)
            kind = "pin" if mark else "front" if row.front else "other"
            if row is self.board.cursor:
                kind = "cursor"
            points.append(Point(row.metrics["tokens_per_s"], row.metrics[metric], kind, mark))
        return scatter(points, "tokens/s", name, width, height, self.plain)

    def on_ranking_changed(self) -> None:
        self._draw()

    # Keys.

    def action_sort(self, by: int) -> None:
        self.board.sort_by((self.board.sort + by) % len(COLUMNS))
        self._draw()

    def action_sort_by(self, column: int) -> None:
        self.board.sort_by(column)
        self._draw()

    def action_reverse(self) -> None:
        self.board.sort_by(self.board.sort)
        self._draw()

    def action_filter(self) -> None:
        self.words.display = True
        self.words.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input is self.words:
            self.board.filter = event.value
            self.board.order()
            self._draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input is self.words:
            self._filtered()

    def _filtered(self) -> None:
        self.words.display = False
        self.table.focus()

    def action_pin(self) -> None:
        row = self.board.cursor
        if refused := self.board.pin():
            self.notify(refused, severity="warning", markup=False)
        elif row in self.board.pins:
            self.run_worker(self._breakdown(row), exit_on_error=True)
        self._draw()

    def action_view(self) -> None:
        self._pins_shown = not self._pins_shown
        self._arrange()
        self.call_after_refresh(self._draw)

    def action_scroll_pins(self, by: int) -> None:
        self.scroll.scroll_relative(y=by, animate=False)

    def action_axis(self) -> None:
        self._axis = (self._axis + 1) % len(VERTICAL)
        self._draw()

    def action_export(self) -> None:
        row = self.board.cursor
        if row is None:
            self.notify("There is no plan to export.", severity="warning")
            return
        self.app.push_screen(ExportPanel(row.label, row.plan, self.plain), self._exported)

    def _exported(self, done: str | None) -> None:
        if done:
            self.notify(done, markup=False)

    def action_stop(self) -> None:
        """Clear the filter that is being typed, stop the search, or leave for the console."""
        if self.words.has_focus:
            self.words.value = ""
            self._filtered()
        elif self.board.found is None:
            self._halt.set()
        elif self._inside:
            self.action_leave()

    def action_help(self) -> None:
        self.app.push_screen(PlansHelp(self.plain))

    def action_leave(self) -> None:
        self._halt.set()
        self.dismiss("")
