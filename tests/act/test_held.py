"""Limits that are held, and those that no longer read back."""

from __future__ import annotations

import json
from dataclasses import replace

from engine.act.action import Stage, Throttle, Ticket
from engine.act.held import KEPT, SETTLED_S, drifted, kept, leased, limits
from engine.telemetry.reading import decode
from engine.telemetry.snapshot import NodeState, Snapshot
from engine.telemetry.store import Store
from tests.act.test_audit import TICKET

SET = replace(
    TICKET, stage=Stage.DONE, time=100.0, proposal=replace(TICKET.proposal, action=Throttle({"n1": {1: 500.0}}))
)


def back(stage: Stage = Stage.DONE) -> Ticket:
    action = Throttle({"n1": {1: 700.0}}, restore=True)
    return replace(SET, id="t2", time=200.0, stage=stage, proposal=replace(SET.proposal, action=action, undoes=SET.id))


def reading(watts: list[float | None], now: float, state: NodeState = NodeState.LIVE) -> Snapshot:
    store = Store([("n1", 2)])
    facts = [{"index": 0}, {"index": 1}]
    store.apply("n1", decode(json.dumps({"hello": 1, "hostname": "h", "gpus": facts}).encode()), now)  # type: ignore[arg-type]
    tick = {"tick": 1, "time": now, "gpus": {"power_limit_w": watts}}
    store.apply("n1", decode(json.dumps(tick).encode()), now)  # type: ignore[arg-type]
    if state is not NodeState.LIVE:
        store.set_state("n1", state, "", now)
    return store.publish(now)


def test_a_limit_that_reads_back_is_no_alarm() -> None:
    assert drifted(reading([700, 500.4], 150.0), [SET]) == []
    assert drifted(reading([700, 700], 100.0 + SETTLED_S), [SET]) == [], "the reading may be older than the command"
    assert drifted(reading([700, None], 150.0), [SET]) == [], "not read is not changed"
    assert drifted(reading([700, 700], 150.0, NodeState.STALE), [SET]) == []


def test_a_limit_that_is_gone_is_named() -> None:
    (found,) = drifted(reading([700, 700], 150.0), [SET])
    assert found.text.startswith("n1: a limit set here is gone: GPU 1 reads 700 W, not 500.")
    assert found.node == "n1"


def test_what_was_given_back_or_undone_is_not_held() -> None:
    assert limits([SET]) == {("n1", 1): (500.0, 100.0)}
    assert limits([SET, back()]) == {}
    assert limits([SET, back(Stage.FAILED)]) == {("n1", 1): (500.0, 100.0)}
    assert limits([replace(SET, stage=Stage.UNDONE)]) == {}
    assert drifted(reading([700, 700], 250.0), [SET, back()]) == []


def test_an_undone_throttle_leaves_the_one_before_it_held() -> None:
    action = Throttle({"n1": {1: 600.0}})
    first = replace(SET, id="t0", time=50.0, proposal=replace(SET.proposal, action=action))
    assert limits([first, SET, back()]) == {("n1", 1): (600.0, 50.0)}
    assert leased([first, SET, back()]) == {("n1", 1)}
    assert leased([replace(SET, proposal=replace(SET.proposal, action=replace(action, permanent=True)))]) == set()


def test_a_console_remembers_the_newest_and_what_is_still_held() -> None:
    later = [replace(SET, id=f"l{i}", time=200.0 + i, stage=Stage.FAILED) for i in range(KEPT)]
    on_its_way = replace(SET, id="p", stage=Stage.PENDING)
    assert kept(later) == tuple(later)
    undone = replace(SET, id="u", stage=Stage.UNDONE)
    assert kept([undone, SET, on_its_way, *later]) == (SET, on_its_way, *later)
    assert kept([SET, replace(SET, id="again", time=150.0), *later])[0].id == "again", "the later one holds it all"
