"""What the command line asks without any node: predict a plan, hold the model against runs, fit it, report on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from engine.model import power
from engine.model.predict import PlanError, Prediction, predict
from engine.plan import calibrate as fitting
from engine.plan.advice import advice
from engine.plan.calibrate import Calibration, Priors
from engine.plan.measured import Table, table
from engine.plan.placement import place
from engine.plan.reportcard import Claims, Line, reportcard
from engine.plan.validate import Errors, Validation, errors, summary, validate
from engine.profile import Cluster, Model, Plan, ProfileError, catalog, document, edit, run

FITTED = "runs and sources behind the curve; error: what held four of five runs of sources left out"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Predicted:
    """A prediction and what it is of."""

    model: Model
    cluster: Cluster
    found: Prediction


def prediction(model: str, cluster: str, plan: str) -> Predicted:
    """Predict a named plan of a named model on a named cluster. ProfileError with a sentence for whatever is wrong."""
    return predicted(catalog.model(model), catalog.cluster(cluster), catalog.plan(plan))


def predicted(model: Model, cluster: Cluster, plan: Plan) -> Predicted:
    """Predict a plan. ProfileError with a sentence when it cannot be laid out."""
    try:
        return Predicted(model, cluster, predict(model, plan, cluster, catalog.stack(plan.stack)))
    except PlanError as error:
        raise ProfileError(str(error)) from None


def prediction_json(told: Predicted) -> dict[str, Any]:
    """The prediction as JSON has it."""
    found = told.found
    b = found.breakdown
    gpus = found.gpus
    return {
        "model": told.model.name,
        "cluster": told.cluster.name,
        "plan": found.plan.name,
        "label": found.plan.label(),
        "gpus": gpus,
        "data_parallel": found.dp,
        "microbatches": found.microbatches,
        "iteration_s": found.iteration_s,
        "band": [found.iteration_s * (1 - found.confidence.band), found.iteration_s * (1 + found.confidence.band)],
        "beyond_fit": list(found.confidence.beyond),
        "tokens_per_s": found.tokens_per_s,
        "tokens_per_s_per_gpu": found.tokens_per_s / gpus,
        "model_tflops_per_gpu": found.model_flops_per_iteration / found.iteration_s / gpus / 1e12,
        "hardware_tflops_per_gpu": found.hardware_flops_per_iteration / found.iteration_s / gpus / 1e12,
        "mfu": found.mfu,
        "memory_gib": found.memory.total_gib,
        "memory": asdict(found.memory),
        "stages_gib": list(found.stages_gib),
        "capacity_gib": found.capacity_gib,
        "headroom_gib": found.headroom_gib,
        "fits": found.fits,
        "breakdown": asdict(b),
        "communication": [asdict(t) for t in found.communication],
        "power_w": found.power_w,
        "power_parts_w": power.parts_w(told.cluster.device, found.activity, found.sm_clock_mhz, found.temperature_c),
        "burst_w": sum(
            power.parts_w(told.cluster.device, found.busy_activity, found.sm_clock_mhz, found.temperature_c).values()
        ),
        "cluster_w": found.cluster_w,
        "sm_clock_mhz": found.sm_clock_mhz,
        "throttled_share": found.throttled_share,
        "energy_j": found.energy_j,
        "tokens_per_joule": found.tokens_per_joule,
        "samples_per_kwh": found.samples_per_kwh,
        "cost_per_million_tokens": found.cost_per_million_tokens,
        "temperature_c": found.temperature_c,
        "placement": asdict(place(told.cluster, found)),
        "advice": advice(told.model, told.cluster, catalog.stack(found.plan.stack), found),
    }


def rows(path: Path) -> Table:
    """A file of measured runs, laid out."""
    return table(*run.read(path))


def validation(path: Path) -> Validation:
    """Hold the model against a file of measured runs."""
    return validate(rows(path))


def validation_json(found: Validation) -> dict[str, Any]:
    """The validation as JSON has it; errors are fractions."""
    return {
        "n": len(found.rows),
        "failed": [{"id": name, "reason": reason} for name, reason in found.failed],
        **_summary(errors(found.rows)),
        "groups": [{"by": by, "name": name, "n": e.n, **_summary(e)} for by, name, e in found.groups],
        "rows": [asdict(r) for r in found.rows],
        "memory": {"n": len(found.memory), **_summary(errors(found.memory)), "rows": [asdict(r) for r in found.memory]},
        "ranking": [asdict(r) for r in found.ranking],
        "changes": asdict(found.changes),
    }


@dataclass(frozen=True)
class Fit:
    """A finished calibration: what it was fitted on, the fit, and the text of each profile it changes."""

    table: Table
    fit: Calibration
    files: dict[str, str]


def calibrate_all(path: Path, progress: Progress | None = None) -> Fit:
    """Fit every chip and stack that the runs use; `files` are paths below a profiles folder."""
    found = rows(path)
    priors = document.load(catalog.ROOT / "priors.yaml", Priors)
    parts = fitting.parameters(priors, found.groups, stacks=True)
    fit = fitting.calibrate(found, parts, progress)
    files = {}
    for name in catalog.names("device"):
        device = catalog.device(name)
        if device.chip in parts.owners:
            text = catalog.find("device", name).read_text(encoding="utf-8")
            curve = parts.device(device, fit.x).curve
            text = edit.with_numbers(text, {n: getattr(curve, n) for n in parts.of(device.chip, fit.x)}, "curve")
            block = fitting.fitted_of(found, device.chip, fit.left_out)
            files[f"hardware/{name}.yaml"] = edit.with_block(text, "fitted", block, FITTED)
    for name in catalog.names("stack"):
        if name in parts.owners:
            text = catalog.find("stack", name).read_text(encoding="utf-8")
            files[f"stacks/{name}.yaml"] = edit.with_numbers(text, parts.of(name, fit.x))
    return Fit(found, fit, files)


def calibrate_device(path: Path, hardware: str, progress: Progress | None = None) -> Fit:
    """Fit one device's curve to the runs of that device; `files` has the one profile under the device's name."""
    device = catalog.device(hardware)
    good, bad = run.read(path)
    own = [r for r in good if r.hardware in (hardware, device.name)]
    found = table([_on(r, hardware) for r in own], bad)
    if len(found.runs) < 3:
        raise ProfileError(
            f"{path}: {len(found.runs)} runs on {device.name} can be predicted; a fit needs at least three."
        )
    priors = document.load(catalog.ROOT / "priors.yaml", Priors)
    fit = fitting.calibrate(found, fitting.around(device, priors), progress)
    text = catalog.find("device", hardware).read_text(encoding="utf-8")
    curve = fit.parameters.device(device, fit.x).curve
    text = edit.with_numbers(text, {n: getattr(curve, n) for n in fit.parameters.names}, "curve")
    text = edit.with_block(text, "fitted", fitting.fitted_of(found, device.chip, fit.left_out), FITTED)
    return Fit(found, fit, {device.name: text})


def fit_summary(fit: Fit) -> dict[str, Any]:
    """Errors before and after a fit, and of left-out runs, as fractions; failed rows are named."""
    timed = ~np.isnan(fit.table.seconds)

    def of(values: Any) -> dict[str, float]:
        return _summary(summary(values[timed]))

    sources = sorted({r.source for r in fit.table.runs})
    held = [
        {
            "source": name,
            "n": int(sum(mine)),
            "after": float(np.median(np.abs(fit.fit.after[mine]))),
            "left_out": float(np.median(np.abs(fit.fit.left_out[mine]))),
        }
        for name in sources
        if (mine := np.array([r.source == name for r in fit.table.runs]) & timed).any()
    ]
    constants = fit.fit.parameters
    return {
        "n": int(timed.sum()),
        "failed": [{"id": name, "reason": reason} for name, reason in fit.table.failed],
        "before": of(fit.fit.before),
        "after": of(fit.fit.after),
        "left_out": of(fit.fit.left_out),
        "sources": held,
        "constants": [
            {"of": owner, "name": name, "expected": prior.value, "fitted": prior.outward(value)}
            for owner, name, prior, value in zip(
                constants.owners, constants.names, constants.priors, fit.fit.x, strict=True
            )
        ],
    }


def report() -> list[Line]:
    """The report card: every figure of the source text beside the model's own."""
    return reportcard(document.load(catalog.ROOT / "reportcard.yaml", Claims))


def _on(found: run.Run, hardware: str) -> run.Run:
    return msgspec.structs.replace(found, hardware=hardware)


def _summary(e: Errors) -> dict[str, float]:
    return {
        "median_abs_error": e.median,
        "mean_abs_error": e.mean,
        "p90_abs_error": e.p90,
        "max_abs_error": e.max,
    }
