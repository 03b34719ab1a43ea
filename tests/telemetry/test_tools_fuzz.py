"""Any text at all: no parser raises, and what it calls a reading is a number or a state."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.telemetry.reading import ReadingState
from engine.telemetry.tools import amd_smi, cell, infiniband, nvlink, rocm_smi, slurm
from engine.telemetry.tools import nvidia_smi as smi
from engine.telemetry.tools.report import Report
from engine.telemetry.tools.topology import topology
from tests.telemetry import test_tools as nvidia
from tests.telemetry import test_tools_amd as amd
from tests.telemetry import test_tools_links as links
from tests.telemetry import test_tools_slurm as jobs

STATES = {state.value for state in ReadingState} - {"value"}
FIELDS = ("index", "name", "temperature.gpu", "power.draw")

REPORTS: dict[str, tuple[Callable[[str], Report], str]] = {
    "query": (smi.query, nvidia.CSV),
    "query without a header": (lambda text: smi.query(text, FIELDS), "0, A, 41, 88.1 W\n1, B, C, 42, [N/A]\n"),
    "details": (smi.details, nvidia.DETAILS),
    "xml": (smi.xml, nvidia.xml_of("<power_readings><power_draw>7 W</power_draw></power_readings>")),
    "mig": (smi.mig, "GPU 0: N (UUID: GPU-1)\n  MIG 1g.12gb  Device  0: (UUID: MIG-1)\n"),
    "amd metric": (amd_smi.metric, "WARNING: x\n" + json.dumps(amd.DIALECTS, indent=1)),
    "amd static": (amd_smi.static, json.dumps([amd.entry(0, limit={"max_power": 5})], indent=1)),
    "rocm json": (rocm_smi.json_, json.dumps({"card0": amd.card(), "card1": amd.card()}, indent=1)),
    "rocm table": (rocm_smi.concise, amd.OLD_TABLE + amd.NEW_TABLE),
}
OTHERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "header": (smi.header, nvidia.HEAD),
    "row": (lambda text: smi.row(smi.given(FIELDS), text), "0, A, B, 41, 88.1 W"),
    "lost": (smi.lost, "Unable to determine the device handle for GPU 0000:01:00.0: GPU is lost"),
    "trouble": (smi.trouble, "Failed to initialize NVML: Unknown Error"),
    "refused": (smi.refused, 'Field "x" is not a valid field to query.'),
    "apps": (smi.apps, "gpu_uuid, pid, process_name, used_gpu_memory [MiB]\nGPU-1, 4, a, 3 MiB\n"),
    "nvlink": (nvlink.status, links.gpu(0) + "\t Link 0: 25 GB/s\n"),
    "nvlink errors": (nvlink.errors, links.gpu(0) + "\t Link 0: CRC Errors: 2\n"),
    "topology": (topology, links.MATRIX),
    "ports": (infiniband.ports, links.sysfs("mlx5_0", 1, **links.UP, port_rcv_data="3")),
    "ibstat": (infiniband.ibstat, "CA 'mlx5_0'\n\tPort 1:\n\t\tState: Active\n\t\tRate: 100\n"),
    "squeue": (slurm.jobs_text, "\n".join("|".join(row) for row in (jobs.COLUMNS, *jobs.ROWS))),
    "squeue json": (slurm.jobs_json, json.dumps({"jobs": [jobs.NEW, jobs.OLD], "last_update": 2000}, indent=1)),
    "scontrol": (slurm.job_details, jobs.DETAIL),
    "hosts": (slurm.hosts, "r[1-2]n[01-09,3],login"),
    "duration": (slurm.duration, "2-05:32:24"),
}
ALL = {**REPORTS, **OTHERS}


@st.composite
def broken(draw: st.DrawFn, text: str) -> str:
    """A text with lines dropped, doubled or out of order, characters replaced, or its end cut off."""
    rows = text.split("\n")
    for _ in range(draw(st.integers(1, 4))):
        way, at = (
            draw(st.sampled_from(["drop", "double", "swap", "cut", "replace", "join"])),
            draw(st.integers(0, 10**6)),
        )
        at %= len(rows) or 1
        if way == "drop" and len(rows) > 1:
            del rows[at]
        elif way == "double":
            rows.insert(at, rows[at])
        elif way == "swap":
            other = draw(st.integers(0, 10**6)) % len(rows)
            rows[at], rows[other] = rows[other], rows[at]
        elif way == "cut":
            rows = "\n".join(rows)[: draw(st.integers(0, 10**6)) % (len(text) + 1)].split("\n")
        elif way == "replace":
            place = draw(st.integers(0, 10**6)) % (len(rows[at]) + 1)
            rows[at] = rows[at][:place] + draw(st.text(max_size=6)) + rows[at][place + draw(st.integers(0, 6)) :]
        else:
            rows[at] += rows[at - 1]
    return "\n".join(rows)


def texts(name: str) -> st.SearchStrategy[str]:
    return st.text(max_size=400) | broken(ALL[name][1])


def sound(report: Report) -> None:
    for gpu in report.gpus:
        for value in (*gpu.readings.values(), gpu.max_operating_c):
            assert value is None or value in STATES or (isinstance(value, float) and math.isfinite(value))
        for name in (gpu.name, gpu.uuid, gpu.bus_id, gpu.note):
            assert name is None or name.isprintable()
    assert report.trouble is None or (report.trouble.isprintable() and not report.gpus)
    assert report.gpus or report.lost or report.trouble


@pytest.mark.parametrize("name", REPORTS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_text_gives_a_report(name: str, data: st.DataObject) -> None:
    sound(REPORTS[name][0](data.draw(texts(name))))


@pytest.mark.parametrize("name", OTHERS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_text_gives_a_value(name: str, data: st.DataObject) -> None:
    OTHERS[name][0](data.draw(texts(name)))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.just("N/A"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["value", "unit", "number", "set", "nodes", "list", "hotspot"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["usage", "temperature", "power", "limit", "bus", "asic", "gpu", "pcie"]), json_values)
def test_any_json_of_amd_gives_a_report(section: str, value: Any) -> None:
    text = json.dumps([{"gpu": 0, section: value}])
    sound(amd_smi.metric(text))
    sound(amd_smi.static(text))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(amd.card(**{"Average Power (W)": ""}))), json_values)
def test_any_json_of_rocm_gives_a_report(key: str, value: Any) -> None:
    sound(rocm_smi.json_(json.dumps({"card0": {**amd.card(), key: value}, "system": value})))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*jobs.NEW, "job_resources", "time"]), json_values)
def test_any_json_of_slurm_gives_jobs(key: str, value: Any) -> None:
    for job in slurm.jobs_json(json.dumps({"jobs": [{**jobs.NEW, key: value}], "last_update": value})):
        assert job.name.isprintable()
        assert job.gpus is None or job.gpus >= 0


@given(st.text(max_size=60) | st.sampled_from(["1e999", "0x", "-0", "[", "[]", "١٢", "1_0", "0x" + "f" * 40]))
def test_any_cell_is_a_number_or_a_state(text: str) -> None:
    for value in (cell.reading("power_w", text), cell.flag(text)):
        assert value in STATES or (isinstance(value, float) and math.isfinite(value))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    "unit", ["a", " ", "\t", "[", "{", "=", ",", "<a>", "n[1-99999],", "GPU 0: (UUID: ", '{"a":', "\n", "\n {"]
)
def test_long_texts_take_no_time(name: str, unit: str) -> None:
    began = time.perf_counter()
    ALL[name][0](unit * 60_000)
    assert time.perf_counter() - began < 5.0
