"""The figures that the product grew from, each beside the model's own. The list is profiles/reportcard.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from engine.model import course, power, thermal
from engine.model.predict import PlanError, Prediction, predict
from engine.plan import sweep
from engine.profile import Parallelism, Plan, ProfileError, catalog
from engine.profile.document import Record

Verdict = Literal["within", "outside", "contradicted by arithmetic", "not a figure of the model"]


class Where(Record, frozen=True):
    """A plan of a model on a cluster."""

    model: str
    cluster: str
    plan: Plan


class Measure(Record, frozen=True):
    """How the model's own value comes about: exactly one of these.

    `quantity` of `here` (over that of `over`, where given); `product` of two numbers; `change` from the first number
    to the second, as the arithmetic has it; `slowest_rank` the loss of a synchronous step when one rank's clock falls
    from the first number to the second and the rest of the step, `fixed_share`, does not; `steady` the temperature
    T + P R + P^2 C of the numbers; `rule` the rule that a policy picks at a temperature; `crossover` the billions of
    weights at which the first cluster overtakes the second per GPU in a sweep of sizes; `held` what the limiters of a
    cluster make of a load that asks so many watts of each GPU; `sync_wait` how much longer the synchronisation,
    `fixed_share` of the step, lasts for the ranks that wait for one whose clock fell; `leakage_square` the square term,
    K/W^2, of a rear GPU's temperature against power less leakage.
    """

    quantity: str | None = None
    here: Where | None = None
    over: Where | None = None
    product: tuple[float, float] | None = None
    change: tuple[float, float] | None = None
    slowest_rank: tuple[float, float] | None = None
    fixed_share: float = 0.0
    steady: tuple[float, float, float, float] | None = None
    rule: tuple[str, float] | None = None
    crossover: tuple[str, str] | None = None
    held: tuple[str, float, Literal["hottest_c", "top_over_bottom_k", "clock_change"]] | None = None
    sync_wait: tuple[float, float] | None = None
    leakage_square: tuple[str, float] | None = None


class Claim(Record, frozen=True):
    """One figure of the source text. `claimed` in the unit of the measure; `tolerance` relative, or `at_least`;
    `contradicts` says why arithmetic or physics forbids the figure."""

    id: str
    claim: str
    unit: str = ""
    claimed: float | str | None = None
    tolerance: Annotated[float, Meta(ge=0)] = 0.1
    at_least: bool = False
    measure: Measure | None = None
    contradicts: str | None = None
    why: str = ""


class Claims(Record, frozen=True):
    """The file."""

    claims: tuple[Claim, ...]


@dataclass(frozen=True)
class Line:
    """A claim with the model's value and the verdict."""

    id: str
    claim: str
    unit: str
    claimed: float | str | None
    value: float | str | None
    verdict: Verdict
    why: str


def reportcard(claims: Claims) -> list[Line]:
    """Every claim in the order of the file. A value that cannot be had says why, and is outside."""
    return [_line(claim) for claim in claims.claims]


def _line(claim: Claim) -> Line:
    value: float | str | None = None
    why = claim.why
    if claim.measure is not None:
        try:
            value = _value(claim.measure)
        except (PlanError, ProfileError) as error:
            why = f"{error} {why}".strip()
    return Line(
        claim.id, claim.claim, claim.unit, claim.claimed, value, _verdict(claim, value), claim.contradicts or why
    )


def _verdict(claim: Claim, value: float | str | None) -> Verdict:
    if claim.contradicts:
        return "contradicted by arithmetic"
    if claim.measure is None:
        return "not a figure of the model"
    if isinstance(value, float) and isinstance(claim.claimed, int | float):
        if claim.at_least:
            return "within" if value >= claim.claimed else "outside"
        return "within" if abs(value - claim.claimed) <= claim.tolerance * abs(claim.claimed) else "outside"
    return "within" if value is not None and value == claim.claimed else "outside"


def _value(m: Measure) -> float | str:
    if m.product is not None:
        return m.product[0] * m.product[1]
    if m.change is not None:
        return m.change[1] / m.change[0] - 1.0
    if m.slowest_rank is not None:
        before, after = m.slowest_rank
        return 1.0 / ((1.0 - m.fixed_share) * before / after + m.fixed_share) - 1.0
    if m.steady is not None:
        ambient, watts, linear, square = m.steady
        return ambient + watts * linear + watts**2 * square
    if m.rule is not None:
        name, celsius = m.rule
        found = catalog.thermal_policy(name).rule_for(celsius, 89.0)
        return found.name if found else "none"
    if m.crossover is not None:
        return _crossover(*m.crossover)
    if m.sync_wait is not None:
        before, after = m.sync_wait
        return (1.0 - m.fixed_share) * (before / after - 1.0) / m.fixed_share
    if m.held is not None:
        return _held(*m.held)
    if m.leakage_square is not None:
        return _leakage_square(*m.leakage_square)
    assert m.quantity is not None
    assert m.here is not None
    value = _quantity(_predicted(m.here), m.quantity)
    return value / _quantity(_predicted(m.over), m.quantity) if m.over else value


def _held(cluster: str, watts: float, what: str) -> float:
    """Hottest GPU; hottest of the hottest node over that of the coolest; slowest clock over the fastest, less one."""
    found = course.held(catalog.cluster(cluster), watts)
    nodes = range(int(found.node.max()) + 1)
    hottest = [float(found.celsius[found.node == n].max()) for n in nodes]
    return {
        "hottest_c": float(found.peak_c.max()),
        "top_over_bottom_k": max(hottest) - min(hottest),
        "clock_change": float(found.clock_mhz.min() / found.clock_mhz.max() - 1.0),
    }[what]


def _leakage_square(cluster: str, watts: float) -> float:
    where = catalog.cluster(cluster)
    chassis = thermal.chassis_of(where)
    settled = thermal.steady(chassis, np.full(where.gpus, watts)).junction_c
    row = int(np.argmax(settled - chassis.inlet_c))
    rise = float(settled[row] - chassis.inlet_c[row])
    without = watts - float(power.leakage_w(where.device, settled[row]))
    return (rise - without * rise / watts) / without**2


def _crossover(one: str, other: str) -> float | str:
    """The size at which `one` overtakes, or in words how it stands to `other` from the smallest to the largest."""
    clusters = [catalog.cluster(name) for name in (one, other)]
    plan = Plan(name="sweep", parallelism=Parallelism())
    sizes = sweep.sweep(clusters, catalog.stack(plan.stack), plan)
    found = sweep.overtakes(sizes, one, other)
    if found is not None:
        return found
    ratios = [(size.billions, ratio) for size in sizes if (ratio := size.ratio(one, other)) is not None]
    return "none: " + ", ".join(f"{ratio:.2f} at {billions:.0f}" for billions, ratio in ratios)


def _predicted(where: Where) -> Prediction:
    plan = where.plan
    return predict(catalog.model(where.model), plan, catalog.cluster(where.cluster), catalog.stack(plan.stack))


def _quantity(found: Prediction, name: str) -> float:
    """A number of a prediction: a property of it, of its breakdown, or `tensor.bytes` of its traffic."""
    head, _, tail = name.partition(".")
    if tail:
        traffic = next((t for t in found.communication if t.parallelism == head), None)
        if traffic is None:
            return 0.0
        derived = {"megabytes": traffic.bytes / 1e6, "seconds_per_byte": traffic.seconds / traffic.bytes}
        return derived[tail] if tail in derived else float(getattr(traffic, tail))
    if head == "per_gpu_tokens_per_s":
        return found.tokens_per_s / found.gpus
    if head == "memory_gib":
        return float(found.memory.total_gib)
    if head == "communication_share":
        return sum(t.seconds for t in found.communication) / found.iteration_s
    if head == "exposed_share":
        return found.breakdown.exposed_comm_s / found.iteration_s
    return float(getattr(found if hasattr(found, head) else found.breakdown, head))
