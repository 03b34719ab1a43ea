"""Heat from the command line: fit the constants of power and heat, and write them where they belong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.plan import heat as fitting
from engine.plan.heat import HeatFit, HeatPriors
from engine.profile import catalog, document, edit, heat


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
