"""`rackside bench soak`: hours of the console in as much time as they take to draw, and what its memory grows by.

The console, its engine and its screen are the real ones, without a terminal; each snapshot is a second later than the
one before, and the next one comes when it is handled. The rack is the simulator's. All that comes and goes on a long
shift does so all the time: nodes and jobs are lost and return, boards are held back by heat, alarms are seen and
shelved, limits are set and taken back, panes change.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from textual._styles_cache import StylesCache
from textual.pilot import Pilot

from engine.act.audit import Audit
from engine.control.control import Control
from engine.job.status import JobStatus
from engine.profile import catalog
from engine.sim.many import hello, links
from engine.sim.nvml import SW_THERMAL
from engine.sim.rack import Demand, Rack
from engine.telemetry.reading import FRAME, GpuResult, LinkFacts, Result, Tick, decode
from engine.telemetry.snapshot import NodeState
from engine.telemetry.source import SourceError
from engine.telemetry.store import Store
from engine.telemetry.streams import Reader, Writer
from tui.app import RacksideApp
from tui.output import progress

CLUSTER, PLAN, MODEL = "h200x32-400g", "data-parallel", "llama3-8b"
SIZE = (80, 24)
GPUS = 8
HOUR_S = 3600
ACT_S, JOB_S, OUTAGE_S, PRESS_S = 5, 20, 60, 7
"""How often, in seconds: an action, another job, a node that is lost for ten of them, a key."""
STEP_S = 2.0
KEYS = (
    *("1", "2", "v", "v", "3", "4", "asterisk", "5", "6", "c", "x", "down", "n", "plus", "minus", "tab"),
    *("t", "escape", "question_mark", "escape", "f", "escape", "escape"),
)
SAMPLES = 80
"""How often memory is looked at over the whole."""


class Stand:
    """A node: takes power limits as a probe does."""

    def __init__(self, rack: Rack, first: int) -> None:
        self._rack, self._first = rack, first

    async def run(self, store: Store) -> None:
        await asyncio.Event().wait()

    async def command(self, command: dict[str, Any], timeout_s: float) -> Result:
        given = command["gpus"]
        wanted = given if isinstance(given, Mapping) else dict.fromkeys(given, 700.0)
        found = {}
        for index, watts in wanted.items():
            row = self._first + int(index)
            found[str(index)] = GpuResult(float(self._rack.limit_w[row]), float(watts), float(watts))
            self._rack.limit_w[row] = watts
        return Result(str(command["id"]), "done", gpus=found)

    async def open_job_socket(self, path: str) -> tuple[Reader, Writer]:
        raise SourceError("no job listens here")


class Shift:
    """The rack, its nodes and the console's control; `second` moves all of it on."""

    def __init__(self, folder: Path, seconds: int) -> None:
        cluster = msgspec.structs.replace(catalog.cluster(CLUSTER), poll_interval_s=1e6)
        self.rack = Rack(cluster)
        self.names = [n.name for n in cluster.nodes]
        self.now, self.past = time.time() - seconds, 0
        sources: dict[str, Any] = {name: Stand(self.rack, GPUS * i) for i, name in enumerate(self.names)}
        audit = Audit(folder / "audit.jsonl")
        self.control = Control(cluster, sources, catalog.thermal_policy("margin"), audit, "soak")
        self.control.store = Store([(name, GPUS) for name in self.names])
        self._chance = np.random.default_rng(1)
        for number in range(len(self.names)):
            self._greet(number)
        self._job = self._began(0)

    def _greet(self, number: int) -> None:
        found: Any = decode(hello(number).strip().removeprefix(FRAME))
        self.control.store.apply(self.names[number], found, self.now)
        self.control.store.set_state(self.names[number], NodeState.LIVE, "", self.now)

    def _began(self, number: int) -> JobStatus:
        plan, name = catalog.plan(PLAN), f"run-{number}"
        m, batch = plan.optimizations.microbatch, plan.global_batch
        return JobStatus(
            name,
            self.names[0],
            f"/run/{name}.sock",
            attached=True,
            world_size=32,
            global_batch=batch,
            tokens_per_sample=4096,
            plan={"model": MODEL, "plan": msgspec.to_builtins(plan)},
            can=frozenset({"microbatch", "rebalance"}),
            step_s=STEP_S,
            microbatch=m,
            microbatches=(batch // 32 // m,) * 32,
        )

    async def second(self) -> None:
        self.now, self.past = self.now + 1.0, self.past + 1
        second = self.past
        load = 0.7 + 0.3 * np.sin(second / 300) + 0.02 * self._chance.standard_normal(GPUS * len(self.names))
        busy, none = np.clip(load, 0.0, 1.0), np.zeros(GPUS * len(self.names))
        self.rack.demand = replace(Demand.idle(len(none)), busy=busy, activity=busy)
        self.rack.advance(1.0)
        lost, gone = second // OUTAGE_S % len(self.names), second % OUTAGE_S < 10
        for number, name in enumerate(self.names):
            if number == lost and second % OUTAGE_S == 0:
                self.control.store.set_state(name, NodeState.DOWN, "its switch is gone", self.now)
            elif number == lost and second % OUTAGE_S == 10:
                self._greet(number)
            if number != lost or not gone:
                self.control.store.apply(name, self._tick(number), self.now)
        self._train(second)
        await self.control.look(self.now)
        if second % ACT_S == 0:
            self._act(second // ACT_S)

    def _tick(self, number: int) -> Tick:
        rack, rows = self.rack, slice(GPUS * number, GPUS * (number + 1))
        held = np.where((np.arange(GPUS) == self.past // 40 % GPUS) & (number == 3), SW_THERMAL, 0)
        columns: dict[str, Any] = {
            "temperature_c": rack.temperature_c[rows].round().tolist(),
            "power_w": rack.power_w[rows].round(1).tolist(),
            "power_limit_w": rack.limit_w[rows].tolist(),
            "sm_clock_mhz": rack.clock_mhz[rows].round().tolist(),
            "utilization_pct": [100.0] * GPUS,
            "memory_used_mib": [98304.0] * GPUS,
            "throttle": held.tolist(),
        }
        wires = tuple(msgspec.convert(link, LinkFacts) for link in links()) if self.past % OUTAGE_S in (1, 10) else None
        rates: list[float | None] = (20_000 * self._chance.random(len(links()))).tolist()
        return Tick(self.past, self.now, columns, links=wires, rx_mb_s=rates, tx_mb_s=rates)

    def _train(self, second: int) -> None:
        """A step each second; now and then the job is gone and another one comes, well or badly ended."""
        jobs = self.control.jobs
        if second % JOB_S == 0:
            number = second // JOB_S
            jobs._publish(replace(self._job, attached=False, reason="it was killed" if number % 3 == 0 else ""))
            self._job = self._began(number)
        recent = (*self._job.recent_step_s, STEP_S)[-120:]
        self._job = replace(self._job, step=second, loss=2.0 + 1 / second, last_step=self.now, recent_step_s=recent)
        jobs._publish(self._job)

    def _act(self, number: int) -> None:
        """A limit on a node, then another, which is undone; now and then alarms are seen and one is shelved."""
        control = self.control
        control.arming.arm()
        undo = control.propose_undo() if number % 3 == 2 else None
        cells = [(number // 3 % len(self.names), slot) for slot in range(GPUS)]
        proposal = undo or control.propose_throttle("a node", cells, to_w=500.0 + 10 * (number % 7))
        if not proposal.refusal:
            control.confirm(proposal)
        if number % 11 == 0:
            shown = [a.key for a in control.alarms]
            control.alarming.acknowledge(shown[1:], self.now)
            for key in shown[:1]:
                control.alarming.shelve(key, 30.0, "the soak", self.now)


async def _run(folder: Path, seconds: int) -> dict[str, Any]:
    shift = Shift(folder, seconds)
    app = RacksideApp(shift.control)
    began, cpu, samples = time.monotonic(), time.process_time(), []
    async with app.run_test(size=SIZE) as pilot:
        for second in range(1, seconds + 1):
            await shift.second()
            await _drawn(pilot, second)
            if second % max(1, seconds // SAMPLES) == 0:
                samples.append(_memory(second))
                mib = samples[-1][1] / 2**20
                progress(f"hour {second / HOUR_S:.2f} of {seconds / HOUR_S:.2f}, {mib:.1f} MiB")
    took = time.monotonic() - began
    progress()
    return grown(samples, seconds) | {"took_s": took, "ms_a_snapshot": 1e3 * (time.process_time() - cpu) / seconds}


async def _drawn(pilot: Pilot[None], second: int) -> None:
    if second % PRESS_S == 0:
        await pilot.press(KEYS[second // PRESS_S % len(KEYS)])
    drawn = asyncio.Event()
    pilot.app.call_later(drawn.set)
    await drawn.wait()


def _memory(second: int) -> tuple[int, int, int]:
    """The second, bytes in memory, blocks that Python holds; without what a cache of Textual's keeps of widgets that
    are gone, which is bounded but takes an hour to fill."""
    StylesCache.get_inner_outer.cache_clear()
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return second, pages * os.sysconf("SC_PAGE_SIZE"), sys.getallocatedblocks()


def grown(samples: list[tuple[int, int, int]], seconds: int) -> dict[str, Any]:
    """What was in memory in the third and in the last quarter of the run, in the mean, and what it grew by an hour."""
    at, rss, blocks = np.array(samples, float).T
    last = at > 0.75 * seconds
    third = (at > 0.5 * seconds) & ~last
    hours = seconds / 4 / HOUR_S
    mib = [float(rss[of].mean()) / 2**20 for of in (third, last)]
    held = [float(blocks[of].mean()) for of in (third, last)]
    return {
        "hours": seconds / HOUR_S,
        "snapshots": seconds,
        "rss_mib": mib,
        "rss_mib_an_hour": (mib[1] - mib[0]) / hours,
        "blocks": held,
        "blocks_an_hour": (held[1] - held[0]) / hours,
    }


def soaked(seconds: int) -> dict[str, Any]:
    """A shift of so many seconds."""
    with tempfile.TemporaryDirectory(prefix="rackside-soak") as folder:
        return asyncio.run(_run(Path(folder), seconds))


def text(told: dict[str, Any]) -> str:
    """To read."""
    (rss, rss_end), (blocks, blocks_end) = told["rss_mib"], told["blocks"]
    return "\n".join(
        [
            f"{told['hours']:.1f} h of {CLUSTER} in {told['took_s']:,.0f} s: {told['snapshots']:,} snapshots, "
            f"{told['ms_a_snapshot']:.1f} ms of processor time each",
            f"memory   {rss:.1f} MiB in the third quarter, {rss_end:.1f} MiB in the last, "
            f"{told['rss_mib_an_hour']:+.2f} MiB an hour",
            f"objects  {blocks:,.0f} blocks in the third quarter, {blocks_end:,.0f} in the last, "
            f"{told['blocks_an_hour']:+,.0f} an hour",
        ]
    )
