"""What readings give cause to alarm about: raised at the policy's line, held by a deadband."""

from __future__ import annotations

import json
from typing import Any

from engine.act.alarm import Priority, Raised
from engine.act.detect import causes
from engine.profile import catalog
from engine.telemetry.reading import decode
from engine.telemetry.snapshot import NodeState, Snapshot
from engine.telemetry.store import Store

MARGIN = catalog.thermal_policy("margin")


class Watched:
    """A store of one node, its alarms carried from one snapshot to the next."""

    def __init__(self, gpus: int = 2, policy: str = "margin") -> None:
        self.store, self.gpus, self.now = Store([("n1", gpus)]), gpus, 0.0
        self.policy, self.standing = catalog.thermal_policy(policy), ()
        self.store.apply(
            "n1",
            decode(json.dumps({"hello": 1, "hostname": "n1", "gpus": [{"index": i} for i in range(gpus)]}).encode()),
            0.0,
        )  # type: ignore[arg-type]
        self.store.set_state("n1", NodeState.LIVE, "", 0.0)

    standing: tuple[Raised, ...]

    def reads(self, celsius: list[float | None], job: dict[str, str] | None = None, **more: Any) -> tuple[Raised, ...]:
        self.now += 1
        gpus = {"temperature_c": celsius, "throttle": [more.get("throttle", 0)] * len(celsius)}
        gpus |= more.get("columns", {})
        record = {"tick": 1, "time": self.now, "gpus": gpus, "trouble": more.get("trouble"), **_sent(more)}
        self.store.apply("n1", decode(json.dumps(record).encode()), self.now)  # type: ignore[arg-type]
        return self.look(job)

    def look(self, job: dict[str, str] | None = None) -> tuple[Raised, ...]:
        snapshot: Snapshot = self.store.publish(self.now)
        keys = {r.key for r in self.standing}
        found = causes(snapshot, self.policy, [89.0] * self.gpus, job or {}, keys)
        self.standing = tuple(sorted(found, key=lambda r: r.priority))
        return self.standing


def _sent(more: dict[str, Any]) -> dict[str, Any]:
    """`nics` GB/s sent by each, on ports of 50 GB/s."""
    rates = more.get("nics", ())
    links = [{"gpu": -1, "kind": "nic", "name": f"mlx5_{port}", "gb_s": 50} for port in range(len(rates))]
    return {"links": links, "tx_mb_s": [1000 * rate for rate in rates], "rx_mb_s": [0] * len(rates)}


def test_heat_is_measured_against_the_boards_own_slowdown_point() -> None:
    rack = Watched()
    assert rack.reads([82.9, None]) == ()
    (one,) = rack.reads([83.5, None])
    assert (one.priority, one.node, one.row) == (Priority.WARNING, "n1", 0)
    assert "n1 GPU 0 at 84 C, slows itself at 89 C (policy margin: throttle)" in one.text
    (one,) = rack.reads([89.0, None])
    assert one.priority is Priority.CRITICAL


def test_an_alarm_does_not_flutter() -> None:
    rack = Watched()
    rack.reads([84, 40])
    for celsius in (82.5, 83.5, 81.5, 83.1):
        assert len(rack.reads([celsius, 40])) == 1
    assert rack.reads([80.9, 40]) == ()


def test_the_seeds_policy_tests_95_before_85() -> None:
    """S14: as first written, the rule for 95 C could never run."""
    rack = Watched(policy="seed-85-95")
    assert "halve-and-throttle" in rack.reads([90, None])[0].text
    assert "pause" in rack.reads([96, None])[0].text


def test_a_lost_node_a_trouble_and_a_job_that_went_are_critical() -> None:
    rack = Watched()
    found = rack.reads([50, 50], trouble="GPU 1 fell off the bus")
    assert [a.priority for a in found] == [Priority.CRITICAL]
    assert "fell off the bus" in found[0].text
    rack.store.set_state("n1", NodeState.DOWN, "the connection was lost", rack.now)
    found = rack.look(job={"n1:sock": "Job run on n1: it ended without saying goodbye"})
    assert {a.key for a in found} == {"node:n1", "job:n1:sock"}
    assert all(a.priority is Priority.CRITICAL for a in found)


def test_a_gpu_that_its_board_slows_is_named_with_the_reason() -> None:
    (found, other) = Watched().reads([70, 70], throttle=0x40)
    assert "slowed by its own hardware (hardware thermal)" in found.text
    assert other.key != found.key


def test_a_power_cap_is_no_alarm() -> None:
    assert Watched().reads([70, 70], throttle=0x4) == ()


def test_what_a_board_says_of_itself_is_an_alarm() -> None:
    found = Watched().reads([50, 50], columns={"xid": [None, 79], "ecc_uncorrected": [2, 0], "remap_pending": [0, 0]})
    assert [a.text for a in found] == [
        "n1 GPU 1 told critical event XID 79: look it up in the driver's log",
        "n1 GPU 0 has 2 uncorrected memory errors since the driver started",
    ]


def test_the_most_urgent_stands_first() -> None:
    rack = Watched()
    rack.reads([84, 40])
    found = rack.reads([84, 90])
    assert [a.priority for a in found] == [Priority.CRITICAL, Priority.WARNING]


def test_loaded_links_are_one_notice_a_node_with_the_remedies() -> None:
    """S13: above 70 % of the peak; below 65 % it ends."""
    rack = Watched()
    rack.reads([50, 50], nics=[0, 0, 0])
    assert rack.reads([50, 50], nics=[30, 34, 10]) == ()
    (found,) = rack.reads([50, 50], nics=[36, 38, 10])
    assert found.priority is Priority.NOTICE
    assert "n1 2 nic links, most of all mlx5_1, at 76% of 50 GB/s" in found.text
    assert "GPUDirect RDMA" in found.text
    assert len(rack.reads([50, 50], nics=[30, 34, 10])) == 1
    assert rack.reads([50, 50], nics=[30, 31, 10]) == ()
