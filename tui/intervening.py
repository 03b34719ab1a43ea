"""Keys that act: each opens a panel; nothing is sent before its proposal is confirmed there."""

from __future__ import annotations

from engine.act.action import Proposal
from engine.act.audit import AuditError
from engine.control.control import Refused
from engine.job.status import JobStatus
from tui import choices
from tui.screens.act import ActPanel, Choice, Confirmed
from tui.taping import Taping
from tui.widgets.elevation import Elevation


class Intervening(Taping):
    """A part of the console's app, which has the rest."""

    racks: Elevation
    _panel: ActPanel | None = None

    @property
    def _job(self) -> JobStatus | None:
        return self.control.jobs.current

    def action_arm(self) -> None:
        if self.control.arming.left_s:
            self.control.arming.disarm()
        elif refused := self.control.arming.arm():
            self.notify(refused, severity="warning", markup=False)
        self.draw_lines()

    def action_throttle(self) -> None:
        cursor = self.racks.cursor
        offered, scopes = choices.throttle(self.control, *cursor)
        self._open("Throttle: change power limits, or lock clocks", offered, scopes, choices.THROTTLE_DEFAULT)

    def action_microbatch(self) -> None:
        job = self._acting_job()
        if job is not None:
            offered, chosen = choices.microbatch(self.control, job)
            self._open("Microbatch: sequences in one forward pass", offered, (job.name,), chosen)

    def action_rebalance(self) -> None:
        job = self._acting_job()
        if job is not None:
            self._open("Rebalance: work from hot ranks to cold", choices.rebalance(self.control, job), (job.name,), 0)

    def action_pause(self) -> None:
        job = self._job
        if job is not None and job.attached:
            if job.paused_until is None:
                self._open("Pause: the job waits at its next step", choices.pause(self.control, job), (job.name,), 1)
            else:
                self._open("Resume the job", choices.resume(self.control, job), (job.name,), 0)
            return
        node, slot = self.racks.cursor
        found = choices.hookless_at(self.control, self.control.cluster.nodes[node].name, slot)
        if found is None:
            self.notify("No job is seen here: put the cursor on a GPU that runs one.", severity="warning")
        elif choices.stands(self.control, found):
            self._open("Let the job go on", choices.go_on(self.control, found), (found.name,), 0)
        else:
            self._open("Stop a job that has no hook", choices.standstill(self.control, found), (found.name,), 0)

    def action_what_if(self) -> None:
        """In a recording every key that acts asks this; here the most common one."""
        if self.replay is not None:
            self.action_throttle()

    def action_undo(self) -> None:
        if self.control.propose_undo() is None:
            self.notify("Nothing of this session is in force that could be undone.", severity="warning")
            return
        self._open("Undo the last action", choices.undo(self.control), ("",), 0)

    def _acting_job(self) -> JobStatus | None:
        job = self._job
        if job is None or not job.attached:
            self.notify(
                "There is no job to act on: a trainer with rackside_hook on one of these nodes would be one.",
                severity="warning",
            )
            return None
        return job

    def _open(self, title: str, offered: list[Choice], scopes: tuple[str, ...], chosen: int) -> None:
        if self._panel is not None:
            return
        if self.replay is not None:
            self.suppose(title, offered, scopes, chosen)
            return
        arming = self.control.arming

        def reached(proposal: Proposal) -> int:
            return self.control.nodes_reached(proposal.action)

        def held(proposal: Proposal) -> str:
            return self.control.holder_of(proposal.action)

        armed = lambda: arming.left_s  # noqa: E731
        self._panel = ActPanel(title, offered, scopes, chosen, armed, arming.arm, reached, held, self.plain)
        self.push_screen(self._panel, self._confirmed)

    def _confirmed(self, confirmed: Confirmed | None) -> None:
        self._panel = None
        if confirmed is None:
            return
        try:
            self.control.confirm(confirmed.proposal, confirmed.steal)
        except (Refused, AuditError) as error:
            self.notify(f"Not done: {error}", severity="error", timeout=10, markup=False)
