"""GPUs that are hotter than their power and air explain, with their neighbours as evidence. Arrays over GPUs."""

from __future__ import annotations

import warnings
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
    middle = _by_node(off, twin.chassis.node)
    common = middle[twin.chassis.node]
    own, node_k = off - common, common - _median(middle)
    rest = _stray(own, twin.chassis.node)
    band = np.sqrt((BOARD_SPREAD * (as_built - twin.chassis.inlet_c)) ** 2 + settled_sd**2)
    with np.errstate(invalid="ignore"):
        odd = own > np.maximum(SIGMAS * band, LEAST_K)
    return Excess(own, node_k, rest, band, odd)


def _by_node(values: Floats, node: npt.NDArray[np.int64]) -> Floats:
    """(node) the median of each node's known values, NaN where none is."""
    table, _ = _table(values, node)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a node of which nothing is known
        found: Floats = np.nanmedian(table, axis=1)
    return found


def _stray(own: Floats, node: npt.NDArray[np.int64]) -> Floats:
    """For each GPU, the ninth decile of how far the known others of its node are off."""
    table, place = _table(np.abs(own), node)
    rest = np.full(table.shape, np.nan)
    for slot in range(table.shape[1]):  # as many as a node has GPUs, whatever the number of nodes
        others = np.sort(np.delete(table, slot, axis=1), axis=1)  # the unknown ones last
        known = (~np.isnan(others)).sum(axis=1)
        some = np.flatnonzero(known)
        at = 0.9 * (known[some] - 1)
        low = np.floor(at).astype(np.int64)
        below, above = others[some, low], others[some, np.minimum(low + 1, known[some] - 1)]
        rest[some, slot] = below + (at - low) * (above - below)
    return rest[node, place]


def _table(values: Floats, node: npt.NDArray[np.int64]) -> tuple[Floats, npt.NDArray[np.int64]]:
    """(node, place) of values, NaN where a node has fewer; and the place of each."""
    order = np.argsort(node, kind="stable")
    counts = np.bincount(node)
    place = np.empty(len(node), np.int64)
    place[order] = np.arange(len(node)) - np.repeat(np.cumsum(counts) - counts, counts)
    table = np.full((len(counts), max(1, int(counts.max(initial=1)))), np.nan)
    table[node, place] = values
    return table, place


def _median(values: Floats) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else float("nan")
