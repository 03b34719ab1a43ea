"""A long shift, shortly: memory does not grow with what comes and goes (`rackside bench soak` is the whole day)."""

from __future__ import annotations

import pytest

from engine.act import held
from engine.control import jobs
from tui import soak_bench

MOST = 0.015
"""Share of its objects that the console may gain in a quarter of the run: a leaking footer gains 6 %, the sound one
0.6 % either way."""
QUARTER_S = 102
"""Twice through the keys, so that the same is on the screen in each."""


def test_a_shift_leaves_no_memory_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "KEPT", 20)  # what is bounded is full before it is looked at
    monkeypatch.setattr(jobs, "GONE_KEPT", 5)
    monkeypatch.setattr(soak_bench, "SAMPLES", 24)
    monkeypatch.setattr(soak_bench, "PRESS_S", 3)
    found = soak_bench.soaked(4 * QUARTER_S)
    before, after = found["blocks"]
    assert after - before < MOST * before, soak_bench.text(found)
