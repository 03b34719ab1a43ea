"""The console: lays out the screen, turns keys into proposals, and draws what the engine publishes."""

from __future__ import annotations

import asyncio
import locale
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from textual.app import ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.events import DescendantFocus, Resize
from textual.geometry import Size
from textual.screen import Screen
from textual.widgets import Input

from engine.act.action import Stage
from engine.control.ahead import Ahead, ahead
from engine.control.control import Control
from engine.control.hookless import trains
from engine.model.predict import Prediction
from engine.plan.conditions import Conditions
from engine.telemetry.store import HISTORY_METRICS
from tui import alarm_keys, choices
from tui.actions import actions
from tui.bridge import carry
from tui.intervening import Intervening
from tui.looks import Look
from tui.messages import JobArrived, SnapshotArrived, TicketArrived
from tui.metrics import METRICS
from tui.screens.filter import FilterScreen
from tui.screens.go_to import GoToScreen
from tui.screens.help import HelpScreen
from tui.screens.leave import LeaveScreen
from tui.widgets import lines
from tui.widgets.alarms import Alarms
from tui.widgets.detail import Detail
from tui.widgets.elevation import Elevation
from tui.widgets.footer import Keys
from tui.widgets.jobs import Effect, Jobs
from tui.widgets.layout import GAP, RACK_WIDTH, Zoom
from tui.widgets.links import Links
from tui.widgets.log import Log
from tui.widgets.pane import Pane
from tui.widgets.plans import Plans

if TYPE_CHECKING:
    from tui.plan_keys import Searched

PANES = ("gpu", "jobs", "links", "plans", "alarms", "log")
"""A large screen shows the GPU or the jobs, links, plans, and alarms or the log."""
Breakpoints = list[tuple[int, str]]
REPLAN_S = 10.0
"""How often the state of the rack is looked at for plans that it would change."""
NARROW, LEAST_LEFT, LEFT_SHARE = 60, 24, 0.5
"""Below this width the racks stand alone; else they take what they need, up to this share."""
WIDE, TALL = 150, 40
"""From this size on all panes stand on the screen together."""


class RacksideApp(Intervening):
    """Holds one engine object, the control."""

    CSS_PATH = "console.tcss"
    TITLE = "rackside"
    ENABLE_COMMAND_PALETTE = True
    HORIZONTAL_BREAKPOINTS: ClassVar[Breakpoints] = [(0, "-narrow"), (60, "-usual"), (WIDE, "-wide")]  # type: ignore[misc]
    VERTICAL_BREAKPOINTS: ClassVar[Breakpoints] = [(0, "-short"), (12, "-usual"), (TALL, "-tall")]  # type: ignore[misc]

    def __init__(
        self,
        control: Control,
        plain: bool = False,
        keys: Mapping[str, str] | None = None,
        look: Look | None = None,
        still: bool = False,
    ) -> None:
        """`plain` is without characters beyond ASCII, `still` without anything that moves and is no news."""
        super().__init__()
        self.control = control
        self.plain = plain or "UTF" not in locale.getpreferredencoding(False).upper()
        self.own_keys = dict(keys or {})
        look = look or Look()
        self.pane = look.pane if look.pane in PANES else PANES[0]
        self.links_of_all = look.links_of_all
        self.theme = look.theme if look.theme in self.available_themes else Look().theme
        self.still = still
        if still:
            self.animation_level = "none"
        self.wanted = ""
        """Words that links and alarms are limited to."""
        self._planned_for: tuple[tuple[str, int, bool] | None, Conditions] | None = None
        self._own: Prediction | None = None
        self._ahead: Ahead | None = None
        self.searched: Searched | None = None
        self._looked = -REPLAN_S
        self._make_widgets()
        self.links.as_matrix = look.links_matrix
        self.racks.metric = next((m for m in METRICS if m.key == look.metric), METRICS[0])
        self.racks.zoom = Zoom(look.zoom) if look.zoom in tuple(Zoom) else None
        for action in actions(self.replay is not None):
            key = self.own_keys.get(action.id, action.keys)
            shown = bool(action.footer)
            self._bindings.bind(
                key, action.id, action.footer or action.title, show=shown, priority=action.id == "next_pane"
            )

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+q,ctrl+c", "leave", "Quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", "Suspend", show=False, priority=True),
    ]

    @property
    def look(self) -> Look:
        """What is worth keeping until the next session."""
        zoom = None if self.racks.zoom is None else int(self.racks.zoom)
        return Look(self.theme, self.pane, self.racks.metric.key, zoom, self.links_of_all, self.links.as_matrix)

    def _make_widgets(self) -> None:
        """All of them from the start: steps, snapshots and sizes also arrive while the screen comes or goes."""
        plain = self.plain
        self.racks = Elevation(self.control.cluster, plain, id="racks")
        self.site, self.legend = Pane("site", plain), Pane("legend", plain)
        self.job_line, self.action_line, self.alarm_line = (
            Pane("job", plain),
            Pane("action", plain),
            Pane("alarm", plain),
        )
        self.detail, self.plans = Detail("body-gpu", plain), Plans("body-plans", plain)
        self.links, self.alarm_list = Links("body-links", plain), Alarms("body-alarms", plain)
        self.jobs, self.log_list = Jobs("body-jobs", plain), Log("body-log", plain)
        self._effects: list[Effect] = []
        self.bodies: dict[str, Pane] = {
            "gpu": self.detail,
            "jobs": self.jobs,
            "plans": self.plans,
            "links": self.links,
            "alarms": self.alarm_list,
            "log": self.log_list,
        }
        self.panes = {
            name: VerticalScroll(body, id=f"pane-{name}", classes="pane", can_focus=False)
            for name, body in self.bodies.items()
        }
        self.left = Vertical(self.legend, self.racks, id="left")
        self.right = Vertical(*self.panes.values(), id="right")

    def compose(self) -> ComposeResult:
        yield self.site
        with Horizontal(id="middle"):
            yield self.left
            yield self.right
        yield self.job_line
        yield self.action_line
        yield self.alarm_line
        yield from self.time_line()
        yield Keys(show_command_palette=False)

    def on_mount(self) -> None:
        {"alarms": self.alarm_list, "log": self.log_list}.get(self.pane, self.racks).focus()
        # Told at once rather than by a message: what a key changes then goes to the terminal in one piece, and soon.
        self.watch(self.racks, "cursor", self._draw_cursor, init=False)
        self._arrange(self.size)
        self._draw()
        self._replan()
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        """The engine starts behind the first screen, which stands sooner so."""
        self.run_worker(carry(self.control, self), name="engine", exit_on_error=True)

    def on_descendant_focus(self, event: DescendantFocus) -> None:
        if self.still and isinstance(event.widget, Input):
            event.widget.cursor_blink = False

    def on_resize(self, event: Resize) -> None:
        self._arrange(event.size)  # the app's own size is still the one before
        self.call_after_refresh(self._draw)  # panes write as wide as they have become

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """The tab key goes before the screen's own, but not into what lies under a panel."""
        return not (action == "next_pane" and self.screen.is_modal)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The palette: every action of the registry, then Textual's own."""
        for action in actions(self.replay is not None):
            yield SystemCommand(action.title, action.help, getattr(self, f"action_{action.id}"))
        yield from super().get_system_commands(screen)

    # What the engine says.

    def on_snapshot_arrived(self, message: SnapshotArrived) -> None:
        self._draw()
        if abs(self.control.snapshot.time - self._looked) >= REPLAN_S:
            self._replan()
        if self._panel is not None:
            self._panel.repropose()

    def on_job_arrived(self, message: JobArrived) -> None:
        """Steps can come fast: only the job's own line is drawn for them."""
        job = self._job
        known = self._planned_for[0] if self._planned_for else None
        if known != ((job.key, job.microbatch, job.attached) if job else None):
            self._replan()
        self._draw_job()

    def on_ticket_arrived(self, message: TicketArrived) -> None:
        self.draw_lines()
        ticket = message.ticket
        if ticket.stage in (Stage.FAILED, Stage.UNKNOWN):
            self.notify(ticket.line, severity="error", timeout=10, markup=False)

    def _replan(self) -> None:
        """See whether plans must be compared again."""
        self._looked = self.control.snapshot.time
        self.run_worker(self._plan, name="plans", exclusive=True, group="plans")  # type: ignore[arg-type]

    async def _plan(self) -> None:
        """Compare plans again when the current job, its microbatch, or the state of the rack is another."""
        now, job = await asyncio.to_thread(self.control.conditions), self._job
        if job is not None and job.attached and self.pane == "jobs":
            node = self.racks.cursor[0]
            self._effects = await asyncio.to_thread(choices.effects, self.control, job, node)
            self._draw_jobs()
        known = ((job.key, job.microbatch, job.attached) if job else None, now)
        if known == self._planned_for:
            return
        found = await asyncio.to_thread(self.control.alternatives, now)
        self._planned_for = known
        self._own = found[0].prediction if found and not isinstance(found[0].prediction, str) else None
        title = f"Plans for {job.name}, predicted on {self.control.cluster.name}" if job else "Plans"
        self.plans.show(title, [(c.label, c.prediction) for c in found], now.told, job.step_s if job else None)

    # Drawing.

    @property
    def _others(self) -> int:
        return max(0, sum(s.attached for s in self.control.jobs.statuses.values()) - 1)

    def _arrange(self, size: Size) -> None:
        """All panes on a large screen, one on a usual one, none beside the racks on a narrow one."""
        everything = size.width >= WIDE and size.height >= TALL
        self.right.set_class(everything, "-all")
        racks = len({node.rack for node in self.control.cluster.nodes})
        room = size.width if size.width < NARROW else max(LEAST_LEFT, int(size.width * LEFT_SHARE))
        self.left.styles.width = (
            max(1, min(room, max(LEAST_LEFT, racks * (RACK_WIDTH + GAP)))) if room < size.width else room
        )
        for name, pane in self.panes.items():
            first, last = "jobs" if self.pane == "jobs" else "gpu", "log" if self.pane == "log" else "alarms"
            pane.display = name == self.pane or (everything and name in (first, "links", "plans", last))

    def _draw(self) -> None:
        snapshot = self.control.snapshot
        self._ahead = ahead(self.control.watch, snapshot)
        alarmed = frozenset(a.row for a in self.control.alarms if a.row >= 0 and a.stands)
        self.racks.show(snapshot, alarmed, self._ahead)
        self._draw_cursor()
        self.draw_lines()

    def _draw_cursor(self) -> None:
        snapshot, (node, slot) = self.control.snapshot, self.racks.cursor
        status = snapshot.nodes[node]
        row = status.rows[slot] if slot < len(status.rows) else None
        history = {m: self.control.store.history(m, row) for m in HISTORY_METRICS} if row is not None else {}
        name = self.control.cluster.nodes[node].name
        role = self.control.roles().get((name, slot))
        course = self._ahead.of(row) if self._ahead is not None and row is not None else None
        told = role.text() if role else ""
        self.detail.show(self.control.cluster, snapshot, node, slot, history, self.plain, told, course)
        if self.panes["links"].display:
            of, c = None if self.links_of_all else name, self.control
            self.links.show(snapshot, of, c.carried(), c.expected(self._own), self.wanted)
        self._draw_alarm()

    def draw_lines(self) -> None:
        c, now = self.control, self.control.snapshot.time
        metric = self.racks.metric
        site = lines.site(c.cluster.name, c.snapshot, c.arming.left_s, c.arming.fixed_read_only, self.size.width < 60)
        self.site.draw(self.taped(site))
        self.legend.draw(lines.legend(metric))
        self._draw_job()
        self._draw_jobs()
        self._draw_log()
        self.action_line.draw(lines.last_action(c.tickets))
        self._draw_alarm()
        self.alarm_list.show(c.alarms, c.alarming.shelved, c.tickets, now, self.wanted)

    def _draw_alarm(self) -> None:
        """A narrow screen has no pane beside the racks: there it names the cursor's GPU while nothing is wrong."""
        c = self.control
        here = self.racks.told if self.size.width < NARROW else ""
        self.alarm_line.draw(lines.top_alarm(c.alarms, c.snapshot.time, here))

    def _draw_log(self) -> None:
        if self.panes["log"].display:
            self.log_list.show(self.control.logged(), self.wanted)

    def _draw_jobs(self) -> None:
        c, job = self.control, self._job
        if not self.panes["jobs"].display:
            return
        others = [f for f in c.found_jobs if trains(f) and "hook" not in f.source]
        effects = self._effects if job is not None and job.attached else []
        self.jobs.show(job, others, *c.rack_and_load(), self._own, effects, c.snapshot.time)

    def _draw_job(self) -> None:
        line = lines.job(self._job, self._others, self.control.snapshot.time)
        self.job_line.draw(line)

    # Keys that look.

    def show_pane(self, name: str) -> None:
        self.pane = name
        self._arrange(self.size)
        {"alarms": self.alarm_list, "log": self.log_list}.get(name, self.racks).focus()
        self._draw_cursor()  # what was hidden is of an earlier moment
        self._draw_log()
        self.call_after_refresh(self._draw_cursor)

    def action_pane_gpu(self) -> None:
        self.show_pane("gpu")

    def action_pane_jobs(self) -> None:
        self.show_pane("jobs")
        self._draw_jobs()
        self._replan()

    def action_pane_links(self) -> None:
        self.show_pane("links")

    def action_pane_plans(self) -> None:
        self.show_pane("plans")

    def action_search_plans(self) -> None:
        from tui import plan_keys  # the screen and its search come with the key

        if refused := plan_keys.search(self):
            self.notify(refused, severity="warning", markup=False)

    def action_pane_alarms(self) -> None:
        self.show_pane("alarms")

    def action_pane_log(self) -> None:
        self.show_pane("log")

    def action_next_pane(self) -> None:
        self.show_pane(PANES[(PANES.index(self.pane) + 1) % len(PANES)])

    def action_links_scope(self) -> None:
        self.links_of_all = not self.links_of_all
        self.show_pane("links")

    def action_links_view(self) -> None:
        self.links.as_matrix = not self.links.as_matrix
        self.show_pane("links")

    def action_copy(self) -> None:
        """By the terminal itself (OSC 52): it works over SSH, and in tmux with set-clipboard on."""
        text = self.bodies[self.pane].text
        self.copy_to_clipboard(text)
        self.notify(f"{text.count(chr(10)) + 1} lines of this pane are in the clipboard, if the terminal lets them.")

    def action_filter(self) -> None:
        """Ask for words, and limit links, alarms and log to what holds them."""

        def limit(wanted: str | None) -> None:
            if wanted is not None:
                self.wanted = wanted
                self._draw_cursor()
                self.draw_lines()

        self.push_screen(FilterScreen(self.wanted, self.plain), limit)

    def action_go_to(self) -> None:
        """Ask for a node, and put the cursor there."""
        names = [n.name for n in self.control.cluster.nodes]

        def go(found: tuple[int, int] | None) -> None:
            if found is not None:
                self.racks.cursor = found

        gpus = [self.control.cluster.type_of(n).gpus for n in self.control.cluster.nodes]
        self.push_screen(GoToScreen(names, gpus, self.plain), go)

    def action_metric(self) -> None:
        self.racks.metric = METRICS[(METRICS.index(self.racks.metric) + 1) % len(METRICS)]
        self.draw_lines()

    def action_zoom_in(self) -> None:
        self.racks.closer(1)

    def action_zoom_out(self) -> None:
        self.racks.closer(-1)

    def action_hottest(self) -> None:
        celsius = self.control.snapshot.gpus["temperature_c"]
        if np.all(np.isnan(celsius)):
            self.notify("No temperature is read yet.", severity="warning")
            return
        row = int(np.nanargmax(celsius))
        for number, status in enumerate(self.control.snapshot.nodes):
            if row in status.rows:
                self.racks.cursor = (number, status.rows.index(row))

    def action_acknowledge(self) -> None:
        alarm_keys.acknowledge(self)

    def action_acknowledge_all(self) -> None:
        alarm_keys.acknowledge_all(self)

    def action_shelve(self) -> None:
        alarm_keys.shelve(self)

    def action_go_to_alarm(self) -> None:
        alarm_keys.go_to(self)

    def action_next_job(self) -> None:
        attached = [s for s in self.control.jobs.statuses.values() if s.attached]
        if len(attached) < 2:
            self.notify("There is no other job.", severity="warning")
            return
        self.control.jobs.select_next()
        self._replan()
        self.draw_lines()

    def action_help(self) -> None:
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(self.own_keys, self.plain, self.replay is not None))

    async def action_leave(self) -> None:
        """Leave at once, or after a question when limits are held down."""
        held = self.control.leased_gpus
        if held and not isinstance(self.screen, LeaveScreen):
            self.push_screen(LeaveScreen(held, self.plain), lambda sure: self.exit() if sure else None)
        else:
            self.exit()
