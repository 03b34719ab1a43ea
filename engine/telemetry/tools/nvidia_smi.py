"""nvidia-smi: --query-gpu and --query-compute-apps as CSV, -L, and by way of nvidia_details -q and -q -x."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from engine.telemetry.reading import MigFacts, Reading
from engine.telemetry.text import clean
from engine.telemetry.tools.cell import bus_id, first, flag, label, lines, number, reading, switch, total, whole
from engine.telemetry.tools.nvidia_details import details, xml
from engine.telemetry.tools.nvidia_said import gpu_line, lost, named, refused, trouble
from engine.telemetry.tools.report import GpuReport, Report, gathered

__all__ = [
    "NEW_FIELDS",
    "OLD_FIELDS",
    "App",
    "Header",
    "apps",
    "details",
    "given",
    "header",
    "lost",
    "mig",
    "query",
    "query_fields",
    "refused",
    "row",
    "trouble",
    "xml",
]

# In the order of preference, where drivers differ in the name or in what they can read.
_FIELDS: dict[str, tuple[str, ...]] = {
    "temperature_c": ("temperature.gpu",),
    "memory_temperature_c": ("temperature.memory",),
    "margin_c": ("temperature.gpu.tlimit",),
    "power_w": ("power.draw", "power.draw.average", "power.draw.instant"),
    "power_limit_w": ("power.limit", "enforced.power.limit"),
    "sm_clock_mhz": ("clocks.current.sm", "clocks.sm"),
    "memory_clock_mhz": ("clocks.current.memory", "clocks.current.mem", "clocks.mem", "clocks.memory"),
    "utilization_pct": ("utilization.gpu",),
    "memory_used_mib": ("memory.used",),
    "memory_total_mib": ("memory.total",),
    "throttle": ("clocks_event_reasons.active", "clocks_throttle_reasons.active"),
    "ecc_corrected": ("ecc.errors.corrected.volatile.total",),
    "ecc_uncorrected": ("ecc.errors.uncorrected.volatile.total",),
    "power_limit_min_w": ("power.min_limit",),
    "power_limit_max_w": ("power.max_limit",),
    "power_limit_default_w": ("power.default_limit",),
    "sm_clock_max_mhz": ("clocks.max.sm",),
}
_FLAGS = {"remap_pending": "remapped_rows.pending", "remap_failed": "remapped_rows.failure"}
_ROWS = ("remapped_rows.correctable", "remapped_rows.uncorrectable")
_ALIASES = {"gpu_name": "name", "gpu_uuid": "uuid", "gpu_bus_id": "pci.bus_id", "used_memory": "used_gpu_memory"}
# These alone can hold commas.
_FREE = ("name", "process_name")

OLD_FIELDS = (
    "index",
    "uuid",
    "pci.bus_id",
    "temperature.gpu",
    "temperature.memory",
    "power.draw",
    "power.limit",
    "clocks.sm",
    "clocks.mem",
    "utilization.gpu",
    "memory.used",
    "memory.total",
    "clocks_throttle_reasons.active",
    "power.min_limit",
    "power.max_limit",
    "power.default_limit",
    "clocks.max.sm",
    "ecc.errors.corrected.volatile.total",
    "ecc.errors.uncorrected.volatile.total",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "persistence_mode",
    "driver_version",
    "name",
)
"""What every driver in use knows."""

NEW_FIELDS = (
    *OLD_FIELDS[:4],
    "temperature.gpu.tlimit",
    *("clocks_event_reasons.active" if f == "clocks_throttle_reasons.active" else f for f in OLD_FIELDS[4:-2]),
    *_ROWS,
    *_FLAGS.values(),
    "mig.mode.current",
    *OLD_FIELDS[-2:],
)
"""With what came since: margins, remapped rows, MIG, and the later name of the throttle reasons."""


@dataclass(frozen=True)
class Header:
    """The columns of a CSV: their names without units, and the units."""

    fields: tuple[str, ...]
    units: tuple[str, ...]


@dataclass(frozen=True)
class App:
    """A process on a GPU, by the uuid of the whole GPU also where it runs on a MIG instance."""

    gpu_uuid: str | None
    bus_id: str | None
    pid: int
    name: str
    memory_mib: Reading


def query_fields(old: bool = False) -> tuple[str, ...]:
    """The fields to ask with --query-gpu; `old` ones for a driver that refuses the others."""
    return OLD_FIELDS if old else NEW_FIELDS


def given(fields: Sequence[str]) -> Header:
    """The header of output that has none: the fields as they were asked for."""
    return Header(tuple(_ALIASES.get(field, field) for field in fields), ("",) * len(fields))


def header(line: str) -> Header | None:
    """The columns, where a line names them; None for any other line."""
    cells = [re.fullmatch(r"\s*([A-Za-z][\w.]{0,99})(?:\s*\[([^\]]{1,12})\])?\s*", c) for c in _cells(line)]
    if not all(cells):
        return None
    found = Header(
        tuple(_ALIASES.get(c[1], c[1]) for c in cells if c),
        tuple(c[2] or "" for c in cells if c),
    )
    known = _KNOWN.intersection(found.fields)
    return found if "index" in known or len(known) > 1 else None


def row(columns: Header, line: str) -> GpuReport | None:
    """One GPU's line, or None for a line that is none: cut, a banner, an error.

    `margin_c` is the T.Limit as the driver reads it, the way to the temperature where clocks first give way: the query
    does not tell the thresholds that `details` has.
    """
    found = _spread(columns, line, _is_gpu)
    if found is None:
        return None
    said = dict(zip(columns.fields, found, strict=True))
    units = dict(zip(columns.fields, columns.units, strict=True))
    return GpuReport(
        index=whole(said["index"]) if "index" in said else None,
        name=label(said.get("name")),
        uuid=label(said.get("uuid")),
        bus_id=bus_id(said.get("pci.bus_id", "")),
        readings=_readings(said, units),
        persistence=switch(said.get("persistence_mode")),
        mig_mode=switch(said.get("mig.mode.current")),
        needs_reset=any("requires reset" in cell.lower() for cell in found)
        or "reset" in said.get("gpu_recovery_action", "").lower(),
        pcie_gen=number(said.get("pcie.link.gen.current")),
        pcie_gen_max=number(said.get("pcie.link.gen.max")),
        pcie_width=number(said.get("pcie.link.width.current")),
        pcie_width_max=number(said.get("pcie.link.width.max")),
    )


def query(text: str, fields: Sequence[str] = ()) -> Report:
    """`--query-gpu=… --format=csv`; `fields` as asked for, where the output comes without a header."""
    columns = given(fields) if fields else None
    gpus: list[GpuReport] = []
    gone: list[str] = []
    troubles: list[str | None] = []
    drivers: list[str | None] = []
    noise = 0
    for line in lines(text, 65536):
        if not line.strip():
            continue
        named_columns = header(line)
        columns = named_columns or columns
        gpu = row(columns, line) if columns and not named_columns else None
        lost_gpu, bad = (None, None) if gpu or named_columns else (lost(line), trouble(line))
        if gpu is not None and columns is not None:
            gpus.append(gpu)
            drivers.append(_driver(columns, line))
        gone += [lost_gpu] if lost_gpu else []
        troubles.append(bad)
        noise += not (named_columns or gpu or lost_gpu or bad)
    driver = next((d for d in drivers if d), None)
    return gathered("nvidia-smi", gpus, lost=named(gone), troubles=troubles, driver=driver, noise=noise)


def mig(text: str) -> Report:
    """`nvidia-smi -L`: GPUs, and the MIG instances below each by their profiles' names."""
    gpus: list[GpuReport] = []
    gone: list[str] = []
    troubles: list[str | None] = []
    noise = 0
    for line in filter(str.strip, lines(text)):
        gpu, part = gpu_line(line), re.match(r"\s*MIG\s+(\S+)\s+Device\s+\d{1,4}\s*:", line, re.A)
        if gpu:
            gpus.append(GpuReport(*gpu))
        elif part and gpus:
            parts = (*gpus[-1].mig, MigFacts(name=clean(part[1], 40)))
            gpus[-1] = replace(gpus[-1], mig=parts, mig_mode=True)
        elif lost_gpu := lost(line):
            gone.append(lost_gpu)
        else:
            troubles.append(trouble(line))
            noise += troubles[-1] is None
    return gathered("nvidia-smi", gpus, lost=named(gone), troubles=troubles, noise=noise)


def apps(text: str) -> tuple[App, ...]:
    """`--query-compute-apps=… --format=csv`: the processes. Which MIG instance one runs on is not told."""
    columns: Header | None = None
    found: list[App] = []
    for line in lines(text, 65536):
        columns = header(line) or columns
        cells = _spread(columns, line, _is_app) if columns else None
        if columns is None or cells is None:
            continue
        said = dict(zip(columns.fields, cells, strict=True))
        unit = dict(zip(columns.fields, columns.units, strict=True)).get("used_gpu_memory", "")
        memory = reading("memory_used_mib", said["used_gpu_memory"], unit) if "used_gpu_memory" in said else None
        name = clean(said.get("process_name", "").strip())
        found.append(App(label(said.get("uuid")), bus_id(said.get("pci.bus_id", "")), int(said["pid"]), name, memory))
    return tuple(found)


_KNOWN = frozenset(
    {"index", "name", "uuid", "pci.bus_id", "persistence_mode", "driver_version", "pid", "process_name"}
    | {
        "used_gpu_memory",
        "timestamp",
        *_ROWS,
        *_FLAGS.values(),
        "mig.mode.current",
        *(f for f in OLD_FIELDS if f.startswith("pcie.")),
    }
    | {field for fields in _FIELDS.values() for field in fields}
)


def _cells(line: str) -> list[str]:
    return line[:65536].split(",")


def _spread(columns: Header, line: str, fits: Callable[[dict[str, str]], bool]) -> tuple[str, ...] | None:
    """One cell a column. Commas in names are found by working from both ends; with two names, by what fits."""
    cells = [cell.strip() for cell in _cells(line)]
    extra = len(cells) - len(columns.fields)
    if extra < 0 or extra > 64:
        return None
    for spread in _spreads(cells, [i for i, f in enumerate(columns.fields) if f in _FREE], extra):
        if fits(dict(zip(columns.fields, spread, strict=True))):
            return tuple(spread)
    return None


def _spreads(cells: list[str], free: list[int], extra: int) -> Iterable[list[str]]:
    if not extra:
        yield cells
    elif free:
        for one in range(extra + 1):
            yield _joined(_joined(cells, free[0], one), free[-1], extra - one)


def _joined(cells: list[str], place: int, more: int) -> list[str]:
    end = place + more + 1
    return [*cells[:place], ", ".join(cells[place:end]), *cells[end:]]


def _is_gpu(said: dict[str, str]) -> bool:
    if "index" in said:
        return whole(said["index"]) is not None
    return said.get("uuid", "").startswith("GPU-") or bus_id(said.get("pci.bus_id", "")) is not None


def _is_app(said: dict[str, str]) -> bool:
    pid = whole(said.get("pid", ""))
    return bool(pid) and said.get("uuid", "GPU-").startswith(("GPU-", "MIG-", "[", "N/A"))


def _readings(said: dict[str, str], units: dict[str, str]) -> dict[str, Reading]:
    found: dict[str, Reading] = {}
    for metric, fields in _FIELDS.items():
        asked = [field for field in fields if field in said]
        if asked:
            found[metric] = first(reading(metric, said[field], units[field]) for field in asked)
    found.update({metric: flag(said[field]) for metric, field in _FLAGS.items() if field in said})
    if any(field in said for field in _ROWS):
        found["rows_remapped"] = total(reading("rows_remapped", said[field]) for field in _ROWS if field in said)
    return found


def _driver(columns: Header, line: str) -> str | None:
    cells = _spread(columns, line, _is_gpu)
    if cells is None or "driver_version" not in columns.fields:
        return None
    return label(cells[columns.fields.index("driver_version")], 40)
