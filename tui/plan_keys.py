"""The key that opens the Plans screen in the console, on the current job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.control import spaces
from engine.plan.conditions import Conditions
from engine.profile import ProfileError
from tui.board import Board
from tui.screens.plans import PlansScreen

if TYPE_CHECKING:
    from tui.app import RacksideApp


@dataclass(frozen=True)
class Searched:
    """The last search and all that was done with it, and what it was of: it is shown again while that is the same."""

    job: str
    microbatch: int
    now: Conditions
    board: Board


def search(app: RacksideApp) -> str:
    """Find all plans for the current job on its rack as it is, or go back to those that were found. Returns why not, or
    an empty string."""
    job, control = app.control.jobs.current, app.control
    if job is None or not job.attached:
        return "There is no job whose model could be planned for. Without one: rackside plans --model M --cluster C."
    now, last = control.conditions(), app.searched
    try:
        space = spaces.of_job(job, control.cluster, control.snapshot, now)
    except ProfileError as error:
        return str(error)
    if last is None or (last.job, last.microbatch, last.now) != (job.key, job.microbatch, now):
        last = Searched(job.key, job.microbatch, now, Board())
    app.searched = last

    def left(wrong: str | None) -> None:
        if wrong:
            app.notify(wrong, severity="warning", markup=False)

    app.push_screen(PlansScreen(space, last.board, app.plain, inside=True), left)
    return ""
