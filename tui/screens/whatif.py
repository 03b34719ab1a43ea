"""What would have come of an action at a moment of a recording, beside what came."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.binding import BindingType

from engine.control.whatif import WhatIf
from tui.screens.panel import Panel
from tui.widgets.figures import DASH, age, clock, number


class WhatIfScreen(Panel[None]):
    """Any of escape, q and enter closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,q,enter", "dismiss", "close")]

    def __init__(self, found: WhatIf, plain: bool) -> None:
        super().__init__(plain)
        self.found = found

    def on_mount(self) -> None:
        self.body.draw(text(self.found))


def text(found: WhatIf) -> Text:
    """A row a moment after it: the hottest GPU and all GPUs' power, recorded and by the twin."""
    out = Text()
    out.append(f"What if, at {clock(found.moment)}: {found.proposal.title}\n", "bold")
    out.append(f"{found.proposal.scope}. Nothing is sent: this is a recording.\n\n", "dim")
    out.append(f"{'':<8}{'hottest GPU':^40}{'power of all GPUs':^36}\n", "bold")
    heads = f"{'after':<8}{'recorded':>10}{'twin':>9}{'with it':>10}{'9 of 10':>11}"
    out.append(f"{heads}{'recorded':>13}{'twin':>11}{'with it':>12}\n", "dim")
    for row in found.rows:
        band = DASH if row.low_c != row.low_c else f"{row.low_c:.0f}-{row.high_c:.0f}"
        out.append(f"{age(row.after_s):<8}")
        out.append(f"{number(row.recorded_c, 0, 'C'):>10}{number(row.without_c, 0, 'C'):>9}")
        out.append(f"{number(row.with_c, 0, 'C'):>10}", "bold")
        out.append(f"{band:>11}")
        out.append(f"{_kw(row.recorded_w):>13}{_kw(row.without_w):>11}")
        out.append(f"{_kw(row.with_w):>12}\n", "bold")
    step = found.proposal.after.step_s
    if step is not None and found.proposal.before.step_s is not None:
        out.append(f"\nThe job's step: {found.proposal.before.step_s:.2f} s without it, {step:.2f} s with it.\n", "dim")
    out.append("\nescape leaves", "bold")
    return out


def _kw(watts: float) -> str:
    return number(watts / 1000, 1, "kW")
