"""The guard: hotter rules first, dwell, rate limit, once a while, restored only where the forecast stays cool."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from engine.act.guard import Guard, Sight, share_at
from engine.model.forecast import Forecast
from engine.profile import catalog
from tui.cli import main

NODES = ("a", "a", "b", "b")


def sight(time: float, *celsius: float, held: tuple[int, ...] = ()) -> Sight:
    now = np.array(celsius)
    flat, inf = now[:, None], np.full(4, np.inf)
    found = Forecast(np.array([0.0]), flat, flat, flat, np.full(4, 87.0), now, np.ones(4), inf)
    none = np.zeros(4, bool)
    slowed = np.isin(np.arange(4), held)
    return Sight(time, now, np.full(4, 89.0), slowed, none, np.full(4, np.nan), found)


def seed() -> Guard:
    return Guard(catalog.thermal_policy("seed-85-95"), NODES)


def looked(guard: Guard, seconds: range, *celsius: float) -> list[Any]:
    return [wish for s in seconds for wish in guard.look(sight(float(s), *celsius))]


def test_the_hotter_rule_is_tested_first_and_must_hold_for_a_while() -> None:
    guard = seed()
    assert looked(guard, range(3), 96, 60, 86, 60) == []
    first, second = guard.look(sight(3.0, 96, 60, 86, 60))
    assert (first.rule.name, first.node, first.rows) == ("pause", "a", (0,))
    assert (second.rule.name, second.node, second.rows) == ("halve-and-throttle", "b", (2,))
    assert [m.text() for m in second.measures] == ["power limit to 80% of the default"], (
        "the job is changed once a tick"
    )


def test_a_spike_of_a_second_does_nothing() -> None:
    guard = seed()
    for s in range(60):
        assert guard.look(sight(float(s), 86 if s % 3 == 0 else 70, 60, 60, 60)) == []


def test_it_acts_again_only_after_a_while_and_harder() -> None:
    guard = seed()
    (wish,) = looked(guard, range(4), 86, 60, 60, 60)
    guard.acted(wish, wish.measures[-1], "one", 3.0)
    assert looked(guard, range(4, 63), 86, 60, 60, 60) == []
    (again,) = guard.look(sight(63.0, 86, 60, 60, 60))
    assert (again.level, share_at(0.8, again.level)) == (1, pytest.approx(0.64))


def test_no_more_than_so_many_an_hour() -> None:
    guard, acted = seed(), []
    for s in range(3600):
        for wish in guard.look(sight(float(s), 86, 60, 60, 60)):
            guard.acted(wish, wish.measures[0], str(s), float(s))
            acted.append(s)
    assert len(acted) == guard.policy.most_an_hour
    assert looked(guard, range(3600, 3660), 86, 60, 60, 60), "the first is an hour old"


def test_what_was_done_comes_back_when_it_has_been_cool_for_long() -> None:
    guard = seed()
    (wish,) = looked(guard, range(4), 86, 60, 60, 60)
    guard.acted(wish, wish.measures[0], "one", 3.0)
    looked(guard, range(4, 400), 81, 60, 60, 60)
    assert guard.calm(399.0) is None, "within the hysteresis"
    looked(guard, range(400, 750), 70, 60, 60, 60)
    done = guard.calm(749.0)
    assert done is not None
    guard.not_yet(done, 749.0)
    looked(guard, range(750, 1000), 70, 60, 60, 60)
    assert guard.calm(999.0) is None
    looked(guard, range(1000, 1100), 70, 60, 60, 60)
    assert guard.calm(1099.0) == done
    guard.undone(done, 1099.0)
    assert guard.done == []


def test_an_hour_with_a_failed_fan(capsys: pytest.CaptureFixture[str]) -> None:
    """No GPU above 95 C, at least 80 % less throttled, at least 5 % more tokens."""
    assert main(["bench", "guard", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    off, on = told["off"], told["on"]
    assert on["max_temperature_c"] < 95
    assert on["throttled_gpu_s"] < 0.2 * off["throttled_gpu_s"]
    assert on["tokens"] > 1.05 * off["tokens"]
    assert off["actions"] == []
