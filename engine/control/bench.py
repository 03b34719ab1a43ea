"""How fast the parts are, measured on this machine: `rackside bench`."""

from __future__ import annotations

import resource
import time
from typing import Any

import msgspec
import numpy as np

from engine.model.iteration import iteration
from engine.model.memory import memory
from engine.model.predict import predict, replicas
from engine.model.rates import rates
from engine.model.work import columns
from engine.plan.search import search
from engine.profile import Parallelism, Plan, catalog

ROUNDS = 200
ROWS = 20_000


def predictions() -> dict[str, Any]:
    """One prediction at a time, and the same functions over a column of plans (one core)."""
    model, cluster = catalog.model("llama3-70b"), catalog.cluster("h100x64-400g")
    plan = Plan(name="bench", parallelism=Parallelism(tensor=4, pipeline=4), global_batch=128)
    stack = catalog.stack(plan.stack)
    predict(model, plan, cluster, stack)
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        predict(model, plan, cluster, stack)
        times.append(time.perf_counter() - began)
    one = columns([(model, plan, cluster)], [replicas(model, plan, cluster)])
    many = one.at(np.zeros(ROWS, np.int64))
    constants = rates(cluster.device, stack, plan.precision)
    began = time.perf_counter()
    iteration(many, cluster.device, constants)
    memory(many, constants)
    seconds = time.perf_counter() - began
    return {
        "predict_ms": {
            "median": float(np.median(times) * 1e3),
            "p90": float(np.quantile(times, 0.9) * 1e3),
            "rounds": ROUNDS,
        },
        "columns": {"plans": ROWS, "seconds": seconds, "plans_per_s": ROWS / seconds},
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def plans() -> dict[str, Any]:
    """The full space of GPT3-175B on 512 H100, memory held flat by chunks (one core)."""
    model, small = catalog.model("gpt3-175b"), catalog.cluster("h100x64-400g")
    nodes = [msgspec.structs.replace(n, name=f"{n.name}-{i}") for i in range(8) for n in small.nodes]
    cluster = msgspec.structs.replace(small, name="h100x512-400g", nodes=tuple(nodes))
    plan = Plan(name="bench", parallelism=Parallelism(), global_batch=2048)
    search(model, small, catalog.stack(plan.stack), plan)
    found = search(model, cluster, catalog.stack(plan.stack), plan)
    return {
        "plans": found.tried,
        "seconds": found.seconds,
        "plans_per_s": found.tried / found.seconds,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
