"""The GPUs of a node that is read through its tools: rounds of rows become columns, and what the tools tell once facts.

A GPU keeps its slot as long as the connection lasts, whatever index the tool gives it after another one was lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.telemetry.reading import GpuFacts, Hello, MigFacts, ProcessFacts, Reading
from engine.telemetry.snapshot import GPU_FACTS, GPU_METRICS
from engine.telemetry.tools.cell import whole
from engine.telemetry.tools.nvidia_smi import App
from engine.telemetry.tools.report import GpuReport
from engine.telemetry.tools.topology import Topology

MOST_GPUS = 128
"""Of one node: sixteen GPUs in eight parts each."""
POWER_BITS, HEAT_BITS = 0x4 | 0x80, 0x8 | 0x20 | 0x40
NEEDS_RESET = "it needs a reset"


@dataclass
class Slot:
    """One GPU: `now` as the last round told it, the facts gathered so far, and what was said of its links."""

    index: int
    now: GpuReport
    lost: bool = False
    told: dict[str, Reading] = field(default_factory=dict)
    name: str | None = None
    uuid: str | None = None
    bus_id: str | None = None
    limit_w: Reading = None
    pcie_gen_max: float | None = None
    pcie_width_max: float | None = None
    mig_names: tuple[MigFacts, ...] = ()
    mig_parts: tuple[MigFacts, ...] = ()
    reset_advised: bool = False
    note: str | None = None
    links_note: str | None = None

    def learn(self, gpu: GpuReport) -> None:
        """Take what a report tells for good: a number is not given up for a word."""
        self.name, self.uuid = gpu.name or self.name, gpu.uuid or self.uuid
        self.bus_id = gpu.bus_id or self.bus_id
        self.limit_w = gpu.readings.get("power_limit_w", self.limit_w)
        self.pcie_gen_max = gpu.pcie_gen_max or self.pcie_gen_max
        self.pcie_width_max = gpu.pcie_width_max or self.pcie_width_max
        for name in GPU_FACTS:
            value = gpu.readings.get(name)
            if value is not None and (isinstance(value, float) or not isinstance(self.told.get(name), float)):
                self.told[name] = value

    @property
    def needs_reset(self) -> bool:
        return self.now.needs_reset or self.reset_advised

    @property
    def place(self) -> str:
        return self.bus_id or f"index {self.index}"

    @property
    def mig(self) -> tuple[MigFacts, ...]:
        """The instances: their names from one list, their ids and memory from another, when these agree."""
        names, parts = self.mig_names, self.mig_parts
        if len(names) != len(parts):
            return names or parts
        return tuple(
            MigFacts(
                name=n.name,
                gpu_instance=p.gpu_instance,
                compute_instance=p.compute_instance,
                memory_total_mib=p.memory_total_mib,
                memory_used_mib=p.memory_used_mib,
            )
            for n, p in zip(names, parts, strict=True)
        )


class Gpus:
    """All GPUs of a node."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.topology = Topology()
        self._metrics: list[str] = []
        self._begun = False

    # A round of rows.

    def take_round(self, reports: list[GpuReport], lost: list[str], complete: bool) -> None:
        """One reading of the node: who was read, who the tool says is lost. Who is missing though the round is
        complete is lost as well; in one that was cut off nothing is known of it."""
        seen: list[Slot] = []
        for report in sorted(reports, key=lambda r: (r.index is None, r.index or 0)):
            place = self._place(report, make=True)
            if place is not None:
                seen.append(self.slots[place])
                self._read(self.slots[place], report)
        named = [self.slots[place] for name in lost if (place := self._named(name)) is not None]
        for slot in self.slots:
            if not any(slot is other for other in seen):
                slot.now = GpuReport(index=slot.index)
                slot.lost = (
                    any(slot is other for other in named)
                    or (complete and bool(reports))
                    or (slot.lost and not complete)
                )
        self._begun = self._begun or bool(self.slots)

    def _read(self, slot: Slot, report: GpuReport) -> None:
        slot.now, slot.lost, slot.note = report, False, report.note
        slot.learn(report)
        self._metrics += [m for m in report.readings if m in GPU_METRICS and m not in self._metrics]

    def find(self, report: GpuReport) -> Slot | None:
        """The GPU that another list of the tool speaks of."""
        place = self._place(report, make=False)
        return None if place is None else self.slots[place]

    def knows(self, report: GpuReport) -> int | None:
        return self._place(report, make=False)

    def _place(self, gpu: GpuReport, make: bool) -> int | None:
        """By bus id, else uuid, else index: only the last may change."""
        for p, slot in enumerate(self.slots):
            if gpu.bus_id and slot.bus_id == gpu.bus_id:
                return p
        for p, slot in enumerate(self.slots):
            if gpu.uuid and slot.uuid == gpu.uuid and not (gpu.bus_id and slot.bus_id):
                return p
        same = [
            p
            for p, slot in enumerate(self.slots)
            if slot.now.index == gpu.index is not None and not (gpu.bus_id and slot.bus_id)
        ]
        if same or not make or len(self.slots) >= MOST_GPUS:
            return same[0] if same else None
        taken = {slot.index for slot in self.slots}
        index = gpu.index if gpu.index is not None and gpu.index not in taken else self._free()
        self.slots.append(Slot(index, gpu))
        return len(self.slots) - 1

    def named(self, name: str) -> int | None:
        """The slot of a GPU that a sentence names, where it is known already."""
        index = whole(name.removeprefix("index ")) if name.startswith("index ") else None
        for place, slot in enumerate(self.slots):
            if slot.bus_id == name or (index is not None and slot.index == index):
                return place
        return None

    def _named(self, name: str) -> int | None:
        """As `named`; one that was never read gets a slot too, since it is there. What no sentence names gets none."""
        found = self.named(name)
        if found is not None or len(self.slots) >= MOST_GPUS:
            return found
        index = whole(name.removeprefix("index ")) if name.startswith("index ") else None
        if index is None and ":" not in name:
            return None
        slot = Slot(self._free() if index is None else index, GpuReport(), bus_id=name if index is None else None)
        # In the first round in its place, so that rows are in the order of indices; later nobody else's slot moves.
        later = [p for p, other in enumerate(self.slots) if other.index > slot.index and not self._begun]
        at = later[0] if later else len(self.slots)
        self.slots.insert(at, slot)
        return at

    def _free(self) -> int:
        taken = {slot.index for slot in self.slots}
        return next(i for i in range(len(taken) + 1) if i not in taken)

    # What is told of it.

    def columns(self) -> dict[str, list[Reading]]:
        """A column a metric that was ever read: what is read no longer is not left standing."""
        found: dict[str, list[Reading]] = {m: [_reading(slot, m) for slot in self.slots] for m in self._metrics}
        if "throttle" in found:
            found["held_by_power"] = [_held(r, POWER_BITS) for r in found["throttle"]]
            found["held_by_heat"] = [_held(r, HEAT_BITS) for r in found["throttle"]]
        if "temperature_c" in found:
            margins = found.get("margin_c", [None] * len(self.slots))
            found["margin_c"] = [_margin(slot, told) for slot, told in zip(self.slots, margins, strict=True)]
        return found

    def unreadable(self) -> dict[str, list[Reading]]:
        """Columns for a node of which nothing can be read now."""
        names = [*self._metrics, "held_by_power", "held_by_heat", "margin_c"] if self._metrics else []
        return {name: ["error"] * len(self.slots) for name in names}

    def lost(self) -> tuple[str, ...]:
        """Who does not answer: the lost ones, and those that answer nothing until they are reset."""
        gone = [slot.place for slot in self.slots if slot.lost]
        silent = [f"{slot.place} (needs a reset)" for slot in self.slots if slot.needs_reset and _silent(slot.now)]
        return (*gone, *silent)

    def hello(self, hostname: str, driver: str | None, reader: str, because: str) -> Hello:
        gpus = tuple(self._facts(slot) for slot in self.slots)
        return Hello(1, hostname, gpus, driver=driver, reader=reader, because=because or None)

    def _facts(self, slot: Slot) -> GpuFacts:
        notes = (slot.note, NEEDS_RESET if slot.needs_reset else None, slot.links_note)
        index = slot.index if slot.now.index is None else slot.now.index
        return GpuFacts(
            index=slot.index,
            lost=slot.lost,
            name=slot.name,
            uuid=slot.uuid,
            bus_id=slot.bus_id,
            numa_node=self.topology.numa.get(index),
            cpus=self.topology.cpus.get(index),
            near=self.topology.nearest_nic.get(index, ()),
            persistence=slot.now.persistence,
            mig=slot.mig,
            note="; ".join(note for note in notes if note) or None,
            memory_total_mib=slot.told.get("memory_total_mib"),
            power_limit_min_w=slot.told.get("power_limit_min_w"),
            power_limit_max_w=slot.told.get("power_limit_max_w"),
            power_limit_default_w=slot.told.get("power_limit_default_w"),
            sm_clock_max_mhz=slot.told.get("sm_clock_max_mhz"),
            slowdown_c=slot.told.get("slowdown_c"),
            shutdown_c=slot.told.get("shutdown_c"),
        )

    def by_index(self) -> dict[int, int]:
        """The slot of each index that the tool uses now."""
        return {slot.now.index: p for p, slot in enumerate(self.slots) if slot.now.index is not None}

    def processes(self, apps: Iterable[App]) -> tuple[ProcessFacts, ...]:
        by_uuid = {slot.uuid: p for p, slot in enumerate(self.slots) if slot.uuid}
        by_bus = {slot.bus_id: p for p, slot in enumerate(self.slots) if slot.bus_id}
        found: list[ProcessFacts] = []
        for app in apps:
            gpu = by_uuid.get(app.gpu_uuid or "", by_bus.get(app.bus_id or ""))
            if gpu is not None and len(found) < MOST_GPUS * 16:
                memory = app.memory_mib if isinstance(app.memory_mib, float) else None
                found.append(ProcessFacts(gpu, app.pid, app.name.rpartition("/")[2], memory))
        return tuple(found)


def _reading(slot: Slot, metric: str) -> Reading:
    if slot.lost:
        return "lost"
    told = slot.now.readings.get(metric)
    if told is None and metric == "power_limit_w" and slot.now.readings:
        told = slot.limit_w  # some tools tell it among the facts
    return told if told is not None else "absent" if slot.now.readings else "error"


def _held(mask: Reading, bits: int) -> Reading:
    """The tick's share in which a limiter held the clock, by its one sample."""
    return float(bool(int(mask) & bits)) if isinstance(mask, float) and 0 <= mask < 2**53 else mask


def _margin(slot: Slot, told: Reading) -> Reading:
    """As the driver reads it; where it reads none, the way to the temperature that slows the clocks."""
    slowdown, now = slot.told.get("slowdown_c"), slot.now.readings.get("temperature_c")
    if isinstance(told, float) or slot.lost or not isinstance(slowdown, float):
        return told
    return slowdown - now if isinstance(now, float) else now


def _silent(gpu: GpuReport) -> bool:
    return not any(isinstance(gpu.readings.get(name), float) for name in ("temperature_c", "power_w"))
