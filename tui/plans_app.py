"""`rackside plans`: the Plans screen without a node."""

from __future__ import annotations

import locale
from typing import Any, ClassVar

import msgspec
from textual.app import App
from textual.binding import Binding, BindingType

from engine.control import spaces
from engine.control.planning import Question
from engine.control.spaces import FRONT, TOP, Space
from engine.plan.search import constraint
from engine.profile import ProfileError, catalog
from tui import looks
from tui.board import Board
from tui.screens.plans import PlansScreen


class PlansApp(App[None]):
    """Holds one screen and ends with it. `wrong` is why there is no answer."""

    TITLE = "rackside plans"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+q,ctrl+c", "leave", "Quit", show=False, priority=True)]

    def __init__(self, space: Space, plain: bool = False, theme: str = "") -> None:
        super().__init__()
        if theme in self.available_themes:
            self.theme = theme
        plain = plain or "UTF" not in locale.getpreferredencoding(False).upper()
        self.wrong, self.plans = "", PlansScreen(space, Board(), plain, inside=False)

    def on_mount(self) -> None:
        self.push_screen(self.plans, self._ended)

    def _ended(self, wrong: str | None) -> None:
        self.wrong = wrong or ""
        self.exit()

    def action_leave(self) -> None:
        self.plans.action_leave()


def plans(given: Any) -> int:
    """Check what was asked, and open the screen. ProfileError with a sentence for whatever is wrong."""
    catalog.model(given.model)
    catalog.cluster(given.cluster)
    for text in given.where:
        constraint(text)
    plan = catalog.plan(given.plan) if given.plan else None
    if plan and given.batch:  # side by side only what trains the same batch
        plan = msgspec.structs.replace(plan, global_batch=given.batch)
    like: dict[str, Any] = (
        {"batch": plan.global_batch, "precision": (plan.precision,), "stack": plan.stack} if plan else {}
    )
    like |= {"sequence": plan.sequence} if plan and plan.sequence else {}
    like |= {"batch": given.batch} if given.batch else {}
    question = Question(given.model, (given.cluster,), where=tuple(given.where), pareto=FRONT, top=TOP, **like)
    theme = looks.load(looks.default_path()).theme  # the console's
    app = PlansApp(spaces.asked(question, plan), given.ascii, theme)
    app.run()
    if app.wrong:
        raise ProfileError(app.wrong)
    return app.return_code or 0
