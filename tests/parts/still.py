"""A console on which nothing moves: the real control and screen over readings that were written once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from engine.act.action import Stage, Ticket
from engine.act.audit import Audit
from engine.control.control import Control
from engine.job.status import JobStatus, RankPlace
from engine.profile import catalog
from engine.telemetry.reading import Hello, Tick, decode
from engine.telemetry.snapshot import NodeState
from engine.telemetry.store import Store
from tui.app import RacksideApp

NOON = 1_764_676_800.0
GPUS, HOT = 8, ("n04", 5)


def record(**fields: Any) -> Hello | Tick:
    found = decode(json.dumps(fields).encode())
    assert isinstance(found, Hello | Tick)
    return found


def celsius(node: int, slot: int) -> float:
    """Rear slots run warmer, higher nodes too; one heatsink is clogged."""
    return 48 + 3 * node + (11 if slot >= 4 else 0) + slot % 4 + (12 if (node, slot) == (3, 5) else 0)


def still(folder: Path, down: Iterable[int] = (), job: bool = True, **more: Any) -> RacksideApp:
    """A console on h200x32-400g; nodes whose number is in `down` do not answer."""
    planned = catalog.cluster("h200x32-400g")
    cluster = msgspec.structs.replace(planned, poll_interval_s=3600.0)
    control = Control(cluster, {}, catalog.thermal_policy("margin"), Audit(folder / "audit.jsonl"), "ops@test")
    control.store = Store([(n.name, GPUS) for n in cluster.nodes])  # without the control's first, empty snapshot
    for moment in range(30):
        for number, node in enumerate(cluster.nodes):
            _feed(control, number, node.name, moment)
        control.store.publish(NOON + moment)
    for number in down:
        why = "no SSH server answers at ops@10.0.0.12:22 (connection refused)"
        control.store.set_state(cluster.nodes[number].name, NodeState.DOWN, why, NOON + 10)
    if job:
        status = _job([n.name for n in cluster.nodes])
        control.jobs.statuses[status.key] = status
    control.snapshot = control.store.publish(NOON + 30)
    _watched(control)
    for moment in (0, 20):  # what is amiss has lasted
        control.alarming.look(control.amiss(), NOON + 10 + moment)
    return RacksideApp(control, **more)


def _watched(control: Control) -> None:
    """The twin has seen a minute of the last readings, two kelvin below where they will settle."""
    s = control.snapshot.gpus
    for _ in range(60):
        control.watch.take(s["temperature_c"] + 2.0, s["power_w"], s["power_limit_w"], 1.0)


def _feed(control: Control, number: int, node: str, moment: int) -> None:
    now = NOON + moment
    if moment == 0:
        facts = [
            {
                "index": slot,
                "name": "NVIDIA H200",
                "uuid": f"GPU-{number}{slot}",
                "bus_id": f"00000000:{0x11 + 0x10 * slot:02X}:00.0",
                "memory_total_mib": 143771,
                "power_limit_min_w": 200,
                "power_limit_max_w": 700,
                "slowdown_c": 89,
            }
            for slot in range(GPUS)
        ]
        control.store.apply(node, record(hello=1, hostname=node, driver="570.86", gpus=facts), now)
        control.store.set_state(node, NodeState.LIVE, "", now)
    slots = range(GPUS)
    gpus = {
        "temperature_c": [round(celsius(number, slot) - 12 * 0.85**moment) for slot in slots],
        "memory_temperature_c": [round(celsius(number, slot) + 4) for slot in slots],
        "power_w": [640 + slot for slot in slots],
        "power_limit_w": [700] * GPUS,
        "sm_clock_mhz": [1905 if (node, slot) == HOT else 1980 for slot in slots],
        "utilization_pct": [100] * GPUS,
        "memory_used_mib": [98304] * GPUS,
        "throttle": [0x20 if (node, slot) == HOT and moment > 25 else 0 for slot in slots],
    }
    links = [{"gpu": slot, "kind": "nvlink", "name": f"NVLink {k}", "gb_s": 25} for slot in slots for k in (0, 1)]
    links += [{"gpu": -1, "kind": "nic", "name": f"mlx5_{k}", "gb_s": 50} for k in slots]
    rx = [1000] * 2 * GPUS + [1000] * GPUS
    tx = [1000 * (k + 1) for _ in slots for k in (0, 1)] + [1000 * (30 + k) for k in slots]
    processes = [{"gpu": slot, "pid": 4000 + slot, "name": "python", "memory_mib": 98304} for slot in slots]
    told = {"links": links, "processes": processes} if moment == 0 else {}
    control.store.apply(node, record(tick=moment + 1, time=now, gpus=gpus, rx_mb_s=rx, tx_mb_s=tx, **told), now)


def _job(nodes: list[str]) -> JobStatus:
    plan = catalog.plan("data-parallel")
    ranks = tuple(RankPlace(GPUS * n + slot, name, str(slot)) for n, name in enumerate(nodes) for slot in range(GPUS))
    return JobStatus(
        name="pretrain-8b",
        node=nodes[0],
        socket="/run/user/1000/rackside/pretrain-8b.sock",
        attached=True,
        framework="pytorch",
        world_size=32,
        global_batch=plan.global_batch,
        tokens_per_sample=4096,
        plan={"model": "llama3-8b", "plan": msgspec.to_builtins(plan)},
        can=frozenset({"microbatch", "rebalance"}),
        ranks=ranks,
        step=18_204,
        step_s=2.61,
        loss=2.114,
        tokens=plan.global_batch * 4096.0,
        microbatch=plan.optimizations.microbatch,
        microbatches=(plan.global_batch // 32 // plan.optimizations.microbatch,) * 32,
        last_step=NOON + 29,
    )


def ticket(app: RacksideApp, stage: Stage, **more: Any) -> Ticket:
    """An action in the session's list, as if it had been confirmed."""
    cells = [(3, slot) for slot in range(GPUS)]
    proposal = app.control.propose_throttle("n04", cells, 100.0)
    made = Ticket("t1", NOON + 12, "ops@test", proposal, stage, **more)
    app.control.tickets = (made,)
    return made
