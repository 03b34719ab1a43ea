"""Policies: what to do when a GPU runs hot or soon will. Rules are tried in order; the first that holds is the one."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Literal

from msgspec import Meta

from engine.profile.document import ProfileError, Record
from engine.profile.hardware import Fraction, Positive


class Condition(Record, frozen=True):
    """What must hold of a GPU, all that is given at once. A temperature: absolute, or as the margin left to the
    device's own slowdown point, K. A forecast: it reaches `reaches_c`, or without it the temperature above which the
    device slows itself, within so many seconds. The share of the last minute that heat held its clock; its busiest
    link's share of its peak; an XID."""

    temperature_above_c: Positive | None = None
    margin_below_k: float | None = None
    reaches_within_s: Positive | None = None
    reaches_c: Positive | None = None
    throttled_share_above: Fraction | None = None
    link_share_above: Fraction | None = None
    xid: bool = False

    @property
    def hot(self) -> bool:
        """Whether it asks for a temperature and nothing else: what an alarm is raised on."""
        others = (self.reaches_within_s, self.throttled_share_above, self.link_share_above, self.xid or None)
        return others == (None,) * 4

    def severity(self, slowdown_c: float) -> float:
        """The temperature in C from which this holds, on a device that slows itself at `slowdown_c`; no temperature is
        asked for: minus infinity."""
        if self.temperature_above_c is not None:
            return self.temperature_above_c
        return -math.inf if self.margin_below_k is None else slowdown_c - self.margin_below_k


class Measure(Record, frozen=True):
    """One thing to do: halve the job's microbatch, move microbatches off its hot ranks, lower the hot GPUs' power limit
    to a share of the default or their clock to a share of the highest, pause the job, or advise to drain the node."""

    microbatch: Literal["halve"] | None = None
    rebalance: Positive | None = None
    power_limit_share: Fraction | None = None
    sm_clock_share: Fraction | None = None
    pause_s: Positive | None = None
    drain: bool = False

    @property
    def of_job(self) -> bool:
        """Whether it changes the job, and so once for all nodes."""
        return any(m is not None for m in (self.microbatch, self.rebalance, self.pause_s))

    def text(self) -> str:
        """In words, for advice and the log."""
        if self.microbatch is not None:
            return "halve the microbatch"
        if self.rebalance is not None:
            return f"move {self.rebalance:.0f} microbatches off each hot rank"
        if self.power_limit_share is not None:
            return f"power limit to {self.power_limit_share:.0%} of the default"
        if self.sm_clock_share is not None:
            return f"SM clock to {self.sm_clock_share:.0%} of the highest"
        return f"pause for {self.pause_s:.0f} s" if self.pause_s is not None else "drain the node"


class Rule(Record, frozen=True):
    """`name` shows in alarms and in the audit log. The guard only advises unless a rule is `automatic`."""

    name: str
    when: Condition
    do: Annotated[tuple[Measure, ...], Meta(min_length=1)]
    automatic: bool = False


class Policy(Record, frozen=True):
    """Rules, hottest first. A condition must hold for `dwell_s` before the guard acts; the same rule acts on the same
    node again, one step harder, after `every_s` at the soonest; all rules together act `most_an_hour` times. What was
    done is taken back when the GPUs have stood `hysteresis_k` below the rule's point for `restore_after_s` and the
    forecast says that they will stay below it."""

    name: str
    rules: Annotated[tuple[Rule, ...], Meta(min_length=1)]
    dwell_s: Positive = 3.0
    every_s: Positive = 60.0
    most_an_hour: Annotated[int, Meta(ge=1)] = 20
    hysteresis_k: Positive = 5.0
    restore_after_s: Positive = 300.0

    def rule_for(self, temperature_c: float, slowdown_c: float) -> Rule | None:
        """The first rule on temperature alone whose condition holds, or None."""
        return next((r for r in self.rules if r.when.hot and temperature_c > r.when.severity(slowdown_c)), None)


def check(policy: Policy, label: str) -> None:
    """Refuse conditions that say nothing or two things, measures that do, and a rule that an earlier one always
    beats."""
    for rule in policy.rules:
        when = rule.when
        given = [c for c in (when.temperature_above_c, when.margin_below_k) if c is not None]
        if len(given) > 1 or (when.hot and not given):
            raise ProfileError(
                f"{label}: rule '{rule.name}': give exactly one of temperature_above_c and margin_below_k under "
                "'when', or another condition."
            )
        if when.reaches_c is not None and when.reaches_within_s is None:
            raise ProfileError(f"{label}: rule '{rule.name}': reaches_c needs reaches_within_s beside it.")
        for measure in rule.do:
            if sum(bool(getattr(measure, name)) for name in Measure.__struct_fields__) != 1:
                names = ", ".join(Measure.__struct_fields__)
                raise ProfileError(f"{label}: rule '{rule.name}': each entry of 'do' is one of {names}.")
    hot = [rule for rule in policy.rules if rule.when.hot]
    for first, second in pairwise(hot):
        same_kind = (first.when.margin_below_k is None) == (second.when.margin_below_k is None)
        if same_kind and second.when.severity(100.0) >= first.when.severity(100.0):
            raise ProfileError(
                f"{label}: rule '{second.name}' can never run: '{first.name}', tried before it, already holds there. "
                "Put the hotter rule first."
            )
