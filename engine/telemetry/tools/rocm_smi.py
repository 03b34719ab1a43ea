"""rocm-smi of ROCm 5 to 7, with --json and as a table. Keys are matched by pattern: each release rewords them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from engine.telemetry.reading import Reading
from engine.telemetry.text import clean
from engine.telemetry.tools.cell import (
    bus_id,
    junction_first,
    label,
    lines,
    number,
    pcie_generation,
    reading,
    torn,
    whole,
)
from engine.telemetry.tools.json_text import embedded
from engine.telemetry.tools.report import GpuReport, Report, gathered

SECOND_DIE = "its module's power is read on the first die"
FIRST_DIE = "its power is its module's, of two dies"
EDGE_ONLY = "its temperature is the edge's, which is cooler than the junction's"

_CARD = re.compile(r"(?:card|gpu|device)\s*\[?(\d{1,4})\]?", re.I | re.A)
_KEYS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern, re.I))
    for name, pattern in (
        ("junction", r"temperature \(sensor (?:junction|hot ?spot)\).*"),
        ("edge", r"temperature \(sensor edge\).*"),
        ("memory_temperature_c", r"temperature \(sensor (?:memory|mem|hbm[ _]?\d?)\).*"),
        ("power_limit_w", r"max\b.*\bpower\b.*"),
        ("power_w", r"(?:average|current)\b.*\bpower\b.*"),
        ("sm_clock_mhz", r"sclk clock (?:speed|level).*"),
        ("memory_clock_mhz", r"mclk clock (?:speed|level).*"),
        ("utilization_pct", r"gpu use\b.*"),
        ("memory_total_mib", r"vram total memory\b.*"),
        ("memory_used_mib", r"vram (?:total )?used memory\b.*"),
        ("energy_j", r"accumulated energy\b.*"),
        ("pcie_replays", r"pcie replay count.*"),
        ("pcie", r"pcie clock level.*"),
        ("name", r"(?:card series|device name|product name|card model).*"),
        ("bus", r"pci bus.*"),
        ("uuid", r"unique id.*"),
    )
)
_TEXTS = ("junction", "edge", "pcie", "name", "bus", "uuid")
_UNIT = re.compile(r".*\(([a-z%]{1,5})\)\s*:?\s*", re.I)
_IN_BRACKETS = re.compile(r".*(\([^()]*\))\s*\*?\s*")
_DIES = re.compile(r"\(mcm\)|\bmi250", re.I)
_LANES = re.compile(r".*?([\d.]{1,6})\s*GT/s\s*x(\d{1,2}).*", re.I | re.A)


def json_(text: str) -> Report:
    """`rocm-smi -a --json`, or with fewer flags. The second die of a module has no power of its own: it stays absent,
    and the first die's is told as it is, with a note."""
    value, around = embedded(text)
    cards = value if isinstance(value, dict) else {}
    found = {}
    for key, said in list(cards.items())[:4096]:
        card = _CARD.fullmatch(key.strip())
        if card and isinstance(said, dict):
            found[int(card[1])] = _card(int(card[1]), said)
    gpus = _modules([gpu for _, (gpu, _) in sorted(found.items())])
    troubles = [] if gpus else [clean(f"rocm-smi names no GPU; it says: {around[0].strip() if around else 'nothing'}")]
    return gathered(
        "rocm-smi",
        gpus,
        troubles=troubles,
        driver=_driver(cards),
        noise=len(around),
        implausible=sum(left_out for _, left_out in found.values()),
    )


def concise(text: str) -> Report:
    """The table that plain `rocm-smi` prints, by its titles: they differ between releases and GPUs."""
    titles: list[tuple[int, str]] = []
    gpus: list[GpuReport] = []
    noise, edge, left_out = 0, False, 0
    for line in lines(text):
        cells = _cells(line)
        if not titles and cells and re.fullmatch(r"(?:gpu|device)", cells[0][1], re.I):
            titles = [(at, title.lower()) for at, title in cells]
            edge = "edge" in line.lower()
        elif not titles or not cells or not line.strip(" ="):
            noise += bool(cells) and not line.strip().startswith("=")
        elif whole(cells[0][1]) is not None and cells[0][0] < 4 and len(cells) > 3:
            gpu, torn_ones = _line(titles, cells)
            gpus.append(gpu)
            left_out += torn_ones
        elif gpus:
            gpus[-1] = _named(gpus[-1], cells)
        else:
            edge = edge or "edge" in line.lower()
    if edge:
        gpus = [replace(gpu, note=gpu.note or EDGE_ONLY) for gpu in gpus]
    return gathered("rocm-smi", gpus, noise=noise, implausible=left_out)


def _card(index: int, said: dict[str, Any]) -> tuple[GpuReport, int]:
    found: dict[str, tuple[str, Any]] = {}
    names: list[str] = []
    for key, value in said.items():
        slot = next((name for name, pattern in _KEYS if pattern.fullmatch(key.strip()[:200])), None)
        if slot == "name":
            names += [name] if (name := label(value)) and not name.startswith("0x") else []
        elif slot is not None and (slot not in found or label(found[slot][1]) is None):
            found[slot] = key, value
    temperature, left_out = junction_first(_value("junction", found), _value("edge", found))
    readings = {slot: _value(slot, found) for slot in found if slot not in _TEXTS} | {"temperature_c": temperature}
    power = found.get("power_w", ("", ""))[1]
    lanes = _LANES.fullmatch(_text(found, "pcie"))
    gpu = GpuReport(
        index=index,
        name=names[0] if names else None,
        uuid=_unique(_text(found, "uuid")),
        bus_id=bus_id(_text(found, "bus")),
        readings={name: value for name, value in readings.items() if value is not None},
        pcie_gen=pcie_generation(number(lanes[1])) if lanes else None,
        pcie_width=number(lanes[2]) if lanes else None,
        note=SECOND_DIE if isinstance(power, str) and "secondary" in power.lower() else None,
    )
    return gpu, left_out


def _value(slot: str, found: dict[str, tuple[str, Any]]) -> Reading:
    if slot not in found:
        return None
    key, value = found[slot]
    unit = _UNIT.fullmatch(key.strip()[:200])
    if isinstance(value, str) and slot.endswith("_mhz"):
        level = _IN_BRACKETS.fullmatch(value.strip()[:200])
        value = level[1] if level else value
    metric = "temperature_c" if slot in ("junction", "edge") else slot
    return reading(metric, value, unit[1] if unit else "")


def _text(found: dict[str, tuple[str, Any]], slot: str) -> str:
    value = found.get(slot, ("", ""))[1]
    return value[:200] if isinstance(value, str) else ""


def _unique(text: str) -> str | None:
    """An id; zeros stand for none, and would make all GPUs one."""
    return label(text) if text.strip("0x ") else None


def _modules(gpus: list[GpuReport]) -> list[GpuReport]:
    """Of modules with two dies: the second one's power is not 0 but its neighbour's to tell."""
    out = list(gpus)
    for place in range(1, len(gpus)):
        before, gpu = gpus[place - 1], gpus[place]
        told = isinstance(before.readings.get("power_w"), float) and before.readings["power_w"] != 0.0
        dies = _DIES.search(gpu.name or "") is not None and gpu.readings.get("power_w") in (
            0.0,
            "absent",
            "unsupported",
        )
        if gpu.note == SECOND_DIE or (told and dies):
            out[place] = replace(gpu, note=SECOND_DIE, readings={**gpu.readings, "power_w": "absent"})
            out[place - 1] = replace(out[place - 1], note=out[place - 1].note or (FIRST_DIE if told else None))
    return out


def _driver(cards: dict[str, Any]) -> str | None:
    system = cards.get("system")
    said = system if isinstance(system, dict) else {}
    return next((label(value, 40) for key, value in said.items() if key.strip().lower() == "driver version"), None)


def _cells(line: str) -> list[tuple[int, str]]:
    """Cells and where they begin; within one, words are a single space apart."""
    return [(found.start(), found[0]) for found in re.finditer(r"\S+(?: \S+)*", line)]


def _line(titles: list[tuple[int, str]], cells: list[tuple[int, str]]) -> tuple[GpuReport, int]:
    if len(cells) == len(titles):
        said = {title: cell for (_, title), (_, cell) in zip(titles, cells, strict=True)}
    else:
        said = {}
        for place, cell in cells:
            title = next((t for start, t in reversed(titles) if start <= place), titles[0][1])
            said.setdefault(title, cell)

    def at(metric: str, *begins: str) -> Reading:
        cell = next((said[t] for begin in begins for t in said if t.startswith(begin)), None)
        return None if cell is None else reading(metric, cell)

    temperature, left_out = junction_first(at("temperature_c", "temp"), None)
    readings = {
        "temperature_c": temperature,
        "power_w": at("power_w", "power", "avgpwr", "pwr"),
        "power_limit_w": at("power_limit_w", "pwrcap"),
        "sm_clock_mhz": at("sm_clock_mhz", "sclk"),
        "memory_clock_mhz": at("memory_clock_mhz", "mclk"),
        "utilization_pct": at("utilization_pct", "gpu%"),
    }
    readings = {name: value for name, value in readings.items() if value is not None}
    second = not isinstance(readings.get("power_w"), float) and torn("power_limit_w", readings.get("power_limit_w"))
    if second:
        readings["power_limit_w"] = "absent"
    return GpuReport(whole(cells[0][1]), readings=readings, note=SECOND_DIE if second else None), left_out


def _named(gpu: GpuReport, cells: list[tuple[int, str]]) -> GpuReport:
    name = label(cells[0][1])
    plain = name is not None and len(cells) == 1 and cells[0][0] > 0 and not name.startswith(("=", "("))
    return replace(gpu, name=name) if plain and gpu.name is None else gpu
