"""What a plan's traffic asks of the links: the mean rate over a step, to hold beside what counters measure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.model.predict import Prediction


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """Mean rates of one GPU, GB/s in each direction: over the links to the GPUs of its node, and out of the node. NaN
    where the model does not tell which links carry it."""

    inside_gb_s: float
    outside_gb_s: float


def link_load(found: Prediction) -> LinkLoad:
    """Bytes that all parallelisms send in a step over the step's predicted time; what is sent is received as well.

    Volumes are those of `communication` (ring collectives, Thakur et al. 2005), on a GPU of the slowest stage. Where
    traffic hops between NUMA nodes, some of it takes PCIe: how much is not modelled, so nothing is said of the inside.
    """
    rate = 1e-9 / found.iteration_s
    hops = any(t.link == "numa" for t in found.communication)
    inside = sum(t.inside_bytes for t in found.communication) * rate
    return LinkLoad(math.nan if hops else inside, sum(t.outside_bytes for t in found.communication) * rate)
