"""The bands of a predicted effect: from fits that anyone can rerun, then from this console's own errors."""

from __future__ import annotations

import pytest

from engine.act.action import Microbatch, Outlook, Pause, Proposal
from engine.act.bands import CHANGED_STEP, POWER, Bands, learned
from tui.widgets.figures import effect_rows

CHANGE = Proposal("m", Microbatch("job", 2), Outlook(2.0, 100, 80, 9000.0), Outlook(2.2, 90, 78, 9500.0), "")


def measured(step_s: float, number: int) -> dict[str, object]:
    return {
        "id": str(number),
        "action": "microbatch",
        "predicted": {"after": {"step_s": 2.2}},
        "measured": {"step_s": step_s},
    }


def test_until_enough_was_measured_the_fits_speak() -> None:
    few = learned([measured(2.0, n) for n in range(4)])
    assert few.of(CHANGE).after.step_band == CHANGED_STEP
    assert few.of(CHANGE).after.power_band == POWER
    many = learned([measured(2.2 / (1 + e), n) for n, e in enumerate((0.01, -0.02, 0.03, 0.01, 0.02, -0.01))])
    assert many.of(CHANGE).after.step_band == pytest.approx(0.025, abs=0.006)


def test_a_pause_has_no_band() -> None:
    pause = Proposal("p", Pause("job", 5.0), CHANGE.before, CHANGE.after, "")
    assert Bands().of(pause) is pause


def test_every_figure_of_the_panel_has_its_range() -> None:
    rows = dict(effect_rows(Bands().of(CHANGE)))
    assert rows["step time"] == "2.00 -> 2.20 s (+10.0%)  1.99-2.41"
    assert rows["GPU power"] == "9.0 -> 9.5 kW (+5.6%)  9.1-9.9"
    assert rows["tokens/s"].endswith("81-99")
    assert rows["energy a step"].endswith("18.8-23.0")
