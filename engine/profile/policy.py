"""Thermal policies: what to do when a GPU runs hot. Rules are tried in order; the first that holds is the one."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from engine.profile.document import ProfileError, Record
from engine.profile.hardware import Fraction, Positive


class Condition(Record, frozen=True):
    """Exactly one of: an absolute temperature, or the margin left to the device's own slowdown point, K."""

    temperature_above_c: Positive | None = None
    margin_below_k: float | None = None

    def severity(self, slowdown_c: float) -> float:
        """The temperature in C from which this holds, on a device that slows itself at `slowdown_c`."""
        if self.temperature_above_c is not None:
            return self.temperature_above_c
        assert self.margin_below_k is not None
        return slowdown_c - self.margin_below_k


class Measure(Record, frozen=True):
    """One thing to do: halve the microbatch, lower the power limit to a share of the default, or pause."""

    microbatch: Literal["halve"] | None = None
    power_limit_share: Fraction | None = None
    pause_s: Positive | None = None


class Rule(Record, frozen=True):
    """`name` shows in alarms and in the audit log."""

    name: str
    when: Condition
    do: Annotated[tuple[Measure, ...], Meta(min_length=1)]


class Policy(Record, frozen=True):
    """Rules, hottest first."""

    name: str
    rules: Annotated[tuple[Rule, ...], Meta(min_length=1)]

    def rule_for(self, temperature_c: float, slowdown_c: float) -> Rule | None:
        """The first rule whose condition holds, or None."""
        return next((r for r in self.rules if temperature_c > r.when.severity(slowdown_c)), None)


def check(policy: Policy, label: str) -> None:
    """Refuse conditions that say nothing or two things, and a rule that an earlier one always beats."""
    for rule in policy.rules:
        given = [c for c in (rule.when.temperature_above_c, rule.when.margin_below_k) if c is not None]
        if len(given) != 1:
            raise ProfileError(
                f"{label}: rule '{rule.name}': give exactly one of temperature_above_c and margin_below_k under 'when'."
            )
    for first, second in zip(policy.rules, policy.rules[1:], strict=False):
        same_kind = (first.when.margin_below_k is None) == (second.when.margin_below_k is None)
        if same_kind and second.when.severity(100.0) >= first.when.severity(100.0):
            raise ProfileError(
                f"{label}: rule '{second.name}' can never run: '{first.name}', tried before it, already holds there. "
                "Put the hotter rule first."
            )
