"""The panel before every action: choose how much, read what it will do, confirm or leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input

from engine.act.action import Proposal
from tui.screens.panel import Panel
from tui.widgets.figures import effect_rows


@dataclass(frozen=True)
class Choice:
    """One value that the panel offers, and how to propose it for a scope."""

    label: str
    propose: Callable[[int], Proposal]


@dataclass(frozen=True)
class Confirmed:
    """What is to be sent; `steal` is the reason to take the job from another operator."""

    proposal: Proposal
    steal: str = ""


class ActPanel(Panel[Confirmed | None]):
    """Left and right choose the value, up and down the scope, enter confirms, escape leaves. A job that another
    operator holds is taken with S and a reason.

    What touches more than one node wants a second key. The proposal is made anew with every snapshot, so that what is
    confirmed is what is shown.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,h", "value(-1)", "less"),
        Binding("right,l", "value(1)", "more"),
        Binding("up,k", "scope(-1)", "scope"),
        Binding("down,j", "scope(1)", "scope", show=False),
        Binding("enter", "confirm", "confirm"),
        Binding("y", "yes", "send"),
        Binding("a", "arm", "arm"),
        Binding("S", "steal", "take the job"),
        Binding("escape,q", "leave", "leave"),
    ]

    def __init__(
        self,
        title: str,
        choices: Sequence[Choice],
        scopes: Sequence[str],
        chosen: int,
        armed: Callable[[], float],
        arm: Callable[[], str],
        reached: Callable[[Proposal], int],
        held: Callable[[Proposal], str],
        plain: bool,
    ) -> None:
        super().__init__(plain)
        self._title, self._choices, self._scopes = title, choices, scopes
        self.chosen, self.scope_at = chosen, 0
        self._armed, self._arm, self._reached, self._held = armed, arm, reached, held
        self.reason = Input(placeholder="why you take it; enter ends", id="steal")
        self.steal = ""
        self.proposal: Proposal | None = None
        self.asking = False
        self._warning = ""

    def compose(self) -> ComposeResult:
        yield from super().compose()
        self.reason.display = False
        yield self.reason

    def on_mount(self) -> None:
        self.repropose()

    def repropose(self) -> None:
        """Propose again from the newest snapshot and draw."""
        self.proposal = self._choices[self.chosen].propose(self.scope_at)
        self.body.draw(self._text(self.proposal))

    def _text(self, p: Proposal) -> Text:
        text = Text()
        text.append(f"{self._title}\n", "bold")
        if len(self._choices) > 1:
            text.append("value  ", "dim")
            for at, choice in enumerate(self._choices):
                text.append(f" {choice.label} ", "reverse bold" if at == self.chosen else "")
            text.append("\n")
        if len(self._scopes) > 1:
            text.append("scope  ", "dim")
            for at, scope in enumerate(self._scopes):
                text.append(f" {scope} ", "reverse bold" if at == self.scope_at else "")
            text.append("\n")
        text.append(f"\n{p.title}\n", "bold")
        if p.refusal:
            text.append(f"{p.refusal}\n", "bold yellow")
        else:
            text.append(f"{p.scope}\n", "dim")
            text.append("Predicted, once settled (ranges: nine of ten outcomes):\n", "dim")
            text.append_text(_effect(p))
        for note in p.notes:
            text.append(f"{note}\n", "dim")
        text.append("\n")
        text.append_text(self._prompt(p))
        return text

    def _prompt(self, p: Proposal) -> Text:
        if self._warning:
            return Text(self._warning, "bold red")
        if p.refusal:
            return Text("escape leaves", "dim")
        if not self.steal and (held_by := self._held(p)):
            return Text(f"{held_by} S takes it; escape leaves.", "bold red")
        if not self._armed():
            return Text("READ-ONLY: a arms this console for five minutes; escape leaves", "bold green")
        if self.asking:
            return Text(f"This touches {self._reached(p)} nodes. y sends it, escape leaves.", "bold red")
        return Text("enter confirms, escape leaves, arrows choose", "bold")

    def action_value(self, by: int) -> None:
        self.chosen = max(0, min(len(self._choices) - 1, self.chosen + by))
        self._changed()

    def action_scope(self, by: int) -> None:
        self.scope_at = max(0, min(len(self._scopes) - 1, self.scope_at + by))
        self._changed()

    def _changed(self) -> None:
        self.asking, self._warning = False, ""
        self.repropose()

    def action_arm(self) -> None:
        if not self._armed():
            self._warning = self._arm()
            self.repropose()

    def action_confirm(self) -> None:
        """First key: send, or ask once more when several nodes are touched."""
        p = self.proposal
        if p is None or p.refusal or not self._armed() or (not self.steal and self._held(p)):
            self.repropose()
            return
        if self._reached(p) > 1 and not self.asking:
            self.asking = True
            self.repropose()
            return
        if not self.asking:
            self.dismiss(Confirmed(p, self.steal))

    def action_yes(self) -> None:
        if self.asking and self.proposal is not None and self._armed():
            self.dismiss(Confirmed(self.proposal, self.steal))

    def action_steal(self) -> None:
        """Ask why, if somebody else holds the job."""
        if self.proposal is not None and not self.steal and self._held(self.proposal):
            self.reason.display = True
            self.reason.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.steal = event.value.strip()
        self.reason.display = False
        self.repropose()

    def action_leave(self) -> None:
        self.dismiss(None)


def _effect(p: Proposal) -> Text:
    text = Text()
    for name, value in effect_rows(p):
        text.append(f"  {name:<14}", "dim")
        text.append(f"{value}\n")
    return text
