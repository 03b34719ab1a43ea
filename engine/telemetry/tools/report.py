"""What a tool's output says of a node's GPUs, whichever tool it was."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.telemetry.reading import MigFacts, Reading


@dataclass(frozen=True)
class GpuReport:
    """One GPU. `readings` by metric, those that the tool was asked for; `index` None where it prints none.

    `note` says what a reader must know. `pcie_gen` and `pcie_width` are those of now, with what the slot can do.
    """

    index: int | None = None
    name: str | None = None
    uuid: str | None = None
    bus_id: str | None = None
    readings: dict[str, Reading] = field(default_factory=dict)
    persistence: bool | None = None
    pcie_gen: float | None = None
    pcie_gen_max: float | None = None
    pcie_width: float | None = None
    pcie_width_max: float | None = None
    max_operating_c: Reading = None
    mig_mode: bool | None = None
    mig: tuple[MigFacts, ...] = ()
    note: str | None = None
    needs_reset: bool = False

    @property
    def lost(self) -> bool:
        """The tool lists it, and nothing of it can be read any more."""
        said = self.readings.values()
        return "lost" in said and not any(isinstance(r, float) for r in said)

    @property
    def place(self) -> str:
        """What names it best to a reader."""
        return self.bus_id or (f"index {self.index}" if self.index is not None else self.uuid or "an unnamed GPU")


@dataclass(frozen=True)
class Report:
    """A node. `lost` are GPUs that the tool could not reach, by bus id or index; `trouble` a sentence when nothing of
    the node can be read; `noise` counts lines that are none of the tool's, `implausible` torn readings left out."""

    gpus: tuple[GpuReport, ...] = ()
    lost: tuple[str, ...] = ()
    trouble: str | None = None
    driver: str | None = None
    noise: int = 0
    implausible: int = 0


def gathered(
    tool: str,
    gpus: Iterable[GpuReport],
    *,
    lost: Iterable[str | None] = (),
    troubles: Iterable[str | None] = (),
    driver: str | None = None,
    noise: int = 0,
    implausible: int = 0,
) -> Report:
    """A report: a GPU told of twice is told of once, as it was last, and one that is lost is not among those read."""
    told: dict[object, GpuReport] = {}
    for place, gpu in enumerate(gpus):
        told[gpu.index if gpu.index is not None else gpu.bus_id or gpu.uuid or ("place", place)] = gpu
    gone = [name for name in lost if name] + [gpu.place for gpu in told.values() if gpu.lost]
    read = tuple(gpu for gpu in told.values() if not gpu.lost)
    said = list(dict.fromkeys(trouble for trouble in troubles if trouble))
    more = f" ({said[1]})" if len(said) > 1 else ""
    trouble = said[0] + more if said else None if gone else f"{tool} names no GPU"
    return Report(read, tuple(dict.fromkeys(gone)), None if read else trouble, driver, noise, implausible)
