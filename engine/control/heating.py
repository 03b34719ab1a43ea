"""Heat without a screen: constants fitted and learned, forecasts from what was seen, a plan's course in minutes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from engine.act.effect import Load, Rack
from engine.control import offline
from engine.control.offline import Predicted
from engine.control.watch import Watch
from engine.model import anomaly, limiter, observer, thermal
from engine.model import learn as learning
from engine.model.course import Course, course
from engine.model.learn import Errors
from engine.model.predict import with_microbatch
from engine.model.thermal import Chassis
from engine.plan import calibrate_heat as fitting
from engine.plan.calibrate_heat import HeatFit, HeatPriors
from engine.profile import Cluster, ProfileError, catalog, document, edit, heat
from engine.record import trace
from engine.record.schema import RecordError
from engine.record.trace import Trace

GAP_S = 60.0
"""A pause in a recording after which the twin starts anew."""


@dataclass(frozen=True)
class Fitted:
    """A fit, and the text of each profile that it changes, by its path below a profiles folder."""

    fit: HeatFit
    files: dict[str, str]


def calibrate(path: Path, progress: Callable[[str], None] | None = None) -> Fitted:
    """Fit devices and node types to a file of measured power, clocks and temperatures."""
    priors = document.load(catalog.ROOT / "heat" / "priors.yaml", HeatPriors)
    found = fitting.fit(heat.read(path), priors, progress)
    files: dict[str, str] = {}
    for name in catalog.names("device"):
        constants = found.power.get(catalog.device(name).chip)
        if constants:
            text = catalog.find("device", name).read_text(encoding="utf-8")
            files[f"hardware/{name}.yaml"] = edit.with_numbers(text, constants, "power")
    for fitted in dict.fromkeys((*found.cooling, *found.host_w)):
        chip = _chip(fitted)
        for name in (n for n in catalog.names("node type") if _chip(n) == chip and not catalog.node_type(n).fixed):
            text = catalog.find("node type", name).read_text(encoding="utf-8")
            text = edit.with_numbers(text, found.cooling.get(fitted, {}), "cooling")
            if fitted in found.fan_least:
                text = edit.with_inline(text, "fan", "least", found.fan_least[fitted])
            if fitted in found.host_w:
                text = edit.with_numbers(text, {"host_w": found.host_w[fitted]})
            files[f"hardware/nodes/{name}.yaml"] = text
    return Fitted(found, files)


def _chip(node_type: str) -> str:
    return catalog.device(catalog.node_type(node_type).device).chip


def fit_json(found: Fitted) -> dict[str, Any]:
    """The fit as JSON has it; errors relative, or in K where the unit is C."""
    return {
        "power": found.fit.power,
        "cooling": found.fit.cooling,
        "fan_least": found.fit.fan_least,
        "host_w": found.fit.host_w,
        "series": [
            {"name": name, "n": n, "max_error": worst, "left_out_mean": mean, "left_out_max": unseen}
            for name, (n, worst, mean, unseen) in fitting.summary(found.fit.readings).items()
        ],
        "readings": [
            {
                "series": r.series,
                "at": r.at,
                "unit": r.unit,
                "measured": r.measured,
                "fitted": r.fitted,
                "error": r.error,
                "left_out_error": r.left_out_error,
            }
            for r in found.fit.readings
        ],
    }


# Forecasts, live or from a recording.


def replayed(cluster: Cluster, path: Path) -> Watch:
    """A twin that has seen a whole recording. ProfileError with a sentence when it cannot be read."""
    found, watch = _trace(cluster, path), Watch(cluster)
    for at, seconds in enumerate(np.diff(found.times, prepend=found.times[0] - 1.0)):
        if at and seconds > GAP_S:  # a pause in the recording: what was is not what is
            watch = Watch(cluster)
        watch.take(found.temperature_c[at], found.power_w[at], found.power_limit_w[at], float(seconds))
    return watch


def forecast_json(cluster: Cluster, watch: Watch, rack: Rack | None, load: Load | None) -> dict[str, Any]:
    """The next ten minutes of every GPU, and which will slow themselves, as JSON has it."""
    found = watch.forecast()
    seen = anomaly.excess(watch.twin, found.settled_sd)
    now = observer.junction_c(watch.twin)
    cost = watch.throttling(found, rack, load) if rack is not None else None
    return {
        "cluster": cluster.name,
        "watched_s": watch.watched_s,
        "times_s": found.times_s.tolist(),
        "gpus": [
            {
                "node": node,
                "slot": slot,
                "now_c": float(now[row]),
                "power_w": float(watch.twin.mean_w[row]) if watch.twin.known[row] else math.nan,
                "celsius": found.celsius[row].tolist(),
                "low": found.low[row].tolist(),
                "high": found.high[row].tolist(),
                "settled_c": float(found.settled_c[row]),
                "limit_c": float(found.limit_c[row]),
                "reaches_limit_s": float(found.reaches_s[row]),
                "hotter_than_explained_k": float(seen.own_k[row]),
                "odd": bool(seen.odd[row]),
                "sensor": observer.WORDS[watch.twin.fault[row]] or None,
            }
            for row, (node, slot) in enumerate(cluster.slots)
        ],
        "throttling": {
            "gpus": ["{}:{}".format(*cluster.slots[row]) for row in cost.rows],
            "first_s": cost.first_s,
            "step_s": cost.step_s,
            "slowed_step_s": cost.slowed_step_s,
        }
        if cost
        else None,
    }


# Learning a chassis.


@dataclass(frozen=True)
class LearnedCluster:
    """The inventory with what was learned of its GPUs, and forecast errors on the part that was not learned from: with
    the profile's constants to start from, and with the learned ones."""

    text: str
    gpus: int
    seconds: float
    before: Errors
    after: Errors


def learn_thermal(name: str, path: Path) -> LearnedCluster:
    """Learn every GPU's constants from a recording or a CSV. ProfileError with a sentence when that cannot be."""
    cluster = catalog.cluster(name)
    found = _trace(cluster, path)
    at = learning.split(found.times)
    if len(found.times) - at < 2:
        raise ProfileError(f"{path}: {len(found.times)} readings are too few to learn from; some minutes are needed.")
    boards = limiter.boards_of(cluster)
    part = learning.learn(boards.chassis, found.times[:at], found.temperature_c[:at], found.power_w[:at])
    rest = (found.times[at:], found.temperature_c[at:], found.power_w[at:], boards.operating_c)
    before = learning.errors(boards.chassis, *rest)
    after = learning.errors(observer.learned(part), *rest)
    whole = learning.learn(boards.chassis, found.times, found.temperature_c, found.power_w)
    text = _with_learned(name, cluster, observer.learned(whole), whole.known, path.name)
    return LearnedCluster(text, int(whole.known.sum()), float(found.times[-1] - found.times[0]), before, after)


def _with_learned(name: str, cluster: Cluster, chassis: Chassis, known: npt.NDArray[np.bool_], recording: str) -> str:
    """The inventory's own file with a `learned` block on each node whose GPUs all showed something."""
    data = document.load_plain(catalog.find("cluster", name))
    first, built = 0, thermal.chassis_of(cluster)
    for entry, node in zip(data["nodes"], cluster.nodes, strict=True):
        rows = range(first, first + cluster.type_of(node).gpus)
        first = rows.stop
        entry.pop("learned", None)
        if not known[rows].all():
            continue
        already = built.inlet_c[rows.start] - cluster.inlet_c(node) if node.learned else 0.0
        entry["learned"] = {
            "recording": recording,
            "gpus": [
                {
                    "r_die_k_w": round(float(chassis.r_die[r]), 5),
                    "r_sink_k_w": round(float(chassis.r_sink[r]), 5),
                    "c_sink_j_k": round(float(chassis.c_sink[r]), 1),
                    "preheat_k_w": round(float(chassis.preheat_k_w[r]), 5),
                    "inlet_k": round(float(chassis.inlet_c[r] - built.inlet_c[r] + already), 2),
                }
                for r in rows
            ],
        }
    head = f"# {cluster.name}, with the thermal constants that {recording} showed (rackside calibrate --thermal).\n"
    return head + yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=120)


def _trace(cluster: Cluster, path: Path) -> Trace:
    try:
        return trace.read(path, cluster.slots)
    except RecordError as error:
        raise ProfileError(str(error)) from None


# A plan's course, offline.


@dataclass(frozen=True)
class Foreseen:
    """A plan on a cluster, predicted, and its course over some minutes."""

    asked: Predicted
    course: Course


def foreseen(model: str, cluster: str, plan: str, minutes: float, microbatch: int | None = None) -> Foreseen:
    """Predict a plan, with another microbatch where one is given, and run it on the thermal model."""
    chosen = catalog.plan(plan)
    if microbatch is not None:
        chosen = with_microbatch(chosen, microbatch)
    asked = offline.predicted(catalog.model(model), catalog.cluster(cluster), chosen)
    return Foreseen(asked, course(asked.cluster, asked.found, minutes))


def foreseen_json(found: Foreseen) -> dict[str, Any]:
    """A plan's course as JSON has it: a row a node, and the moments."""
    c, p = found.course, found.asked.found
    nodes = []
    for number, node in enumerate(found.asked.cluster.nodes):
        rows = c.node == number
        nodes.append(
            {
                "node": node.name,
                "hottest_c": float(c.celsius[-1][rows].max()),
                "peak_c": float(c.celsius[:, rows].max()),
                "clock_mhz": float(c.clock_mhz[-1][rows].min()),
                "mean_w": float(c.mean_w[rows].mean()),
                "peak_w": float(c.peak_w[rows].max()),
                "power_limited_share": float(c.capped_share[rows].max()),
                "heat_limited_share": float(c.heat_share[rows].max()),
            }
        )
    return {
        "model": found.asked.model.name,
        "cluster": found.asked.cluster.name,
        "plan": p.plan.name,
        "label": p.plan.label(),
        "microbatch": p.plan.optimizations.microbatch,
        "fits": p.fits,
        "minutes": float(c.times_s[-1] + 1) / 60,
        "step_s": float(c.step_s[-1]),
        "predicted_step_s": p.iteration_s,
        "tokens_per_s": p.tokens_per_iteration / float(c.step_s[-1]),
        "energy_kwh": c.energy_j / 3.6e6,
        "nodes": nodes,
        "times_s": c.times_s.tolist(),
        "hottest_c": c.celsius.max(axis=1).tolist(),
        "coolest_c": c.celsius.min(axis=1).tolist(),
        "slowest_clock_mhz": c.clock_mhz.min(axis=1).tolist(),
        "steps_s": c.step_s.tolist(),
        "gpus_kw": (c.gpus_w / 1000).tolist(),
    }
