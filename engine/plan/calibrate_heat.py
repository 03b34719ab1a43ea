"""Fit the constants of power and heat to what was measured in public, and say how well left-out readings come out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from engine.model import power
from engine.model.fit import Prior, robust
from engine.model.predict import predict
from engine.model.thermal import FLOW_EXPONENT
from engine.profile import Cluster, Device, NodeType, catalog
from engine.profile.heat import Caps, Measured, Phase, Settled

Floats = npt.NDArray[np.float64]
Values = Callable[[Floats], Floats]

SCALE, ROUNDS = 0.02, 40
KELVIN = 0.02
"""A kelvin off weighs as much as 2 % of power or time."""
INLET_C = 25.0
"""Air in front of boards whose line was published without a temperature; assumed."""


class HeatPriors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known before any reading, each a value and a spread: a chip's power constants, a node type's cooling."""

    power: dict[str, dict[str, tuple[float, float]]]
    cooling: dict[str, dict[str, tuple[float, float]]]


@dataclass(frozen=True)
class Reading:
    """One measured value: of which series, at what clock, cap or power, and the model's value for it - of the fit that
    saw it, and of one that did not."""

    series: str
    at: float
    unit: str
    measured: float
    fitted: float
    left_out: float

    @property
    def error(self) -> float:
        """Relative, or K where the unit is C."""
        return self.fitted - self.measured if self.unit == "C" else self.fitted / self.measured - 1

    @property
    def left_out_error(self) -> float:
        return self.left_out - self.measured if self.unit == "C" else self.left_out / self.measured - 1


@dataclass(frozen=True)
class HeatFit:
    """Constants by chip and by node type, each with the readings that they were fitted to."""

    power: dict[str, dict[str, float]]
    cooling: dict[str, dict[str, float]]
    fan_least: dict[str, float]
    host_w: dict[str, float]
    readings: tuple[Reading, ...]


@dataclass(frozen=True)
class _Row:
    """A reading in the fit: `kept` rows stay in when their group is left out, to place what is its own."""

    series: str
    at: float
    unit: str
    measured: float
    group: str
    kept: bool = False


@dataclass(frozen=True)
class _Problem:
    """Readings, the model's values for them, and what is expected of the unknowns."""

    rows: tuple[_Row, ...]
    model: Values
    priors: tuple[Prior, ...]

    def solve(self, weights: Floats) -> Floats:
        centre = np.array([p.inward(p.value) for p in self.priors])
        spread = np.array([p.spread for p in self.priors])

        def residuals(x: Floats) -> Floats:
            found, want = self.model(x), np.array([r.measured for r in self.rows])
            kelvin = np.array([r.unit == "C" for r in self.rows])
            ratio = np.log(np.maximum(np.where(kelvin, 1.0, found), 1e-9) / np.where(kelvin, 1.0, want))
            return np.where(kelvin, (found - want) * KELVIN, ratio)

        def jacobian(x: Floats, r: Floats) -> Floats:
            return np.stack([(residuals(x + 2e-3 * unit) - r) / 2e-3 for unit in np.eye(len(x))], axis=1)

        return robust(residuals, jacobian, centre, centre, spread, weights, SCALE, ROUNDS)

    def outward(self, x: Floats) -> list[float]:
        return [prior.outward(value) for prior, value in zip(self.priors, x, strict=True)]

    def fit(self) -> tuple[Floats, list[Reading]]:
        """The unknowns, and every reading with its value by the fit and by the fit without its group."""
        x = self.solve(np.ones(len(self.rows)))
        found, unseen = self.model(x), self.model(x).copy()
        for group in dict.fromkeys(r.group for r in self.rows):
            held = np.array([r.group == group and not r.kept for r in self.rows])
            unseen[held] = self.model(self.solve(np.where(held, 0.0, 1.0)))[held]
        told = zip(self.rows, found, unseen, strict=True)
        return x, [Reading(r.series, r.at, r.unit, r.measured, float(f), float(u)) for r, f, u in told]


def fit(measured: Measured, priors: HeatPriors, progress: Callable[[str], None] | None = None) -> HeatFit:
    """Fit every node type and device that the readings are of, from the priors alone: what the profiles have now does
    not enter."""
    found = HeatFit({}, {}, {}, {}, ())
    readings: list[Reading] = []
    for node in dict.fromkeys(s.node for s in measured.chassis):
        kind = catalog.node_type(node)
        problem = _chassis(kind, [s for s in measured.chassis if s.node == node], priors)
        x, told = problem.fit()
        r_sink, preheat, least = problem.outward(x)
        found.cooling[node] = {"r_sink_air_k_w": r_sink, "preheat_k_w": preheat}
        found.fan_least[node] = least
        readings += told
    for name in dict.fromkeys([*(s.device for s in measured.lines), *(s.device for s in measured.phases)]):
        if progress:
            progress(name)
        device = catalog.device(name)
        problem = _device(device, measured, priors, _front_k_w(device, found))
        x, told = problem.fit()
        found.power[device.chip] = dict(zip(priors.power[device.chip], problem.outward(x), strict=False))
        found.power[device.chip]["v_min"] *= device.power.v_max
        readings += told
    for node in dict.fromkeys(w.node for w in measured.nodes):
        host_w, told = _host(node, measured, found)
        found.host_w[node] = host_w
        readings += told
    return HeatFit(found.power, found.cooling, found.fan_least, found.host_w, tuple(readings))


def _device(device: Device, measured: Measured, expected: HeatPriors, front_k_w: float) -> _Problem:
    """Idle, power against clock, memory's share, phases at locked clocks, and throughput under caps. Of a phase two
    things are its own: the share of its time that does not follow the clock, and its activity; of all phases of a
    device, the limit that its board kept."""
    names = list(expected.power[device.chip])
    priors = [Prior(value, spread, n == "v_min") for n, (value, spread) in expected.power[device.chip].items()]
    rows: list[_Row] = []
    terms: list[Callable[[Device, Floats], Floats]] = []
    for idle in (i for i in measured.idle if i.device == device.name):
        rows.append(_Row("idle power", idle.clock_mhz, "W", idle.power_w, "idle"))
        terms.append(lambda d, x, i=idle: power.power_w(d, np.zeros(1), i.clock_mhz, i.temperature_c))  # type: ignore[misc]
    for line in (s for s in measured.lines if s.device == device.name):
        mhz, watts = np.array(line.clock_mhz), np.array(line.power_w)
        celsius = INLET_C + watts * front_k_w
        rows += [_Row("power at a clock", f, "W", p, f"power {f}") for f, p in zip(mhz, watts, strict=True)]
        rows += [_Row("memory's power", f, "W", p, f"memory {f}") for f, p in zip(mhz, line.memory_w, strict=True)]
        terms.append(lambda d, x, f=mhz, t=celsius: power.power_w(d, 1.0, f, t))  # type: ignore[misc]
        terms.append(lambda d, x, f=mhz: power.memory_w(d, 1.0, f))  # type: ignore[misc]
    phases = [p for p in measured.phases if p.device == device.name]
    if phases:
        top = max(max(np.array(p.joules) / np.array(p.seconds)) for p in phases)
        priors.append(Prior(float(top), 0.1))  # the limit that the board kept
        for number, phase in enumerate(phases):
            at = len(names) + 1 + 2 * number
            priors += [Prior(0.1, 1.0, share=True), Prior(1.0, 0.1)]
            edges = (min(phase.clock_mhz), max(phase.clock_mhz))
            for what, unit, column in (("seconds", "s", phase.seconds), ("joules", "J", phase.joules)):
                rows += [
                    _Row(f"{phase.name}: {what}", f, unit, v, phase.name, f in edges)
                    for f, v in zip(phase.clock_mhz, column, strict=True)
                ]
            terms.append(lambda d, x, p=phase, at=at: _phase(d, x, p, at, len(names), front_k_w))  # type: ignore[misc]
    for caps in (c for c in measured.caps if c.device == device.name):
        rows += [
            _Row("throughput under a cap", w, "", r, f"cap {w}")
            for w, r in zip(caps.power_w, caps.relative, strict=True)
        ]
        terms.append(lambda d, x, c=caps: throughput(d, c))  # type: ignore[misc]

    def model(x: Floats) -> Floats:
        values = {n: p.outward(v) for n, p, v in zip(names, priors, x, strict=False)}
        values["v_min"] *= device.power.v_max
        changed = msgspec.structs.replace(device, power=msgspec.structs.replace(device.power, **values))
        return np.concatenate([term(changed, x) for term in terms])

    return _Problem(tuple(rows), model, tuple(priors))


def _phase(device: Device, x: Floats, phase: Phase, at: int, cap: int, front_k_w: float) -> Floats:
    """Seconds and joules at each locked clock: the clock is the locked one or what the board's limit leaves."""
    fixed, activity, limit = 1 / (1 + np.exp(-x[at])), float(np.exp(x[at + 1])), float(np.exp(x[cap]))
    mhz, seconds = np.array(phase.clock_mhz), np.array(phase.seconds)
    celsius = INLET_C + np.array(phase.joules) / seconds * front_k_w
    fine = msgspec.structs.replace(device, clock=msgspec.structs.replace(device.clock, step=1.0))
    clock = np.minimum(mhz, power.clock_under_limit(fine, activity, limit, celsius))
    shape = (1 - fixed) * mhz.max() / clock + fixed
    time = shape * np.exp(np.mean(np.log(seconds / shape)))
    return np.concatenate([time, time * power.power_w(device, activity, clock, celsius)])


def throughput(device: Device, caps: Caps) -> Floats:
    """Tokens/s of the plan under each cap over that under the last, by the cost model itself."""
    cluster = _one_node(catalog.node_type(caps.node), device, caps.gpus)
    model, stack = catalog.model(caps.model), catalog.stack(caps.plan.stack)
    rates = []
    for watts in caps.power_w:
        limited = msgspec.structs.replace(caps.plan.optimizations, power_limit_w=watts)
        plan = msgspec.structs.replace(caps.plan, optimizations=limited)
        rates.append(predict(model, plan, cluster, stack).tokens_per_s)
    return np.array(rates) / rates[-1]


def _one_node(kind: NodeType, device: Device, gpus: int) -> Cluster:
    rear = tuple(slot for slot in kind.cooling.rear if slot < gpus)
    numa = tuple(part for group in kind.numa if (part := tuple(g for g in group if g < gpus)))
    small = msgspec.structs.replace(
        kind, gpus=gpus, numa=numa, cooling=msgspec.structs.replace(kind.cooling, rear=rear)
    )
    base = catalog.cluster("h100x64-400g")
    node = msgspec.structs.replace(base.nodes[0], type=kind.name)
    return msgspec.structs.replace(
        base, nodes=(node,), types={kind.name: small}, devices={kind.device: device}, network=None
    )


def _front_k_w(device: Device, found: HeatFit) -> float:
    """Junction to inlet of a front GPU at full flow, of a chassis that was fitted or else of the profile's."""
    kinds = [k for name in catalog.names("node type") if not (k := catalog.node_type(name)).fixed]
    kind = next(k for k in kinds if k.device == device.name)
    sink = found.cooling.get(kind.name, {}).get("r_sink_air_k_w", kind.cooling.r_sink_air_k_w)
    return device.die.r_sink_k_w + sink


def _chassis(kind: NodeType, readings: Sequence[Settled], expected: HeatPriors) -> _Problem:
    die, fan = catalog.device(kind.device).die.r_sink_k_w, kind.cooling.fan
    full_w = fan.full_w if fan else 1.0
    rows = []
    for r in readings:
        rows.append(_Row(f"{kind.name} front GPU", r.power_w, "C", r.front_c, f"front {r.source}"))
        rows.append(_Row(f"{kind.name} rear GPU", r.power_w, "C", r.rear_c, f"rear {r.source}"))

    def model(x: Floats) -> Floats:
        r_sink, preheat, least = float(np.exp(x[0])), float(np.exp(x[1])), 1 / (1 + np.exp(-x[2]))
        out = []
        for r in readings:
            flow = least + (1 - least) * min(r.power_w / full_w, 1.0)
            front = r.inlet_c + r.power_w * (die + r_sink * flow**-FLOW_EXPONENT)
            out += [front, front + preheat * r.power_w / flow]
        return np.array(out)

    own = expected.cooling[kind.name]
    priors = tuple(Prior(*own[name], share=name == "least") for name in ("r_sink_air_k_w", "preheat_k_w", "least"))
    return _Problem(tuple(rows), model, priors)


def _host(node: str, measured: Measured, found: HeatFit) -> tuple[float, list[Reading]]:
    """What the node draws beside its GPUs: the mean of what is left of the measured totals."""
    kind = catalog.node_type(node)
    device = catalog.device(kind.device)
    constants = found.power.get(device.chip, {})
    device = msgspec.structs.replace(device, power=msgspec.structs.replace(device.power, **constants))
    cooling = msgspec.structs.replace(kind.cooling, **found.cooling.get(node, {}))
    kind = msgspec.structs.replace(kind, cooling=cooling)
    caps = next(c for c in measured.caps if c.node == node)
    cluster = _one_node(kind, device, kind.gpus)
    gpus_w = kind.gpus * predict(catalog.model(caps.model), caps.plan, cluster, catalog.stack(caps.plan.stack)).power_w
    totals = [w.power_w for w in measured.nodes if w.node == node]
    host = float(np.mean(totals)) - gpus_w
    readings = []
    for number, total in enumerate(totals):
        others = [t for i, t in enumerate(totals) if i != number] or totals
        readings.append(Reading(f"{node} in all", number + 1, "W", total, gpus_w + host, float(np.mean(others))))
    return host, readings


def summary(readings: Sequence[Reading]) -> Mapping[str, tuple[int, float, float, float]]:
    """Of each series: how many readings, the fit's largest error, and the mean and largest of the left-out ones."""
    out = {}
    for series in dict.fromkeys(r.series for r in readings):
        of = [r for r in readings if r.series == series]
        unseen = [abs(r.left_out_error) for r in of]
        out[series] = (len(of), max(abs(r.error) for r in of), float(np.mean(unseen)), max(unseen))
    return out
