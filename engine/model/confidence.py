"""How sure a prediction is: the error that left-out sources had, and what lies beyond the runs of the fit."""

from __future__ import annotations

from dataclasses import dataclass

from engine.model.work import Work
from engine.profile import Device

UNKNOWN_BAND = 0.3
"""Half-width of the band where no run of that device and precision was ever compared."""
SPAN = ("tokens", "width", "seq", "gpus")
LABELS = {
    "tokens": "tokens of a microbatch on one GPU",
    "width": "hidden size over tensor parallel",
    "seq": "sequence length",
    "gpus": "number of GPUs",
}


@dataclass(frozen=True, slots=True)
class Confidence:
    """`band` is the half-width, as a share of the time, that held four of five runs of sources left out of the fit;
    `beyond` names in sentences what lies outside the fitted runs."""

    band: float
    beyond: tuple[str, ...]


def measures(w: Work, row: int) -> dict[str, float]:
    """The quantities whose span over the fitted runs is kept with a device."""
    return {
        "tokens": float(w.tokens[row]),
        "width": float(w.hidden[row] / w.tp[row]),
        "seq": float(w.seq[row]),
        "gpus": float(w.gpus[row]),
    }


def confidence(device: Device, precision: str, w: Work, row: int, links: tuple[str, ...]) -> Confidence:
    """Band and marks of one plan on one device."""
    fitted = device.fitted
    if fitted is None:
        return Confidence(UNKNOWN_BAND, (f"No measured run of {device.name} has been compared with the model.",))
    beyond = []
    band = {str(k): v for k, v in fitted.error.items()}.get(precision)
    if band is None:
        known = ", ".join(fitted.error)
        beyond.append(f"The fit of {device.name} has no run in {precision}; it has {known}.")
    for name, value in measures(w, row).items():
        low, high = fitted.spans[name]
        if not low * 0.999 <= value <= high * 1.001:
            beyond.append(f"The {LABELS[name]}, {value:,.0f}, lies outside the fit ({low:,.0f} to {high:,.0f}).")
    for link in links:
        if link not in ("none", *fitted.links):
            beyond.append(f"No fitted run of {device.name} used the {link}.")
    widest = max(fitted.error.values())
    factor = 1.0 + 0.5 * len(beyond)
    return Confidence(min(1.0, (band if band is not None else widest) * factor), tuple(beyond))
