"""GPUs that are hotter than their power and air explain, with their neighbours as evidence. Arrays over GPUs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.model import observer, thermal
from engine.model.observer import Twin

Floats = npt.NDArray[np.float64]

BOARD_SPREAD = 0.06
"""Standard deviation of the rise above the air among healthy boards of one kind, as a share."""
SIGMAS, LEAST_K = 3.0, 5.0
LEAST_W = 150.0
"""Below this power nothing shows: resistances times little."""


@dataclass(frozen=True)
class Excess:
    """`own_k` what a GPU is hotter than its node's median GPU is off its profile; `node_k` that median, less the
    cluster's; `rest_k` how far the other GPUs of the node stray at most (9 of 10); `odd` where it is out of band."""

    own_k: Floats
    node_k: Floats
    rest_k: Floats
    band_k: Floats
    odd: npt.NDArray[np.bool_]


def excess(twin: Twin, settled_sd: Floats) -> Excess:
    """Compare where each GPU settles with the constants learned of it and with those of its profile, at the same
    power. What all GPUs of a node share (its air, its fans) is the node's; the rest is the GPU's own."""
    as_built = thermal.steady(twin.chassis, twin.mean_w).junction_c
    off = np.where(twin.known & (twin.mean_w >= LEAST_W), observer.settled_c(twin) - as_built, np.nan)
    node = twin.chassis.node
    own, node_k, rest = np.full(len(off), np.nan), np.full(len(off), np.nan), np.full(len(off), np.nan)
    middle = np.array([_median(off[node == n]) for n in range(int(node.max()) + 1)])
    for n, common in enumerate(middle):
        rows = np.flatnonzero(node == n)
        own[rows] = off[rows] - common
        node_k[rows] = common - _median(middle)
        for row in rows:
            others = np.abs(own[rows[rows != row]])
            known = others[~np.isnan(others)]
            rest[row] = np.quantile(known, 0.9) if len(known) else np.nan
    band = np.sqrt((BOARD_SPREAD * (as_built - twin.chassis.inlet_c)) ** 2 + settled_sd**2)
    with np.errstate(invalid="ignore"):
        odd = own > np.maximum(SIGMAS * band, LEAST_K)
    return Excess(own, node_k, rest, band, odd)


def _median(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else float("nan")
