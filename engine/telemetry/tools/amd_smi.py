"""amd-smi metric --json and static --json, in the dialects of its releases."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from engine.telemetry.reading import Reading
from engine.telemetry.text import clean
from engine.telemetry.tools.cell import bus_id, first, junction_first, label, number, pcie_generation, reading, whole
from engine.telemetry.tools.json_text import embedded, flat
from engine.telemetry.tools.report import GpuReport, Report, gathered

# In the order of preference. Releases rename keys and regroup them; the words in them stay.
_METRIC: dict[str, tuple[str, ...]] = {
    "memory_temperature_c": (r"temperature/(?:mem|memory|vram|hbm)(?:_temp\w*)?",),
    "power_w": (
        r"power/(?:current_)?socket_power",
        r"power/average_socket_power",
        r"power/(?:current|average)_\w*power",
    ),
    "power_limit_w": (r"power/(?:socket_)?power_(?:limit|cap)", r"limit/(?:ppt0/)?socket_power(?:_limit)?"),
    "sm_clock_mhz": (r"clock/gfx(?:_\d+)?/(?:clk|cur|current)\w*", r"clock/(?:current_)?gfx\w*clk?"),
    "memory_clock_mhz": (r"clock/(?:mem|uclk)(?:_\d+)?/(?:clk|cur|current)\w*",),
    "utilization_pct": (r"usage/gfx_(?:activity|usage)", r"engine_usage/gfx\w*"),
    "memory_used_mib": (r"(?:mem|fb|memory)_usage/used_vram", r"(?:vram|(?:mem|fb)_usage)/(?:vram_)?used"),
    "memory_total_mib": (
        r"(?:mem|fb|memory)_usage/total_vram",
        r"(?:vram|(?:mem|fb)_usage)/(?:vram_)?total",
        r"vram/(?:vram_)?size(?:_mb)?",
    ),
    "energy_j": (r"energy/total_energy(?:_consumption)?",),
    "ecc_corrected": (r"ecc/total_correct(?:able|ed)?(?:_count)?",),
    "ecc_uncorrected": (r"ecc/total_uncorrect(?:able|ed)?(?:_count)?",),
    "pcie_replays": (r"pcie/(?:pcie_)?replay_count\w*",),
}
_STATIC: dict[str, tuple[str, ...]] = {
    "memory_total_mib": _METRIC["memory_total_mib"],
    "power_limit_w": (r"limit/(?:ppt0/)?socket_power(?:_limit)?", r"limit/(?:current_)?power(?:_cap|_limit)?"),
    "power_limit_min_w": (r"limit/(?:ppt0/)?min_power(?:_limit)?",),
    "power_limit_max_w": (r"limit/(?:ppt0/)?max_power(?:_limit)?",),
    "slowdown_c": (r"limit/slowdown_(?:hotspot|junction)\w*", r"limit/slowdown_edge\w*"),
    "shutdown_c": (r"limit/shutdown_(?:hotspot|junction)\w*", r"limit/shutdown_edge\w*"),
}
_JUNCTION = r"temperature/(?:hotspot|junction)(?:_temp\w*)?"
_EDGE = r"temperature/edge(?:_temp\w*)?"


def metric(text: str) -> Report:
    """`amd-smi metric --json`. The junction's temperature, or the edge's where that is missing or torn."""
    return _report(text, _metric)


def static(text: str) -> Report:
    """`amd-smi static --json`: names, ids and limits."""
    return _report(text, lambda said: (_static(said), 0))


def _report(text: str, read: Callable[[dict[str, Any]], tuple[GpuReport, int]]) -> Report:
    value, around = embedded(text)
    found = [read(flat(entry)) for entry in _entries(value)]
    found.sort(key=lambda pair: (pair[0].index is None, pair[0].index or 0))
    troubles = [] if found else [_trouble(value, around)]
    gpus = [gpu for gpu, _ in found]
    drivers = [
        label(flat(entry).get("driver/version") or flat(entry).get("driver/driver_version"), 40)
        for entry in _entries(value)[:1]
    ]
    return gathered(
        "amd-smi",
        gpus,
        troubles=troubles,
        driver=next(iter(drivers), None),
        noise=len(around),
        implausible=sum(left_out for _, left_out in found),
    )


def _entries(value: Any) -> list[dict[str, Any]]:
    """The GPUs' objects: a list, one wrapped in `gpu_data`, or a single one."""
    if isinstance(value, dict):
        inner = value.get("gpu_data")
        value = [value] if inner is None else inner if isinstance(inner, list) else [inner]
    entries = value if isinstance(value, list) else []
    return [entry for entry in entries[:4096] if isinstance(entry, dict) and _index(flat(entry)) is not None]


def _trouble(value: Any, around: list[str]) -> str:
    said = value.get("error") or value.get("message") if isinstance(value, dict) else None
    words = said if isinstance(said, str) else around[0].strip() if around else "nothing"
    return clean(f"amd-smi names no GPU; it says: {words}")


def _index(said: dict[str, Any]) -> int | None:
    value = _plain(said.get("gpu", said.get("gpu_id")))
    if isinstance(value, bool):
        return None
    return whole(value) if isinstance(value, str) else value if isinstance(value, int) and 0 <= value < 10**9 else None


def _metric(said: dict[str, Any]) -> tuple[GpuReport, int]:
    readings = _readings(said, _METRIC)
    junction, edge = _at("temperature_c", said, _JUNCTION), _at("temperature_c", said, _EDGE)
    temperature, left_out = junction_first(junction, edge)
    if temperature is not None:
        readings["temperature_c"] = temperature
    throttled = str(_plain(said.get("power/throttle_status"))).upper() == "THROTTLED"
    speed = number(_plain(said.get("pcie/speed", said.get("pcie/current_speed"))))
    gpu = GpuReport(
        index=_index(said),
        uuid=label(said.get("uuid")),
        bus_id=_bus(said),
        readings=readings,
        pcie_gen=pcie_generation(speed),
        pcie_width=number(_plain(said.get("pcie/width", said.get("pcie/current_lanes")))),
        note="it is throttled; amd-smi does not say why" if throttled else None,
    )
    return gpu, left_out


def _static(said: dict[str, Any]) -> GpuReport:
    speed = number(_plain(said.get("bus/max_pcie_speed")))
    names = ("asic/market_name", "board/product_name", "asic/asic_name")
    return GpuReport(
        index=_index(said),
        name=next((name for key in names if (name := label(said.get(key)))), None),
        uuid=label(said.get("uuid") or said.get("asic/uuid")),
        bus_id=_bus(said),
        readings=_readings(said, _STATIC),
        pcie_gen_max=pcie_generation(speed),
        pcie_width_max=number(_plain(said.get("bus/max_pcie_width", said.get("bus/max_pcie_lanes")))),
    )


def _bus(said: dict[str, Any]) -> str | None:
    value = said.get("bus/bdf", said.get("bdf"))
    return bus_id(value) if isinstance(value, str) else None


def _readings(said: dict[str, Any], keys: dict[str, tuple[str, ...]]) -> dict[str, Reading]:
    found = {name: first(_at(name, said, pattern) for pattern in patterns) for name, patterns in keys.items()}
    return {name: value for name, value in found.items() if value is not None}


def _at(name: str, said: dict[str, Any], pattern: str) -> Reading:
    """The first number at the keys that match, else why there is none; None where no key does."""
    return first(_value(name, said[key]) for key in said if re.fullmatch(pattern, key))


def _value(name: str, leaf: Any) -> Reading:
    unit = leaf.get("unit") if isinstance(leaf, dict) else None
    return reading(name, _plain(leaf), unit if isinstance(unit, str) else "")


def _plain(leaf: Any) -> Any:
    return leaf.get("value") if isinstance(leaf, dict) else leaf
