"""Records to columns: states are kept apart from numbers, nothing is invented, nothing printed raw."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.telemetry.reading import Hello, ProbeError, ReadingState, Tick, decode, judge
from engine.telemetry.snapshot import NodeState
from engine.telemetry.store import STALE_TICKS, Store
from engine.telemetry.text import clean


def hello(gpus: int = 2, **more: Any) -> Hello:
    record = decode(
        json.dumps({"hello": 1, "hostname": "h", "gpus": [{"index": i} for i in range(gpus)], **more}).encode()
    )
    assert isinstance(record, Hello)
    return record


def tick(gpus: list[dict[str, Any]], at: float = 0.0, **more: Any) -> Tick:
    columns = {name: [gpu.get(name) for gpu in gpus] for gpu in gpus for name in gpu}
    record = decode(json.dumps({"tick": 1, "time": at, "gpus": columns, **more}).encode())
    assert isinstance(record, Tick)
    return record


@given(st.binary(max_size=300))
def test_any_bytes_are_a_record_or_a_sentence(line: bytes) -> None:
    try:
        decode(line)
    except ProbeError as error:
        assert str(error)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@given(
    st.sampled_from(["tick", "hello", "result", "released"]),
    st.dictionaries(
        st.sampled_from(["time", "gpus", "nics", "hooks", "trouble", "lost", "hostname", "state", "reason"]),
        json_values,
    ),
    json_values,
)
def test_any_json_is_a_record_or_a_sentence(kind: str, fields: dict[str, Any], value: Any) -> None:
    store = Store([("n", 2)])
    try:
        record = decode(json.dumps({kind: value, **fields}).encode())
    except ProbeError:
        return
    if isinstance(record, (Hello, Tick)):
        store.apply("n", record, 1.0)
        store.publish(1.0)


@given(st.sampled_from(["temperature_c", "power_w", "utilization_pct"]), st.none() | st.text(max_size=9) | st.floats())
def test_only_a_plausible_number_is_a_value(metric: str, reading: float | str | None) -> None:
    value, state = judge(metric, reading)
    assert math.isnan(value) == (state is not ReadingState.VALUE)
    if state is ReadingState.VALUE:
        assert value == reading


def test_each_state_is_counted_and_none_is_a_number() -> None:
    store = Store([("n", 2)])
    store.apply("n", hello(), 1)
    bad = {"temperature_c": 2112, "power_w": "unsupported", "utilization_pct": None, "sm_clock_mhz": "lost"}
    store.apply("n", tick([bad, {"temperature_c": 40}]), 1)
    snapshot = store.publish(1)
    assert np.isnan(snapshot.gpus["temperature_c"][0])
    assert snapshot.gpus["temperature_c"][1] == 40
    told = {name: snapshot.gpus.state(name, 0).value for name in bad}
    assert list(told.values()) == ["implausible", "unsupported", "absent", "lost"]
    assert snapshot.gpus.state("temperature_c", 1) is ReadingState.VALUE
    assert snapshot.nodes[0].dropped == 1
    assert store.states[ReadingState.IMPLAUSIBLE] == 1
    assert store.states[ReadingState.UNSUPPORTED] == 1


def test_a_snapshot_never_changes() -> None:
    store = Store([("n", 1)])
    store.apply("n", hello(1), 1)
    store.apply("n", tick([{"temperature_c": 40}]), 1)
    old = store.publish(1)
    store.apply("n", tick([{"temperature_c": 50}]), 2)
    assert store.publish(2).version == old.version + 1
    assert old.gpus["temperature_c"][0] == 40
    with pytest.raises(ValueError, match="read-only"):
        old.gpus["temperature_c"][0] = 1


def test_silence_makes_a_node_stale_and_says_for_how_long() -> None:
    store = Store([("n", 1)], interval_s=1.0)
    store.apply("n", tick([{"temperature_c": 40}]), 100)
    assert store.publish(100 + STALE_TICKS).nodes[0].state is NodeState.LIVE
    stale = store.publish(107).nodes[0]
    assert stale.state is NodeState.STALE
    assert "no sample for 7 s" in stale.reason
    gpus = store.publish(107).gpus
    assert (gpus["temperature_c"][0], gpus.state("temperature_c", 0)) == (40, ReadingState.STALE)
    store.set_state("n", NodeState.DOWN, "gone", 108)
    assert store.publish(108).gpus.state("temperature_c", 0) is ReadingState.LOST


def test_a_node_with_other_gpus_than_expected_keeps_everybody_in_place() -> None:
    store = Store([("a", 2), ("b", 2)])
    store.apply("b", hello(2), 1)
    store.apply("b", tick([{"temperature_c": 51}, {"temperature_c": 52}]), 1)
    store.publish(1)
    store.apply("a", hello(4), 1)
    store.apply("a", tick([{"temperature_c": t} for t in (41, 42, 43, 44)]), 1)
    snapshot = store.publish(2)
    assert list(snapshot.gpus["temperature_c"]) == [41, 42, 43, 44, 51, 52]
    assert snapshot.nodes[1].rows == range(4, 6)
    assert list(store.history("temperature_c", 4)[1]) == [51, 51]


def test_the_ring_keeps_the_newest() -> None:
    store = Store([("n", 1)], history=5)
    for second in range(12):
        store.apply("n", tick([{"temperature_c": 30 + second}]), second)
        store.publish(second)
    times, values = store.history("temperature_c", 0)
    assert list(times) == [7, 8, 9, 10, 11]
    assert list(values) == [37, 38, 39, 40, 41]


def test_history_from_before_is_taken_until_a_node_tells_something() -> None:
    store = Store([("n", 1)], history=5)
    store.publish(100)
    past = np.array([[30.0], [31.0], [32.0]])
    store.backfill(np.array([90.0, 91.0, 92.0]), {"temperature_c": past, "sm_clock_mhz": past[:2]})
    store.apply("n", tick([{"temperature_c": 40}]), 101)
    store.publish(101)
    times, values = store.history("temperature_c", 0)
    assert list(times) == [90, 91, 92, 101]
    assert list(values) == [30, 31, 32, 40]
    assert np.isnan(store.history("sm_clock_mhz", 0)[1]).all(), "of another shape: not taken"
    store.backfill(np.array([1.0]), {"temperature_c": np.array([[99.0]])})
    assert list(store.history("temperature_c", 0)[1]) == [30, 31, 32, 40]


def test_a_metric_left_out_has_not_changed_and_a_lost_connection_forgets_it() -> None:
    store = Store([("n", 2)])
    store.apply("n", hello(), 1)
    store.apply("n", tick([{"temperature_c": 40, "xid": 79}, {"temperature_c": 41, "xid": None}]), 1)
    store.apply("n", tick([{"temperature_c": 42}, {"temperature_c": 43}]), 2)
    assert store.publish(2).gpus["xid"][0] == 79
    store.set_state("n", NodeState.DOWN, "gone", 3)
    assert np.isnan(store.publish(3).gpus["xid"]).all()


def test_ticks_that_never_came_are_counted() -> None:
    store = Store([("n", 1)])
    for number in (1, 2, 5, 6):
        record = decode(json.dumps({"tick": number, "time": 1.0}).encode())
        assert isinstance(record, Tick)
        store.apply("n", record, 1.0)
    assert store.publish(1).nodes[0].missed == 2
    store.apply("n", hello(1), 2)  # a new probe counts from one again
    store.apply("n", tick([{"temperature_c": 40}]), 2)
    assert store.publish(2).nodes[0].missed == 2


@given(st.lists(st.none() | st.floats(-10, 1e6), min_size=3, max_size=3), st.floats(0.1, 60))
def test_only_rates_that_a_link_can_carry_are_rates(mb_s: list[float | None], peak: float) -> None:
    links = [{"gpu": 0, "kind": "nvlink", "name": f"NVLink {k}", "gb_s": peak} for k in range(3)]
    store = Store([("n", 1)])
    store.apply("n", tick([{"temperature_c": 40}], links=links, rx_mb_s=mb_s, tx_mb_s=mb_s), 1)
    table = store.publish(1).links
    for told, rate in zip(mb_s, table["rx_gb_s"], strict=True):
        fits = told is not None and 0 <= told / 1000 <= 1.1 * peak
        assert rate == pytest.approx(told / 1000) if told is not None and fits else np.isnan(rate)
    store.apply("n", tick([{"temperature_c": 40}], rx_mb_s=mb_s[:2], tx_mb_s=mb_s), 2)
    assert np.isnan(store.publish(2).links["tx_gb_s"]).all(), "a list of another length speaks of other links"


@given(st.text(max_size=300), st.integers(5, 80))
def test_text_from_nodes_is_harmless(text: str, limit: int) -> None:
    shown = clean(text, limit)
    assert len(shown) <= limit
    assert shown.isprintable()


def test_escapes_and_overrides_are_dropped() -> None:
    assert clean("\x1b[2J\x1b]0;owned\x07 gpu\u202e0\nnext") == "[2J]0;owned gpu0 next"
