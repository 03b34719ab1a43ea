"""Fit the curves of devices, and what stacks make of them, to measured runs; say how well left-out runs come out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from engine.model.confidence import SPAN, measures
from engine.model.fit import Prior, robust
from engine.model.iteration import iteration
from engine.model.rates import rates
from engine.plan.measured import Group, Table
from engine.profile import Device, Stack

SCALE = 0.03
"""Relative error below which runs are taken to agree: published repeats of one run differ by about that."""
ROUNDS, ROUNDS_AGAIN = 30, 8
HELD = 0.8
"""Share of the left-out runs that a prediction's band holds."""

Floats = npt.NDArray[np.float64]
Progress = Callable[[str, int, int], None]


class Priors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known before any run: per chip and per stack, a constant's value and spread."""

    chips: dict[str, dict[str, tuple[float, float]]]
    stacks: dict[str, dict[str, tuple[float, float]]]


@dataclass(frozen=True)
class Parameters:
    """The constants of a fit: `owners` names the chip or stack of each, `names` the field there."""

    owners: tuple[str, ...]
    names: tuple[str, ...]
    priors: tuple[Prior, ...]

    @property
    def centre(self) -> Floats:
        return np.array([p.inward(p.value) for p in self.priors])

    @property
    def spread(self) -> Floats:
        return np.array([p.spread for p in self.priors])

    def of(self, owner: str, x: Floats) -> dict[str, float]:
        """The values of one owner's constants at `x`."""
        return {
            name: prior.outward(value)
            for whose, name, prior, value in zip(self.owners, self.names, self.priors, x, strict=True)
            if whose == owner
        }

    def device(self, device: Device, x: Floats) -> Device:
        """The device with the curve of its chip at `x`."""
        most = {"best": 1.0, "best_fp8": 1.0, "flash1": 1.0, "flash2": 1.0, "flash3": 1.0}
        values = {name: min(v, most.get(name, v)) for name, v in self.of(device.chip, x).items()}
        return msgspec.structs.replace(device, curve=msgspec.structs.replace(device.curve, **values))

    def stack(self, stack: Stack, x: Floats) -> Stack:
        """The stack with its constants at `x`."""
        return msgspec.structs.replace(stack, **self.of(stack.name, x))


@dataclass(frozen=True)
class Calibration:
    """A finished fit. Errors are relative, signed, one a row of the table; `left_out` those of a fit that never saw
    the row's source (or, of a single source, the row)."""

    parameters: Parameters
    x: Floats
    before: Floats
    after: Floats
    left_out: Floats


def parameters(priors: Priors, groups: Sequence[Group], stacks: bool) -> Parameters:
    """The constants that these groups can speak of."""
    chips = {g.device.chip for g in groups} & set(priors.chips)
    rows = [(chip, name, pair) for chip in sorted(chips) for name, pair in priors.chips[chip].items()]
    if stacks:
        used = {g.stack.name for g in groups} & set(priors.stacks)
        rows += [(stack, name, pair) for stack in sorted(used) for name, pair in priors.stacks[stack].items()]
    made = tuple(Prior(value, spread, _is_share(name)) for _, name, (value, spread) in rows)
    return Parameters(tuple(r[0] for r in rows), tuple(r[1] for r in rows), made)


def around(device: Device, priors: Priors) -> Parameters:
    """The constants of one device alone, expected where its profile has them, as loosely as its chip's are known."""
    spreads = priors.chips.get(device.chip) or next(iter(priors.chips.values()))
    names = tuple(spreads)
    made = tuple(Prior(getattr(device.curve, n), spreads[n][1], _is_share(n)) for n in names)
    return Parameters((device.chip,) * len(names), names, made)


def residuals(parts: Parameters, table: Table, x: Floats, only: str = "", base: Floats | None = None) -> Floats:
    """log(predicted / measured) of every row; with `only`, of the rows that this owner's constants reach."""
    out = np.zeros(len(table.runs)) if base is None else base.copy()
    seconds = table.seconds
    for group in table.groups:
        if only and only not in (group.device.chip, group.stack.name):
            continue
        device, stack = parts.device(group.device, x), parts.stack(group.stack, x)
        found = iteration(group.work, device, rates(device, stack, group.precision))
        out[group.rows] = np.log(found.iteration_s / seconds[group.rows])
    return np.where(np.isnan(seconds), 0.0, out)


def fit(table: Table, parts: Parameters) -> Floats:
    """The constants that fit every timed run, from their priors."""
    return _fit(table, parts, parts.centre, parts.centre, _weights(table) * ~np.isnan(table.seconds), ROUNDS)


def calibrate(table: Table, parts: Parameters, progress: Progress | None = None) -> Calibration:
    """Fit, then fit again without each source in turn."""
    start = parts.centre
    weights = _weights(table) * ~np.isnan(table.seconds)
    x = fit(table, parts)
    folds = sorted({run.source for run in table.runs})
    label = [run.source for run in table.runs]
    if len(folds) == 1:
        label = [run.id for run in table.runs]
        folds = sorted(set(label))
    left_out = np.zeros(len(table.runs))
    for number, fold in enumerate(folds, 1):
        held = np.array([name == fold for name in label])
        again = _fit(table, parts, x, start, weights * ~held, ROUNDS_AGAIN)
        left_out[held] = residuals(parts, table, again)[held]
        if progress:
            progress(fold, number, len(folds))
    before, after = residuals(parts, table, start), residuals(parts, table, x)
    return Calibration(parts, x, np.expm1(before), np.expm1(after), np.expm1(left_out))


def fitted_of(table: Table, chip: str, left_out: Floats) -> dict[str, object]:
    """The `fitted` block of a chip's devices: runs, sources, bands and spans."""
    groups = [g for g in table.groups if g.device.chip == chip]
    rows = np.concatenate([g.rows for g in groups])
    error: dict[str, float] = {}
    for precision in sorted({g.precision for g in groups}):
        of = np.concatenate([g.rows for g in groups if g.precision == precision])
        error[precision] = round(float(np.quantile(np.abs(left_out[of]), HELD)), 3)
    seen = [measures(g.work, j) for g in groups for j in range(len(g.rows))]
    spans = {n: (float(f"{min(m[n] for m in seen):.4g}"), float(f"{max(m[n] for m in seen):.4g}")) for n in SPAN}
    links = ["nvlink"] if any((g.work.gpus > 1).any() for g in groups) else []
    links += ["network"] if any((g.work.nodes > 1).any() for g in groups) else []
    sources = len({table.runs[i].source for i in rows})
    return {"runs": len(rows), "sources": sources, "error": error, "spans": spans, "links": links}


def _fit(table: Table, parts: Parameters, start: Floats, centre: Floats, weights: Floats, rounds: int) -> Floats:
    def at(x: Floats) -> Floats:
        return residuals(parts, table, x)

    def jacobian(x: Floats, r: Floats) -> Floats:
        out = np.zeros((len(r), len(x)))
        for column, owner in enumerate(parts.owners):
            moved = x.copy()
            moved[column] += 1e-3
            out[:, column] = (residuals(parts, table, moved, owner, r) - r) / 1e-3
        return out

    return robust(at, jacobian, start, centre, parts.spread, weights, SCALE, rounds)


def _weights(table: Table) -> Floats:
    """A source's rows are not independent: n of them count as n^0.4."""
    count = Counter(run.source for run in table.runs)
    weights = np.array([count[run.source] ** -0.6 for run in table.runs])
    return np.asarray(weights / weights.mean())


def _is_share(name: str) -> bool:
    return name.endswith(("_share", "_hidden")) or name == "grouped"
