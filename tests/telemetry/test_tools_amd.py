"""AMD's tools to readings: their keys change with each release, their second dies have no power of their own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.telemetry.tools import amd_smi, rocm_smi


def entry(gpu: int, **more: Any) -> dict[str, Any]:
    return {"gpu": gpu, **more}


DIALECTS = [
    entry(
        0,
        usage={"gfx_activity": {"value": 37, "unit": "%"}},
        power={"socket_power": {"value": 411, "unit": "W"}},
        clock={"gfx_0": {"clk": {"value": 1700, "unit": "MHz"}}, "mem_0": {"clk": {"value": 1300, "unit": "MHz"}}},
        temperature={"edge": "N/A", "hotspot": {"value": 66, "unit": "C"}, "mem": {"value": 51, "unit": "C"}},
        mem_usage={"total_vram": {"value": 64, "unit": "GB"}, "used_vram": {"value": 2048, "unit": "MB"}},
        energy={"total_energy_consumption": {"value": 5.5, "unit": "J"}},
        ecc={"total_correctable_count": 2, "total_uncorrectable_count": 0},
        pcie={"width": 16, "speed": {"value": 32, "unit": "GT/s"}, "replay_count": 4},
    ),
    entry(
        0,
        usage={"gfx_usage": 37},
        power={"current_socket_power": "N/A", "average_socket_power": "411 W"},
        clock={"gfx": {"cur": "1700 MHz"}, "mem": {"cur": 1300}},
        temperature={"junction": "66", "vram": 51, "edge": None},
        vram={"vram_total": 65536, "vram_used": "2048 MB"},
        energy={"total_energy": "5.5 J"},
        ecc={"total_correct": 2, "total_uncorrect": 0},
        pcie={"current_lanes": 16, "current_speed": {"value": 32000, "unit": "MT/s"}, "replay_count": "4"},
    ),
]


@pytest.mark.parametrize("said", DIALECTS)
@pytest.mark.parametrize("wrap", [lambda e: [e], lambda e: {"gpu_data": [e]}, lambda e: e])
@pytest.mark.parametrize("before", ["", "WARNING: user not in [render] group\n[WARN] more\n"])
@pytest.mark.parametrize("indent", [None, 4])
def test_dialects_say_the_same(said: dict[str, Any], wrap: Any, before: str, indent: int | None) -> None:
    report = amd_smi.metric(before + json.dumps(wrap(said), indent=indent) + "\n")
    gpu = report.gpus[0]
    assert gpu.readings == {
        "utilization_pct": 37.0,
        "power_w": 411.0,
        "sm_clock_mhz": 1700.0,
        "memory_clock_mhz": 1300.0,
        "temperature_c": 66.0,
        "memory_temperature_c": 51.0,
        "memory_total_mib": 65536.0,
        "memory_used_mib": 2048.0,
        "energy_j": 5.5,
        "ecc_corrected": 2.0,
        "ecc_uncorrected": 0.0,
        "pcie_replays": 4.0,
    }
    assert (gpu.pcie_gen, gpu.pcie_width, report.noise) == (5.0, 16.0, before.count("\n"))


@pytest.mark.parametrize(
    ("heat", "right", "torn"),
    [
        ({"hotspot": {"value": None}, "edge": 31}, 31.0, 0),
        ({"hotspot": 2050, "edge": {"value": 42}}, 42.0, 1),
        ({"hotspot": 2050, "edge": "N/A"}, "implausible", 1),
        ({"hotspot": 2050, "edge": -300}, "implausible", 2),
        ({"hotspot": "N/A"}, "absent", 0),
        ({"edge": "N/A", "hotspot": 70}, 70.0, 0),
    ],
)
def test_junction_first_then_edge_and_torn_reads_are_left_out(heat: dict[str, Any], right: object, torn: int) -> None:
    report = amd_smi.metric(json.dumps([entry(0, temperature=heat)]))
    assert report.gpus[0].readings["temperature_c"] == right
    assert report.implausible == torn


def test_order_is_by_id_and_a_missing_section_is_left_out() -> None:
    report = amd_smi.metric(json.dumps([entry(7, power={"socket_power": 9}), entry(1), {"no": "gpu"}]))
    assert [(gpu.index, gpu.readings) for gpu in report.gpus] == [(1, {}), (7, {"power_w": 9.0})]


def test_a_throttled_gpu_says_so_without_a_mask() -> None:
    gpu = amd_smi.metric(json.dumps([entry(0, power={"throttle_status": "THROTTLED"})])).gpus[0]
    assert "throttled" in (gpu.note or "")
    assert "throttle" not in gpu.readings


@pytest.mark.parametrize("text", ["", "ERROR: no amdgpu\n", '{"error": "no amdgpu", "code": -4}', "[1, 2]", '[{"gpu":'])
def test_no_gpu_is_trouble_in_words(text: str) -> None:
    for report in (amd_smi.metric(text), amd_smi.static(text)):
        assert report.gpus == ()
        assert report.trouble
    assert "amdgpu" not in text or "amdgpu" in (report.trouble or "")


@pytest.mark.parametrize(
    "limit",
    [
        {"max_power": {"value": 1000, "unit": "W"}, "min_power": {"value": 0}, "socket_power": {"value": 900}},
        {"ppt0": {"max_power_limit": 1000, "min_power_limit": 0, "socket_power_limit": 900}, "ppt1": "N/A"},
    ],
)
def test_static(limit: dict[str, Any]) -> None:
    heat = {"slowdown_hotspot_temperature": {"value": 100}, "shutdown_hotspot_temperature": {"value": 110}}
    said = entry(
        2,
        asic={"market_name": "AMD Instinct MI325X"},
        bus={"bdf": "0000:c1:00.0", "max_pcie_width": 16, "max_pcie_speed": {"value": 32, "unit": "GT/s"}},
        vram={"size": {"value": 262144, "unit": "MB"}},
        driver={"name": "amdgpu", "version": "6.10.5"},
        limit={**limit, **heat},
    )
    report = amd_smi.static(json.dumps([said]))
    gpu = report.gpus[0]
    assert (gpu.name, gpu.bus_id, gpu.pcie_gen_max, report.driver) == (
        "AMD Instinct MI325X",
        "0000:C1:00.0",
        5.0,
        "6.10.5",
    )
    assert gpu.readings == {
        "memory_total_mib": 262144.0,
        "power_limit_w": 900.0,
        "power_limit_min_w": 0.0,
        "power_limit_max_w": 1000.0,
        "slowdown_c": 100.0,
        "shutdown_c": 110.0,
    }


def card(**more: str) -> dict[str, str]:
    return {
        "Temperature (Sensor edge) (C)": "40.0",
        "Temperature (Sensor junction) (C)": "48.0",
        "Temperature (Sensor memory) (C)": "45.0",
        "sclk clock speed:": "(1250Mhz)",
        "GPU use (%)": "12",
        "VRAM Total Memory (B)": str(64 * 2**30),
        "VRAM Total Used Memory (B)": str(3 * 2**20),
        "VIS_VRAM Total Memory (B)": "1",
        "PCI Bus": "0000:c1:00.0",
        "7": "1189Mhz",
        **more,
    }


@pytest.mark.parametrize(
    "power",
    [
        {"Average Graphics Package Power (W)": "210.0", "Max Graphics Package Power (W)": "300.0"},
        {"Current Socket Graphics Package Power (W)": "210.0", "Max Graphics Package Power (w)": "300"},
        {"average socket power (w)": "210", "MAX GRAPHICS PACKAGE POWER (W)": "300.0"},
    ],
)
@pytest.mark.parametrize("case", [str, str.lower])
def test_rocm_keys_by_pattern(power: dict[str, str], case: Any) -> None:
    said = {case(key): value for key, value in card(**power).items()}
    named = {"GPU ID": "0x1", "Card series": "AMD Instinct MI210", "Card model": "0x0c34", "Unique ID": "N/A"}
    text = "WARNING: low-power state\n\n" + json.dumps(
        {"card3": {**said, **named}, "system": {"Driver version": "6.7.0", "PID1": "x"}}
    )
    report = rocm_smi.json_(text)
    gpu = report.gpus[0]
    assert (gpu.index, gpu.name, gpu.uuid, gpu.bus_id) == (3, "AMD Instinct MI210", None, "0000:C1:00.0")
    assert (report.driver, report.noise) == ("6.7.0", 1)
    assert gpu.readings == {
        "temperature_c": 48.0,
        "memory_temperature_c": 45.0,
        "sm_clock_mhz": 1250.0,
        "utilization_pct": 12.0,
        "memory_total_mib": 65536.0,
        "memory_used_mib": 3.0,
        "power_w": 210.0,
        "power_limit_w": 300.0,
    }


@pytest.mark.parametrize("second", ["N/A (Secondary die)", "0.0", "N/A"])
def test_a_modules_power_is_told_once(second: str) -> None:
    key, series = "Average Graphics Package Power (W)", {"Card series": "AMD INSTINCT MI200 (MCM) OAM"}
    cards = {
        "card1": card(**{key: second}, **series),
        "card0": card(**{key: "311.0"}, **series),
        "card2": card(**{key: "299.0"}, **series),
    }
    gpus = rocm_smi.json_(json.dumps(cards)).gpus
    assert [gpu.readings["power_w"] for gpu in gpus] == [311.0, "absent", 299.0]
    assert [gpu.note for gpu in gpus] == [rocm_smi.FIRST_DIE, rocm_smi.SECOND_DIE, None]


@pytest.mark.parametrize("text", ["", "ERROR: amdgpu not loaded", "{}", '{"card0": 5}', "[{}]"])
def test_rocm_without_cards(text: str) -> None:
    for report in (rocm_smi.json_(text), rocm_smi.concise(text)):
        assert report.gpus == ()
        assert report.trouble


RULE = "=" * 90
OLD_TABLE = f"""\
{RULE}
GPU  Temp (DieEdge)  AvgPwr  SCLK     MCLK     Fan  Perf  PwrCap  VRAM%  GPU%
0    43.0c           94.0W   800Mhz   1600Mhz  0%   auto  560.0W    3%   55%
1    41.0c           N/A     810Mhz   1600Mhz  0%   auto  0.0W      3%   0%
{RULE}
"""
NEW_TABLE = f"""\
{RULE}
Device  Node  IDs              Temp        Power     Partitions          SCLK    MCLK    Fan  Perf  PwrCap  VRAM%  GPU%
              (DID,     GUID)  (Junction)  (Socket)  (Mem, Compute, ID)
{RULE}
0       2     0x74a1,   28851  51.0°C      140.0W    NPS1, SPX, 0        133Mhz  900Mhz  0%   auto  750.0W  0%     7%
1       3     0x74a1,   51499  N/A         141.0W    NPS1, SPX, 0        134Mhz  900Mhz  0%   auto  750.0W  0%     8%
{RULE}
"""
NAMED_TABLE = f"""\
Device  [Model : Revision]    Temp        Power     Partitions      SCLK    MCLK    Fan  Perf  PwrCap  VRAM%  GPU%
        Name (20 chars)       (Junction)  (Socket)  (Mem, Compute)
{RULE}
0       [0x74a5 : 0x00]       52.0°C      150.0W    NPS1, SPX       140Mhz  950Mhz  0%   auto  900.0W    0%   9%
        AMD Instinct MI325X
"""


def test_the_old_table_has_edges_and_second_dies() -> None:
    first, second = rocm_smi.concise(OLD_TABLE).gpus
    assert first.readings == {
        "temperature_c": 43.0,
        "power_w": 94.0,
        "power_limit_w": 560.0,
        "sm_clock_mhz": 800.0,
        "memory_clock_mhz": 1600.0,
        "utilization_pct": 55.0,
    }
    assert (second.readings["power_w"], second.readings["power_limit_w"]) == ("absent", "absent")
    assert (first.note, second.note) == (rocm_smi.EDGE_ONLY, rocm_smi.SECOND_DIE)


def test_the_newer_tables() -> None:
    first, second = rocm_smi.concise(NEW_TABLE).gpus
    assert (first.readings["temperature_c"], first.readings["power_w"], first.readings["sm_clock_mhz"]) == (
        51,
        140,
        133,
    )
    assert (first.readings["power_limit_w"], first.readings["utilization_pct"], first.note) == (750.0, 7.0, None)
    assert (second.readings["temperature_c"], second.readings["power_w"]) == ("absent", 141.0)
    named = rocm_smi.concise(NAMED_TABLE).gpus[0]
    assert (named.name, named.readings["temperature_c"], named.readings["utilization_pct"]) == (
        "AMD Instinct MI325X",
        52.0,
        9.0,
    )
