"""nvidia-smi -q, as text and as XML: the one has the other's words, so both become "section/key" and are read alike."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from xml.etree import ElementTree

from engine.telemetry.reading import MigFacts, Reading
from engine.telemetry.tools.cell import bus_id, first, flag, label, lines, number, reading, switch, total, whole
from engine.telemetry.tools.nvidia_said import lost, named, trouble
from engine.telemetry.tools.report import GpuReport, Report, gathered

LARGEST_XML = 32 * 2**20
"""Sixteen GPUs with all their clocks take 2 MiB."""
MOST_GPUS = 1024
"""Of one node; none has more, and what repeats for ever stops there."""

# First the text's words, then the XML's, oldest last. Averages first: that is what power.draw means on newer GPUs.
_PATHS: dict[str, tuple[str, ...]] = {
    "temperature_c": ("temperature/gpu current temp", "temperature/gpu temp"),
    "memory_temperature_c": ("temperature/memory current temp", "temperature/memory temp"),
    "power_w": tuple(
        f"{section}/{key}"
        for section in ("gpu power readings", "power readings")
        for key in ("average power draw", "power draw", "instantaneous power draw", "instant power draw")
    ),
    "power_limit_w": tuple(
        f"{section}/{key}"
        for section in ("gpu power readings", "power readings")
        for key in ("current power limit", "power limit", "enforced power limit", "requested power limit")
    ),
    "power_limit_min_w": ("gpu power readings/min power limit", "power readings/min power limit"),
    "power_limit_max_w": ("gpu power readings/max power limit", "power readings/max power limit"),
    "power_limit_default_w": ("gpu power readings/default power limit", "power readings/default power limit"),
    "sm_clock_mhz": ("clocks/sm", "clocks/sm clock"),
    "memory_clock_mhz": ("clocks/memory", "clocks/mem clock"),
    "sm_clock_max_mhz": ("max clocks/sm", "max clocks/sm clock"),
    "utilization_pct": ("utilization/gpu", "utilization/gpu util"),
    "memory_used_mib": ("fb memory usage/used",),
    "memory_total_mib": ("fb memory usage/total",),
    "pcie_replays": ("pci/replays since reset", "pci/replay counter"),
}
_ECC = "ecc errors/volatile/"
_SUMS: dict[str, tuple[str, ...]] = {
    "ecc_corrected": tuple(_ECC + key for key in ("sram correctable", "dram correctable", "single bit/total")),
    "ecc_uncorrected": tuple(
        _ECC + key
        for key in (
            *("sram uncorrectable", "sram uncorrectable parity", "sram uncorrectable sec-ded"),
            *("sram uncorrectable secded", "dram uncorrectable", "double bit/total"),
        )
    ),
    "rows_remapped": (
        *("remapped rows/correctable error", "remapped rows/uncorrectable error"),
        *("remapped rows/remapped row corr", "remapped rows/remapped row unc"),
    ),
}
_FLAGS: dict[str, tuple[str, ...]] = {
    "remap_pending": ("remapped rows/pending", "remapped rows/remapped row pending"),
    "remap_failed": ("remapped rows/remapping failure occurred", "remapped rows/remapped row failure"),
}
# The text's section of the PCIe link, and the XML's.
_LINKS = ("pci/gpu link info/", "pci/pci gpu link info/")
# Each limit as a temperature and as a margin to it.
_LIMITS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "shutdown_c": (
        ("gpu shutdown temp", "gpu temp max threshold"),
        ("gpu shutdown t.limit temp", "gpu temp max tlimit threshold"),
    ),
    "slowdown_c": (
        ("gpu slowdown temp", "gpu temp slow threshold"),
        ("gpu slowdown t.limit temp", "gpu temp slow tlimit threshold"),
    ),
    "max_operating_c": (
        ("gpu max operating temp", "gpu temp max gpu threshold"),
        ("gpu max operating t.limit temp", "gpu temp max gpu tlimit threshold"),
    ),
}
_T_LIMIT = ("gpu t.limit temp", "gpu temp tlimit")
# NVML's bits, nvmlClocksEventReasons in nvml.h.
_REASONS = {
    "idle": 1,
    "gpu idle": 1,
    "applications clocks setting": 2,
    "sw power cap": 4,
    "hw slowdown": 8,
    "sync boost": 16,
    "sw thermal slowdown": 32,
    "hw thermal slowdown": 64,
    "hw power brake slowdown": 128,
    "display clock setting": 256,
    "display clocks setting": 256,
}
_REASON = re.compile(r"clocks (?:event|throttle) reasons/(?:clocks (?:event|throttle) reason )?(.+)")
_APART = ("mig devices", "processes", "accounted processes", "supported clocks")


@dataclass
class _Said:
    """What is said of one GPU, and of each of its MIG instances."""

    gpu: dict[str, str] = field(default_factory=dict)
    parts: list[dict[str, str]] = field(default_factory=list)

    def at(self, paths: tuple[str, ...]) -> list[str]:
        """The texts at these places; where a whole section is one word such as N/A, that word."""
        exact = [self.gpu[path] for path in paths if path in self.gpu]
        return exact or [self.gpu[p] for p in dict.fromkeys(path.partition("/")[0] for path in paths) if p in self.gpu]

    def text(self, *paths: str) -> str | None:
        return next((self.gpu[path] for path in paths if path in self.gpu), None)


def details(text: str) -> Report:
    """`nvidia-smi -q`.

    Thresholds come in two layouts: temperatures, or on newer GPUs margins that count down to 0 where the clock gives
    way. A limit of the second layout is today's temperature, plus the way left (T.Limit), minus the limit's own
    T.Limit. `margin_c` is the way to the slowdown in both: T.Limit minus the slowdown's T.Limit, which is what the
    driver reads and no difference of temperatures, or else the slowdown's temperature minus today's.
    """
    head, sections = _Said(), list[_Said]()
    gone: list[str] = []
    troubles: list[str | None] = []
    stack: list[tuple[int, str]] = []
    for line in lines(text):
        begun = re.match(r"GPU ([0-9a-fA-F]{4,8}:[0-9a-fA-F:.]+)\s*$", line)
        if begun and len(sections) < MOST_GPUS:
            sections.append(_Said({"pci/bus id": begun[1]}))
            stack.clear()
        elif " : " not in line and (name := lost(line)):
            gone.append(name)
        elif line.strip():
            troubles.append(trouble(line))
            _take(sections[-1] if sections else head, stack, line)
    if not sections and any(path in head.gpu for path in (*_PATHS["temperature_c"], *_PATHS["power_w"])):
        sections = [head]
    return _report(head, sections, named(gone), troubles)


def xml(text: str) -> Report:
    """`nvidia-smi -q -x`, of all its versions. One that ends early gives the GPUs that it told of whole."""
    start = text.find("<nvidia_smi_log")
    around = text[: max(start, 0)] + text.rpartition("</nvidia_smi_log>")[2] if start >= 0 else text
    gone = [name for line in lines(text) if "<" not in line and (name := lost(line))]
    troubles = [trouble(line) for line in lines(around)]
    head, sections = _Said(), list[_Said]()
    if start >= 0 and _unsafe(text):
        troubles.append("nvidia-smi's XML is larger than any, or declares entities: it is not read")
    elif start >= 0:
        _pull(text[start:], head, sections)
    return _report(head, sections, named(gone), troubles)


def _unsafe(text: str) -> bool:
    # The document type is left out of what is parsed; an internal one, or an entity, is never nvidia-smi's.
    return len(text) > LARGEST_XML or re.search(r"<!(?:ENTITY|DOCTYPE[^>]*\[)", text, re.I) is not None


def _pull(text: str, head: _Said, sections: list[_Said]) -> None:
    parser: ElementTree.XMLPullParser[ElementTree.Element] = ElementTree.XMLPullParser(("end",))
    # Piecewise, so that what came before a fault is kept.
    for place in range(0, len(text), 65536):
        try:
            parser.feed(text[place : place + 65536])
        except (ElementTree.ParseError, ValueError):
            return
        try:
            for event in parser.read_events():
                _element(event, head, sections)
        except ElementTree.ParseError:
            return


def _element(event: tuple[object, ...], head: _Said, sections: list[_Said]) -> None:
    element = event[-1]
    if not isinstance(element, ElementTree.Element):
        return
    if element.tag == "gpu" and len(element) and len(sections) < MOST_GPUS:
        said = _Said(_flat(element), [_flat(part) for part in element.iterfind("mig_devices/mig_device")])
        said.gpu.setdefault("pci/bus id", element.get("id", ""))
        sections.append(said)
        element.clear()
    elif element.tag in ("driver_version", "attached_gpus"):
        head.gpu.setdefault(_plain(element.tag), (element.text or "").strip())


def _flat(top: ElementTree.Element) -> dict[str, str]:
    found: dict[str, str] = {}
    stack = [(child, _plain(child.tag)) for child in reversed(top)]
    while stack:
        element, path = stack.pop()
        if path in _APART or path.count("/") > 6:
            continue
        said = (element.text or "").strip()
        if said or not len(element):
            found.setdefault(path, said)
        stack += [(child, f"{path}/{_plain(child.tag)}") for child in reversed(element)]
    return found


def _plain(name: str) -> str:
    return name.strip().lower().replace("_", " ")


def _take(said: _Said, stack: list[tuple[int, str]], line: str) -> None:
    """One line of text: `key : value`, or the title of a section that deeper lines belong to."""
    line = line.expandtabs(8)
    indent = len(line) - len(line.lstrip())
    key, colon, value = line.partition(":")
    while stack and stack[-1][0] >= indent:
        stack.pop()
    path = [name for _, name in stack] + [_plain(key)]
    if not colon:
        stack.append((indent, _plain(key)))
        if path == ["mig device"]:
            said.parts.append({})
    elif path[0] == "mig device" and said.parts:
        said.parts[-1].setdefault("/".join(path[1:]), value.strip())
    elif path[0] not in _APART:
        said.gpu.setdefault("/".join(path[:6]), value.strip())


def _report(head: _Said, sections: list[_Said], gone: list[str], troubles: list[str | None]) -> Report:
    attached = whole(head.text("attached gpus") or "")
    complete = attached == len(sections) and not gone
    gpus = [_gpu(said, place if complete else None) for place, said in enumerate(sections)]
    driver = label(head.text("driver version"), 40)
    return gathered("nvidia-smi", gpus, lost=gone, troubles=troubles, driver=driver)


def _gpu(said: _Said, index: int | None) -> GpuReport:
    readings = {metric: _at(metric, said, paths) for metric, paths in _PATHS.items()}
    readings |= {metric: total(reading(metric, t) for t in said.at(paths)) for metric, paths in _SUMS.items()}
    readings |= {metric: first(flag(t) for t in said.at(paths)) for metric, paths in _FLAGS.items()}
    readings["throttle"] = _throttle(said)
    limits, margin = _limits(said, readings["temperature_c"])
    readings |= {"slowdown_c": limits["slowdown_c"], "shutdown_c": limits["shutdown_c"], "margin_c": margin}
    advice = (said.text("gpu recovery action") or "").lower()
    return GpuReport(
        index=index,
        name=label(said.text("product name")),
        uuid=label(said.text("gpu uuid", "uuid")),
        bus_id=bus_id(said.text("pci/bus id", "pci/pci bus id") or ""),
        readings={metric: value for metric, value in readings.items() if value is not None},
        persistence=switch(said.text("persistence mode")),
        max_operating_c=limits["max_operating_c"],
        mig_mode=switch(said.text("mig mode/current", "mig mode/current mig")),
        mig=tuple(_part(part) for part in said.parts),
        needs_reset="reset" in advice
        or switch(said.text("gpu reset status/reset required")) is True
        or any("requires reset" in value.lower() for value in said.gpu.values()),
        pcie_gen=_pcie(said, "pcie generation/current", "pcie gen/current link gen"),
        pcie_gen_max=_pcie(said, "pcie generation/max", "pcie gen/max link gen"),
        pcie_width=_pcie(said, "link width/current", "link widths/current link width"),
        pcie_width_max=_pcie(said, "link width/max", "link widths/max link width"),
    )


def _at(metric: str, said: _Said, paths: tuple[str, ...]) -> Reading:
    return first(reading(metric, text) for text in said.at(paths))


def _limits(said: _Said, now: Reading) -> tuple[dict[str, Reading], Reading]:
    def at(keys: tuple[str, ...]) -> Reading:
        return first(reading("margin_c", text) for text in said.at(tuple("temperature/" + key for key in keys)))

    left, limits = at(_T_LIMIT), dict[str, Reading]()
    for name, (absolute, margin) in _LIMITS.items():
        known, own = at(absolute), at(margin)
        limits[name] = first([known, _sum(now, left, own)])
    return limits, _margin(left, at(_LIMITS["slowdown_c"][1]), limits["slowdown_c"], now)


def _margin(left: Reading, slowdown_margin: Reading, slowdown: Reading, now: Reading) -> Reading:
    if isinstance(left, float):
        return left - slowdown_margin if isinstance(slowdown_margin, float) else left
    if isinstance(slowdown, float):
        return slowdown - now if isinstance(now, float) else now
    return first([left, slowdown])


def _sum(now: Reading, left: Reading, own: Reading) -> Reading:
    """The temperature of a limit that is told as a margin."""
    if isinstance(now, float) and isinstance(left, float) and isinstance(own, float):
        return now + left - own
    return None if own is None else first(value for value in (now, left, own) if not isinstance(value, float))


def _throttle(said: _Said) -> Reading:
    """NVML's mask of the reasons that are active; a reason that this GPU does not have is not."""
    mask, states = 0, list[Reading]()
    for path, text in said.gpu.items():
        found = _REASON.fullmatch(path)
        bit = _REASONS.get(found[1]) if found else None
        if bit is not None:
            states.append(flag(text))
            mask |= bit if states[-1] == 1.0 else 0
    if not states:
        return first(reading("throttle", t) for t in said.at(("clocks event reasons/", "clocks throttle reasons/")))
    whole_sum = total(states)
    return float(mask) if isinstance(whole_sum, float) else whole_sum


def _pcie(said: _Said, *keys: str) -> float | None:
    text = said.text(*(section + key for section in _LINKS for key in keys))
    return None if text is None else number(text.lower().rstrip("x"))


def _part(part: dict[str, str]) -> MigFacts:
    def mib(key: str) -> float | None:
        value = reading("memory_total_mib", part.get(f"fb memory usage/{key}"))
        return value if isinstance(value, float) else None

    return MigFacts(
        gpu_instance=whole(part.get("gpu instance id", "")),
        compute_instance=whole(part.get("compute instance id", "")),
        memory_total_mib=mib("total"),
        memory_used_mib=mib("used"),
    )
