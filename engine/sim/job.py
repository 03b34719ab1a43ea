"""A simulated training job: the model's step times on the simulated rack, behind the real hook, one for each rank."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rackside_hook import Hook

from engine.model import pace
from engine.model.predict import Prediction, predict, with_microbatch
from engine.profile import Model, Plan, catalog
from engine.sim.rack import Demand, Rack

HELD_S = 0.5
"""A boundary that takes longer is a pause."""
WAITING = 1e-6
"""Share of the time that a GPU of a waiting job is busy: it holds its clock and draws what waiting draws."""


@dataclass
class MemoryStore:
    """The process group's key-value store, for ranks that share one process."""

    values: dict[str, Any] = field(default_factory=dict)

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> str:
        return str(self.values[key])

    def add(self, key: str, amount: int) -> int:
        self.values[key] = int(self.values.get(key, 0)) + amount
        return int(self.values[key])


class Job:
    """Runs `plan` of `model` on the rack until stopped. Ranks are data-parallel replicas in the cluster's order."""

    def __init__(self, rack: Rack, model: Model, plan: Plan, name: str, directory: Path, hosts: list[str]) -> None:
        self.rack, self.model, self.plan = rack, model, plan
        self._stack = catalog.stack(plan.stack)
        self.prediction = predict(model, plan, rack.cluster, self._stack)
        self.name = name
        self._predictions = {plan.optimizations.microbatch: self.prediction}
        self.replica = pace.replica_of_gpu(plan, self.prediction.dp, self.prediction.gpus)
        self._hosts = hosts
        self._directory = directory
        self.step, self.step_s, self.tokens_per_s, self.microbatch = 0, 0.0, 0.0, plan.optimizations.microbatch

    def hooks(self) -> list[Hook]:
        """One hook for each rank, as each process of a real job would have; rank 0 serves the socket."""
        store, sequence = MemoryStore(), self.plan.sequence or self.model.seq
        first = [int(np.flatnonzero(self.replica == rank)[0]) for rank in range(self.prediction.dp)]
        per_node = self.rack.cluster.gpus_per_node
        return [
            Hook(
                job=self.name,
                microbatch=self.plan.optimizations.microbatch,
                global_batch=self.plan.global_batch,
                rank=rank,
                world_size=self.prediction.dp,
                store=store,
                directory=str(self._directory),
                tokens_per_sample=sequence,
                framework="simulated",
                plan={"model": self.model.name, "plan": msgspec.to_builtins(self.plan)},
                device=str(row % per_node),
                host=self._hosts[row // per_node],
            )
            for rank, row in enumerate(first)
        ]

    async def run(self) -> None:
        """Train: one sleep a step, as long as the slowest replica takes at the rack's present clocks."""
        hooks = self.hooks()
        try:
            settings = _step(hooks)
            while True:
                step_s = self.demand(self.predicted(settings.microbatch), settings.microbatches)
                began = time.monotonic()
                await asyncio.sleep(step_s)
                took = time.monotonic() - began
                tokens = self.prediction.tokens_per_iteration
                self.step, self.step_s, self.tokens_per_s = settings.step, took, tokens / took
                self.microbatch = settings.microbatch
                settings = await self._boundary(hooks, loss=self._loss(), tokens=tokens, step_time_s=took)
        finally:
            self.rack.demand = Demand.idle(len(self.rack.devices))
            for hook in hooks:
                hook.close()

    async def _boundary(self, hooks: list[Hook], **report: float) -> Any:
        """All ranks pass their step boundary; while the hooks hold them there, the GPUs wait and cool."""
        passing = asyncio.create_task(asyncio.to_thread(_step, hooks, **report))
        done, _ = await asyncio.wait({passing}, timeout=HELD_S)
        if not done:
            self.rack.demand = replace(self.rack.demand, busy=np.full(len(self.rack.devices), WAITING))
        return await passing

    def _loss(self) -> float:
        """A power law in tokens, as pre-training losses are (Kaplan et al. 2020)."""
        return float(1.7 + 9.0 * (self.step + 1) ** -0.35)

    def predicted(self, microbatch: int) -> Prediction:
        if microbatch not in self._predictions:
            plan = with_microbatch(self.plan, microbatch)
            self._predictions[microbatch] = predict(self.model, plan, self.rack.cluster, self._stack)
        return self._predictions[microbatch]

    def demand(self, prediction: Prediction, microbatches: tuple[int, ...]) -> float:
        """Set what each GPU is asked for during the coming step, and return how long the step takes, s."""
        share = self.rack.clock_mhz / prediction.sm_clock_mhz
        busy_now = self.rack.demand.busy > 0
        slow = pace.slowest(np.where(busy_now, share, 1.0), self.replica, prediction.dp)
        times = pace.replica_s(prediction.pace, np.asarray(microbatches), slow)
        step_s = float(times.max())
        b = prediction.breakdown
        running = (b.iteration_s - b.bubble_s - b.exposed_comm_s) / b.iteration_s
        busy = (times / step_s)[self.replica] * running
        traffic = prediction.communication
        inside, outside = sum(t.inside_bytes for t in traffic), sum(t.outside_bytes for t in traffic)
        ones = np.ones(len(busy))
        self.rack.demand = Demand(
            ones * prediction.busy_activity, busy, ones * inside / step_s, ones * outside / step_s
        )
        return step_s


def _step(hooks: list[Hook], **report: float) -> Any:
    """Every rank passes its step boundary; all come to the same settings."""
    found = [hook.step(**report) for hook in hooks]
    return found[0]
