"""Which series of a Prometheus-compatible API carry which of our metrics: profiles/metrics/prometheus.yaml."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from engine.profile.document import ProfileError, Record, load

LabelName = Annotated[str, Meta(pattern="^[a-zA-Z_][a-zA-Z0-9_]*$", max_length=100)]
SeriesName = Annotated[str, Meta(pattern="^[a-zA-Z_:][a-zA-Z0-9_:]*$", max_length=200)]


class Alternative(Record, frozen=True):
    """One way to a metric: `series`, with those of `plus` added, times `scale`, where each of `labels` has that value
    (an empty one: the label is not there)."""

    series: SeriesName
    plus: tuple[SeriesName, ...] = ()
    labels: dict[LabelName, str] = {}
    scale: float = 1.0


Alternatives = tuple[Alternative, ...]


class GpuSeries(Record, frozen=True):
    """Ways to each metric of a GPU, the best first; units are in the names."""

    temperature_c: Alternatives = ()
    memory_temperature_c: Alternatives = ()
    power_w: Alternatives = ()
    power_limit_w: Alternatives = ()
    sm_clock_mhz: Alternatives = ()
    memory_clock_mhz: Alternatives = ()
    utilization_pct: Alternatives = ()
    memory_used_mib: Alternatives = ()
    energy_j: Alternatives = ()
    margin_c: Alternatives = ()
    throttle: Alternatives = ()
    power_max_w: Alternatives = ()
    held_by_power: Alternatives = ()
    held_by_heat: Alternatives = ()
    ecc_corrected: Alternatives = ()
    ecc_uncorrected: Alternatives = ()
    rows_remapped: Alternatives = ()
    remap_pending: Alternatives = ()
    remap_failed: Alternatives = ()
    pcie_replays: Alternatives = ()
    xid: Alternatives = ()
    memory_total_mib: Alternatives = ()
    power_limit_min_w: Alternatives = ()
    power_limit_max_w: Alternatives = ()
    power_limit_default_w: Alternatives = ()
    sm_clock_max_mhz: Alternatives = ()
    slowdown_c: Alternatives = ()
    shutdown_c: Alternatives = ()

    def items(self) -> Iterator[tuple[str, Alternatives]]:
        """(metric, ways) of those that have any."""
        for name in self.__struct_fields__:
            ways: Alternatives = getattr(self, name)
            if ways:
                yield name, ways


class LinkSeries(Record, frozen=True):
    """Links of a kind: what they receive and send, bytes/s, or bytes in all where `counter`. `capacity` is the rate
    of one direction, bytes/s; `state` is 4 where a link is up. The labels of `name` name a link; only those whose
    first matches `only` are taken. `gpu`: a GPU's own, found by the GPU's labels."""

    kind: Literal["nic", "nvlink", "pcie", "xgmi"]
    rx: SeriesName
    tx: SeriesName
    capacity: SeriesName | None = None
    state: SeriesName | None = None
    name: tuple[LabelName, ...] = ()
    only: str = ""
    counter: bool = True
    gpu: bool = False


class FactLabels(Record, frozen=True):
    """Labels that tell what a GPU is; the first that is there counts."""

    name: tuple[LabelName, ...] = ()
    uuid: tuple[LabelName, ...] = ()
    bus_id: tuple[LabelName, ...] = ()
    driver: tuple[LabelName, ...] = ()


class MetricMap(Record, frozen=True):
    """The file."""

    node_labels: Annotated[tuple[LabelName, ...], Meta(min_length=1)]
    gpu_labels: Annotated[tuple[LabelName, ...], Meta(min_length=1)]
    gpu: GpuSeries
    facts: FactLabels = FactLabels()
    load: tuple[SeriesName, ...] = ()
    links: tuple[LinkSeries, ...] = ()


def read(path: Path) -> MetricMap:
    """Read and check a map. ProfileError with a sentence."""
    found = load(path, MetricMap)
    if not (found.gpu.temperature_c or found.gpu.power_w):
        raise ProfileError(
            f"{path}: gpu: temperature_c or power_w needs a series: the age of a node's readings is read from it."
        )
    for place, link in enumerate(found.links):
        try:
            re.compile(link.only)
        except re.error as error:
            raise ProfileError(f"{path}: links[{place}].only: not a regular expression: {error}.") from None
        if not link.gpu and not link.name:
            raise ProfileError(f"{path}: links[{place}].name: a link needs a label that names it.")
    return found
