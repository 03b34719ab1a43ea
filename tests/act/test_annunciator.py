"""Alarms as operators know them: delays, latching, acknowledging, shelving, floods, and the log that outlives them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.act import alarmlog
from engine.act.alarm import Event, Priority, Raised, State, What
from engine.act.alarmlog import AlarmLog, AlarmLogError
from engine.act.annunciator import Annunciator
from engine.act.group import MANY, grouped
from engine.control.alarming import Alarming
from engine.profile import catalog

RACKS = {f"n{i}": f"r{(i - 1) // 8 + 1}" for i in range(1, 81)}
XID = Raised("xid:n1:0", Priority.CRITICAL, "n1 GPU 0 told XID 79", "n1", 0)
ODD = Raised("odd:n1:3", Priority.NOTICE, "n1 GPU 3 is hotter than it should be", "n1", 3)


def hot(node: int, gpu: int, priority: Priority = Priority.WARNING) -> Raised:
    return Raised(f"heat:n{node}:{gpu}", priority, f"n{node} GPU {gpu} at 90 C", f"n{node}", 8 * (node - 1) + gpu)


def states(panel: Annunciator) -> dict[str, State]:
    return {a.key: a.state for a in panel.alarms}


def acknowledged(key: str, now: float, by: str = "ops@here") -> Event:
    return Event(now, key, What.ACKNOWLEDGED, by=by)


def test_heat_must_last_before_it_is_raised_and_be_gone_before_it_has_returned() -> None:
    panel, raised = Annunciator(RACKS), []
    for now in range(4):
        raised += panel.take([hot(1, 0)], float(now))
    assert [(e.what, e.time) for e in raised] == [(What.RAISED, 2.0)]
    for now in range(4, 8):
        assert panel.take([], float(now)) == []
    assert [e.what for e in panel.take([], 9.0)] == [What.RETURNED]
    assert panel.alarms == ()


def test_a_spike_raises_nothing() -> None:
    panel = Annunciator(RACKS)
    assert [panel.take([hot(1, 0)] if now % 2 else [], float(now)) for now in range(20)] == [[]] * 20


def test_a_critical_one_that_came_and_went_unseen_stays_to_be_seen() -> None:
    panel = Annunciator(RACKS)
    panel.take([XID, ODD], 0.0)
    panel.take([], 1.0)
    assert states(panel) == {"xid:n1:0": State.RETURNED}
    panel.decide(acknowledged("xid:n1:0", 2.0))
    assert panel.alarms == ()


def test_what_is_acknowledged_stands_below_what_is_new_and_goes_by_itself() -> None:
    panel = Annunciator(RACKS)
    panel.take([XID, ODD], 0.0)
    panel.decide(acknowledged("xid:n1:0", 1.0))
    first, second = panel.alarms
    assert (first.key, second.key, second.by) == ("odd:n1:3", "xid:n1:0", "ops@here")
    panel.take([ODD], 2.0)
    assert states(panel) == {"odd:n1:3": State.NEW}


def test_what_becomes_worse_is_new_again() -> None:
    panel = Annunciator(RACKS)
    for now in range(3):
        panel.take([hot(1, 0)], float(now))
    panel.decide(acknowledged("heat:n1:0", 3.0))
    assert panel.take([hot(1, 0)], 4.0) == []
    assert [e.what for e in panel.take([hot(1, 0, Priority.CRITICAL)], 5.0)] == [What.RAISED]
    assert states(panel) == {"heat:n1:0": State.NEW}


def test_an_old_acknowledgement_does_not_reach_a_newer_alarm() -> None:
    panel = Annunciator(RACKS)
    panel.take([XID], 100.0)
    panel.decide(acknowledged("xid:n1:0", 99.0))
    assert states(panel) == {"xid:n1:0": State.NEW}


def test_a_shelved_one_is_kept_off_until_its_time_and_comes_back_new() -> None:
    panel = Annunciator(RACKS)
    panel.take([XID], 0.0)
    panel.decide(Event(1.0, "xid:n1:0", What.SHELVED, text=XID.text, by="ops@here", until=60.0, reason="board ordered"))
    assert panel.take([XID], 2.0) == []
    assert panel.alarms == ()
    assert [(s.text, s.reason) for s in panel.shelved] == [(XID.text, "board ordered")]
    assert [e.what for e in panel.take([XID], 60.0)] == [What.RAISED]
    assert panel.shelved == ()


def test_one_alarm_for_a_hot_rack_not_64() -> None:
    panel = Annunciator(RACKS)
    everything = [hot(node, gpu) for node in range(1, 9) for gpu in range(8)]
    for now in range(3):
        panel.take(everything, float(now))
    (alarm,) = panel.alarms
    assert alarm.key == "heat:rack:r1:*"
    assert alarm.text == "rack r1: 64 GPUs are hot on 8 nodes; the first: n1 GPU 0 at 90 C"
    panel.decide(acknowledged(alarm.key, 3.0))
    panel.take(everything[:1], 4.0)
    assert states(panel) == {"heat:rack:r1:*": State.ACKNOWLEDGED}, "it lasts until its last member is gone"
    for now in range(5, 12):
        panel.take([], float(now))
    assert panel.alarms == ()


def test_a_whole_site_that_is_lost_is_one_alarm() -> None:
    down = [Raised(f"node:n{i}", Priority.CRITICAL, f"n{i}: no answer", f"n{i}") for i in range(1, 81)]
    (site,) = grouped(down, RACKS, ())
    assert site.text == "the site: 80 nodes do not answer; the first: n1: no answer"
    assert [r.key for r in grouped(down[:4], RACKS, ())] == [r.key for r in down[:4]]


def test_members_of_a_group_are_not_latched_beside_it() -> None:
    panel = Annunciator(RACKS)
    few = [replace(hot(1, gpu), key=f"slow:n1:{gpu}", priority=Priority.CRITICAL) for gpu in range(8)]
    for now in range(3):
        panel.take(few[:MANY], float(now))
    assert len(panel.alarms) == MANY
    for now in range(3, 6):
        panel.take(few, float(now))
    assert [a.key for a in panel.alarms] == ["slow:n1:*"]


@given(st.lists(st.tuples(st.integers(1, 80), st.integers(0, 7)), unique=True, max_size=200), st.booleans())
def test_a_group_hides_no_alarm_and_invents_none(places: list[tuple[int, int]], reversed_: bool) -> None:
    raised = [hot(*place) for place in places]
    found = grouped(raised[::-1] if reversed_ else raised, RACKS, ())
    assert len(found) <= max(MANY * 10, 1)
    assert bool(found) == bool(raised)
    assert all(r.node in {x.node for x in raised} for r in found)


def ended(log: Path) -> Alarming:
    """Another console on the same log, as it starts."""
    found = Alarming(catalog.cluster("h200x32"), AlarmLog(log, "h200x32"), "second@there")
    found.begin()
    return found


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "alarms.jsonl"


def test_ages_acknowledgements_and_the_shelf_outlive_the_console(log: Path) -> None:
    first = ended(log)
    first.look([XID, ODD, hot(1, 0)], 1000.0)
    first.look([XID, ODD, hot(1, 0)], 1002.0)
    first.acknowledge([XID.key], 1003.0)
    assert first.shelve(ODD.key, 3600.0, "dust, cleaned on Friday", 1003.0) == ""
    second = ended(log)
    second.look([], 1010.0)  # no node has been heard yet
    assert {a.key: (a.state, a.since) for a in second.standing} == {
        XID.key: (State.ACKNOWLEDGED, 1000.0),
        "heat:n1:0": (State.NEW, 1002.0),
    }
    assert [s.reason for s in second.shelved] == ["dust, cleaned on Friday"]
    second.look([XID], 1041.0)
    assert [a.key for a in second.standing] == [XID.key], "what is not there any more when the nodes are heard is gone"


def test_two_consoles_share_what_is_decided_and_tell_it_once(log: Path) -> None:
    first, second = ended(log), ended(log)
    first.look([XID], 1000.0)
    second.look([XID], 1000.5)
    first.acknowledge([XID.key], 1001.0)
    second.look([XID], 1001.5)
    assert [(a.state, a.by) for a in second.standing] == [(State.ACKNOWLEDGED, "second@there")]
    assert log.read_text().count('"raised"') == 1


def test_a_shelf_wants_a_reason_and_an_end(log: Path) -> None:
    panel = ended(log)
    panel.look([XID], 1000.0)
    assert "why" in panel.shelve(XID.key, 60.0, "  ")
    assert "12 h" in panel.shelve(XID.key, 1e6, "later")
    assert len(panel.standing) == 1
    panel.shelve(XID.key, 60.0, "board ordered")
    panel.unshelve(XID.key)
    panel.look([XID], 1001.0)
    assert len(panel.standing) == 1


def test_damaged_lines_and_other_clusters_are_left_out(log: Path) -> None:
    log.write_bytes(
        b'{"cluster": "h200x32"}\n\xff\xfe\n[]\n{"cluster": "h200x32", "key": 3, "what": "raised", "time": 1}\n'
    )
    AlarmLog(log, "another").write(Event(1.0, XID.key, What.RAISED, XID.priority, XID.text))
    with log.open("ab") as file:
        file.write(b'{"cluster": "h200x32", "time": 5, "key": "cut')
    panel = ended(log)
    assert panel.standing == ()
    panel.look([XID], 1000.0)  # the line that was cut takes no other with it
    assert [a.key for a in ended(log).standing] == [XID.key]


def test_a_log_that_cannot_be_written_is_an_alarm(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    panel = ended(tmp_path / "file" / "alarms.jsonl")
    panel.look([XID], 1000.0)
    panel.look([XID], 1001.0)
    assert any("cannot be written" in a.text for a in panel.standing)
    with pytest.raises(AlarmLogError):
        AlarmLog(tmp_path / "file" / "alarms.jsonl", "x").write(acknowledged("k", 1.0))


def test_only_its_owner_reads_the_log(log: Path) -> None:
    ended(log).look([XID], 1000.0)
    assert oct(os.stat(log).st_mode & 0o777) == "0o600"


def test_a_large_log_is_set_aside_and_nothing_that_stands_is_lost(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ended(log)
    for now in range(0, 200, 2):
        first.look([XID], float(now))
        first.look([], float(now + 1))
    first.look([XID], 500.0)
    first.acknowledge([XID.key], 501.0)
    monkeypatch.setattr(alarmlog, "LARGE", 1000)
    second = ended(log)
    assert [(a.state, a.since) for a in second.standing] == [(State.ACKNOWLEDGED, 500.0)]
    assert len(log.read_text().splitlines()) == 3
    assert len(log.with_suffix(".old").read_text().splitlines()) > 200
    first.look([XID], 502.0)
    first.acknowledge([XID.key], 503.0)  # goes to the new file, though the old one was open before
    assert len(log.read_text().splitlines()) == 4
