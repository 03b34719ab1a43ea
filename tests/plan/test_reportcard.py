"""The report card: every figure is there, the list is data, and the arithmetic is the arithmetic."""

from __future__ import annotations

import re

import pytest

from engine.control import offline
from engine.plan.reportcard import Claim, Claims, Measure, reportcard


def test_every_figure_is_there() -> None:
    lines = offline.report()
    assert {re.match(r"S\d+", line.id).group() for line in lines} == {f"S{n}" for n in range(1, 18)}  # type: ignore[union-attr]
    assert {line.verdict for line in lines} <= {
        "within",
        "outside",
        "contradicted by arithmetic",
        "not a figure of the model",
    }
    for line in lines:
        assert line.why or line.value is not None, line.id
        if line.verdict in ("within", "outside"):
            assert line.value is not None, line


def test_the_templates_win_where_the_text_says() -> None:
    lines = {line.id: line for line in offline.report()}
    assert lines["S11-h200"].verdict == "within", lines["S11-h200"]
    assert lines["S11-h100"].verdict == "within", lines["S11-h100"]


def test_what_contradicts_itself_is_said_to() -> None:
    lines = {line.id: line for line in offline.report()}
    assert lines["S9-time"].value == pytest.approx(0.28125)
    assert lines["S9-energy"].value == pytest.approx(-0.1714, abs=1e-4)
    assert lines["S7"].value == pytest.approx(-0.0614, abs=1e-3)
    assert {lines[n].verdict for n in ("S7", "S9-time", "S9-energy")} == {"contradicted by arithmetic"}
    assert lines["S6"].value == pytest.approx(88.9, abs=0.1)
    assert lines["S14"].value == "pause"


def test_a_figure_near_enough_is_within_and_one_further_off_is_not() -> None:
    near = Claim(id="a", claim="a", claimed=10.5, tolerance=0.05, measure=Measure(product=(2.0, 5.0)))
    far = Claim(id="b", claim="b", claimed=10.6, tolerance=0.05, measure=Measure(product=(2.0, 5.0)))
    assert [line.verdict for line in reportcard(Claims(claims=(near, far)))] == ["within", "outside"]
