"""nvidia-smi's texts to readings: a number where one is printed, a word for why where none is, never a 0 for it."""

from __future__ import annotations

import pytest

from engine.telemetry.reading import MigFacts, ReadingState, judge
from engine.telemetry.tools import cell
from engine.telemetry.tools import nvidia_smi as smi

HEAD = (
    "index, name, temperature.gpu, temperature.gpu.tlimit, power.draw [W], power.limit [W], clocks.sm [MHz],"
    " utilization.gpu [%], memory.used [MiB], memory.total [MiB], clocks_event_reasons.active"
)
CSV = f"""{HEAD}
0, NVIDIA H100 PCIe, 61, 24, 301.25 W, 350.00 W, 1605 MHz, 87 %, 40123 MiB, 81559 MiB, 0x0000000000000024
1, Odd, Board, of Names, 44, [N/A], 90.50 W, 350.00 W, N/A, [N/A], [N/A], [N/A], [Not Supported]
2, NVIDIA H100 PCIe, [Unknown Error], [Unknown Error], [GPU requires reset], , 0 MHz, No data, -, 81559 MiB, 0x1
"""
RULES = """
    Temperature
        GPU Current Temp                  : 47 C
        GPU T.Limit Temp                  : 38 C
        GPU Shutdown T.Limit Temp         : -9 C
        GPU Slowdown T.Limit Temp         : -3 C
        GPU Max Operating T.Limit Temp    : 0 C
        Memory Current Temp               : 58 C
"""
DETAILS = """
==============NVSMI LOG==============

Timestamp                                 : Mon Jan  5 10:00:00 2026
Driver Version                            : 560.35.03
CUDA Version                              : 12.6

Attached GPUs                             : 2
GPU 00000000:1B:00.0
    Product Name                          : NVIDIA A100-SXM4-40GB
    Persistence Mode                      : Enabled
    MIG Mode
        Current                           : Enabled
        Pending                           : Enabled
    MIG Device
        Index                             : 0
        GPU Instance ID                   : 2
        Compute Instance ID               : 0
        FB Memory Usage
            Total                         : 9856 MiB
            Used                          : 37 MiB
    MIG Device
        Index                             : 1
        GPU Instance ID                   : 5
        Compute Instance ID               : 1
        FB Memory Usage
            Total                         : 4864 MiB
            Used                          : N/A
    GPU UUID                              : GPU-aaaa
    GPU Reset Status
        Reset Required                    : Yes
    PCI
        Bus Id                            : 00000000:1B:00.0
        GPU Link Info
            PCIe Generation
                Max                       : 4
                Current                   : 3
            Link Width
                Max                       : 16x
                Current                   : 8x
        Replays Since Reset               : 3
    Clocks Event Reasons
        Idle                              : Not Active
        SW Power Cap                      : Active
        HW Slowdown                       : Active
            HW Thermal Slowdown           : Active
            HW Power Brake Slowdown       : Not Active
        Display Clock Setting             : N/A
    Clocks Event Reasons Counters
        SW Power Capping                  : 991 us
    FB Memory Usage
        Total                             : 40960 MiB
        Used                              : 1234 MiB
    Utilization
        Gpu                               : N/A
    ECC Errors
        Volatile
            SRAM Correctable              : 1
            SRAM Uncorrectable Parity     : 2
            SRAM Uncorrectable SEC-DED    : 3
            DRAM Correctable              : 4
            DRAM Uncorrectable            : 5
        Aggregate
            SRAM Correctable              : 900
    Remapped Rows
        Correctable Error                 : 1
        Uncorrectable Error               : 2
        Pending                           : Yes
        Remapping Failure Occurred        : No
    Temperature
        GPU Current Temp                  : 60 C
        GPU T.Limit Temp                  : N/A
        GPU Shutdown Temp                 : 92 C
        GPU Slowdown Temp                 : 89 C
        GPU Max Operating Temp            : 85 C
    GPU Power Readings
        Average Power Draw                : N/A
        Instantaneous Power Draw          : 233.40 W
        Current Power Limit               : 400.00 W
        Min Power Limit                   : 100.00 W
    Module Power Readings
        Average Power Draw                : 999.00 W
    Clocks
        SM                                : 1095 MHz
        Memory                            : 1215 MHz
    Processes
        Process ID                        : 44
            Name                          : /bin/x: y
GPU 00000000:3D:00.0
    Product Name                          : NVIDIA A100-SXM4-40GB
    Remapped Rows                         : N/A
    Temperature
        GPU Current Temp                  : Unknown Error
        GPU Slowdown Temp                 : 89 C
"""


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("52", 52.0),
        (" 52.0 C", 52.0),
        ("-2 C", -2.0),
        ("35.5°C", 35.5),
        ("52 W", "error"),
        ("[N/A]", "absent"),
        ("N/A (Secondary die)", "absent"),
        ("No data", "absent"),
        ("-", "absent"),
        ("[Not Supported]", "unsupported"),
        ("[Requested functionality has been deprecated]", "unsupported"),
        ("[Unknown Error]", "error"),
        ("[GPU requires reset]", "error"),
        ("[Insufficient Permissions]", "error"),
        ("[GPU is lost]", "lost"),
        ("", "blank"),
        ("  ", "blank"),
        ("fifty", "error"),
        ("9" * 5000, "error"),
        (None, "absent"),
        (True, "error"),
        (float("nan"), "error"),
        (10**400, "error"),
        ([52], "error"),
        (52, 52.0),
    ],
)
def test_a_cell_is_a_number_or_the_word_for_why_not(text: object, right: object) -> None:
    found = cell.reading("temperature_c", text)
    assert found == right
    assert not (isinstance(found, str) and judge("temperature_c", found)[1] is ReadingState.VALUE)


@pytest.mark.parametrize(
    ("metric", "text", "unit", "right"),
    [
        ("memory_used_mib", "2 GiB", "", 2048.0),
        ("memory_used_mib", "3145728", "B", 3.0),
        ("sm_clock_mhz", "(1650Mhz)", "", 1650.0),
        ("power_w", "612510", "mW", 612.51),
        ("throttle", "0x0000000000000004", "", 4.0),
        ("pcie_replays", "7", "", 7.0),
    ],
)
def test_units_are_the_metrics(metric: str, text: str, unit: str, right: float) -> None:
    assert cell.reading(metric, text, unit) == pytest.approx(right)


def test_query_reads_each_cell_and_a_name_with_commas() -> None:
    report = smi.query(CSV)
    first, second, third = report.gpus
    assert first.readings == {
        "temperature_c": 61.0,
        "margin_c": 24.0,
        "power_w": 301.25,
        "power_limit_w": 350.0,
        "sm_clock_mhz": 1605.0,
        "utilization_pct": 87.0,
        "memory_used_mib": 40123.0,
        "memory_total_mib": 81559.0,
        "throttle": 36.0,
    }
    assert (second.index, second.name) == (1, "Odd, Board, of Names")
    assert second.readings["power_w"] == 90.5
    assert second.readings["margin_c"] == second.readings["sm_clock_mhz"] == "absent"
    assert second.readings["throttle"] == "unsupported"
    assert third.needs_reset
    assert not second.needs_reset
    assert [third.readings[m] for m in ("temperature_c", "power_w", "power_limit_w")] == ["error", "error", "blank"]
    assert third.readings["sm_clock_mhz"] == 0.0  # printed as 0: a reading
    assert third.readings["utilization_pct"] == third.readings["memory_used_mib"] == "absent"
    assert (report.noise, report.lost, report.trouble) == (0, (), None)


@pytest.mark.parametrize("reasons", ["clocks_event_reasons.active", "clocks_throttle_reasons.active"])
@pytest.mark.parametrize("units", [True, False])
def test_the_header_may_come_under_either_name_with_or_without_units(reasons: str, units: bool) -> None:
    watts = " [W]" if units else ""
    text = f"power.draw{watts}, {reasons}, index, name\n70.5, 0x0000000000000001, 3, A, B\n"
    gpu = smi.query("Welcome, all\n" + text).gpus[0]
    assert (gpu.index, gpu.name, gpu.readings) == (3, "A, B", {"power_w": 70.5, "throttle": 1.0})


def test_power_falls_back_where_the_average_is_not_told() -> None:
    text = "index, power.draw [W], power.draw.average [W], power.draw.instant [W]\n0, [N/A], [N/A], 88.00 W\n"
    assert smi.query(text).gpus[0].readings == {"power_w": 88.0}


@pytest.mark.parametrize("old", [True, False])
def test_what_is_asked_for_can_be_read(old: bool) -> None:
    fields = smi.query_fields(old)
    assert fields[0] == "index"
    assert fields[-1] == "name"
    assert len(set(fields)) == len(fields)
    columns = smi.header(", ".join(fields))
    assert columns == smi.given(fields)
    gpu = smi.row(smi.given(fields), ", ".join(["5", *["1"] * (len(fields) - 2), "N, of commas"]))
    assert gpu is not None
    assert (gpu.index, gpu.name) == (5, "N, of commas")
    assert gpu.readings["throttle"] == 1.0
    assert gpu.pcie_width_max == 1.0
    assert ("margin_c" in gpu.readings) is not old


@pytest.mark.parametrize("line", ["", "index", HEAD, "0, NVIDIA", "x, A, 1, 2, 3, 4, 5, 6, 7, 8, 9", "a" * 9000])
def test_a_line_that_is_no_row_is_none(line: str) -> None:
    columns = smi.header(HEAD)
    assert columns is not None
    assert smi.row(columns, line) is None


def test_one_lost_gpu_does_not_take_the_others_along() -> None:
    text = (
        "Unable to determine the device handle for GPU0000:4E:00.0: Unknown Error\n"
        "0, NVIDIA A40, 39, 71.00 W\n1, NVIDIA A40, 38, 70.00 W\n"
    )
    report = smi.query(text, ("index", "name", "temperature.gpu", "power.draw"))
    assert report.lost == ("0000:4E:00.0",)
    assert [gpu.readings for gpu in report.gpus] == [
        {"temperature_c": 39.0, "power_w": 71.0},
        {"temperature_c": 38.0, "power_w": 70.0},
    ]


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("Unable to determine the device handle for GPU 0000:a1:00.0: GPU is lost. Reboot", "0000:A1:00.0"),
        ("Unable to determine the device handle for gpu 00000000:A1:00.0: Unknown Error", "0000:A1:00.0"),
        ("Unable to determine the device handle for GPU3: Unknown Error", "index 3"),
        ("GPU is lost.  Reboot the system to recover this GPU", "a GPU it does not name"),
        ("0, NVIDIA A40, 39", None),
    ],
)
def test_lost_gpus_are_named(line: str, right: str | None) -> None:
    assert smi.lost(line) == right


def test_a_row_of_lost_cells_is_a_lost_gpu() -> None:
    report = smi.query("index, temperature.gpu, power.draw [W]\n0, 40, 80 W\n1, [GPU is lost], [GPU is lost]\n")
    assert [gpu.index for gpu in report.gpus] == [0]
    assert report.lost == ("index 1",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 1.2", "version mismatch"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "communicate"),
        ("No devices were found", "No devices"),
        ("bash: line 1: nvidia-smi: command not found", "not found"),
        ('Field "power.moon" is not a valid field to query.', "not a valid field"),
        ("", "names no GPU"),
        ("Have a nice day\n", "names no GPU"),
    ],
)
def test_a_node_without_readings_says_why(text: str, words: str) -> None:
    for report in (smi.query(text), smi.details(text), smi.xml(text), smi.mig(text)):
        assert report.gpus == ()
        assert words in (report.trouble or "")


def test_the_refused_field_is_named() -> None:
    assert smi.refused('Field "power.moon" is not a valid field to query.') == "power.moon"
    assert smi.refused("all is well") is None


def test_margins_give_limits_and_the_way_to_the_slowdown() -> None:
    gpu = smi.details(RULES).gpus[0]
    assert (gpu.readings["slowdown_c"], gpu.readings["shutdown_c"], gpu.max_operating_c) == (88.0, 94.0, 85.0)
    assert (gpu.readings["margin_c"], gpu.readings["memory_temperature_c"]) == (41.0, 58.0)


def test_margins_need_what_they_are_made_of() -> None:
    gpu = smi.details(RULES.replace("47 C", "Unknown Error")).gpus[0]
    assert gpu.readings["slowdown_c"] == gpu.readings["shutdown_c"] == "error"
    assert gpu.readings["margin_c"] == 41.0  # the driver's own, which needs no temperature
    assert "slowdown_c" not in smi.details("    Temperature\n        GPU Current Temp : 50 C\n").gpus[0].readings


def test_details_reads_the_whole_text() -> None:
    report = smi.details(DETAILS)
    first, second = report.gpus
    assert (report.driver, report.lost, report.trouble) == ("560.35.03", (), None)
    assert (first.index, first.bus_id, first.uuid) == (0, "0000:1B:00.0", "GPU-aaaa")
    assert first.readings == {
        "temperature_c": 60.0,
        "power_w": 233.4,
        "power_limit_w": 400.0,
        "power_limit_min_w": 100.0,
        "sm_clock_mhz": 1095.0,
        "memory_clock_mhz": 1215.0,
        "utilization_pct": "absent",
        "memory_used_mib": 1234.0,
        "memory_total_mib": 40960.0,
        "pcie_replays": 3.0,
        "ecc_corrected": 5.0,
        "ecc_uncorrected": 10.0,
        "rows_remapped": 3.0,
        "remap_pending": 1.0,
        "remap_failed": 0.0,
        "throttle": float(0x4 | 0x8 | 0x40),
        "slowdown_c": 89.0,
        "shutdown_c": 92.0,
        "margin_c": 29.0,
    }
    assert first.mig == (
        MigFacts(gpu_instance=2, compute_instance=0, memory_total_mib=9856.0, memory_used_mib=37.0),
        MigFacts(gpu_instance=5, compute_instance=1, memory_total_mib=4864.0, memory_used_mib=None),
    )
    assert (first.pcie_gen, first.pcie_gen_max, first.pcie_width, first.pcie_width_max) == (3.0, 4.0, 8.0, 16.0)
    assert first.persistence
    assert first.mig_mode
    assert first.needs_reset
    assert second.readings["temperature_c"] == second.readings["margin_c"] == "error"
    assert second.readings["rows_remapped"] == "absent"
    assert second.persistence is None


def test_details_tells_of_a_lost_gpu_and_gives_no_index_then() -> None:
    report = smi.details(DETAILS + "Unable to determine the device handle for GPU 0000:77:00.0: GPU is lost\n")
    assert report.lost == ("0000:77:00.0",)
    assert [gpu.index for gpu in report.gpus] == [None, None]


def xml_of(power: str, gpus: int = 2, temperature: str = "<gpu_temp>41 C</gpu_temp>") -> str:
    one = f"""<gpu id="00000000:0{{0}}:00.0"><product_name>NVIDIA H20</product_name>
  <mig_devices><mig_device><gpu_instance_id>1</gpu_instance_id><compute_instance_id>0</compute_instance_id>
  <fb_memory_usage><total>100 MiB</total><used>1 MiB</used></fb_memory_usage></mig_device></mig_devices>
  <pci><pci_gpu_link_info><link_widths><current_link_width>8x</current_link_width></link_widths></pci_gpu_link_info></pci>
  <clocks_event_reasons><clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>
  <clocks_event_reason_sw_thermal_slowdown>Active</clocks_event_reason_sw_thermal_slowdown></clocks_event_reasons>
  <fb_memory_usage><total>97871 MiB</total><used>12 MiB</used></fb_memory_usage>
  <temperature>{temperature}</temperature>{power}
  <module_power_readings><power_draw>5 W</power_draw></module_power_readings></gpu>"""
    inner = "".join(one.replace("{0}", str(place + 1)) for place in range(gpus))
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v13.dtd">\n<nvidia_smi_log>'
        f"<driver_version>570.1</driver_version><attached_gpus>{gpus}</attached_gpus>{inner}</nvidia_smi_log>\n"
    )


@pytest.mark.parametrize(
    "power",
    [
        "<power_readings><power_draw>77.5 W</power_draw><power_limit>500 W</power_limit></power_readings>",
        "<gpu_power_readings><power_draw>77.5 W</power_draw>"
        "<current_power_limit>500 W</current_power_limit></gpu_power_readings>",
        "<gpu_power_readings><average_power_draw>77.5 W</average_power_draw>"
        "<instant_power_draw>70 W</instant_power_draw>"
        "<current_power_limit>500 W</current_power_limit></gpu_power_readings>",
        "<gpu_power_readings><average_power_draw>N/A</average_power_draw>"
        "<instant_power_draw>77.5 W</instant_power_draw>"
        "<current_power_limit>500 W</current_power_limit></gpu_power_readings>",
    ],
)
def test_xml_of_all_versions(power: str) -> None:
    report = smi.xml("a banner\n" + xml_of(power))
    gpu = report.gpus[1]
    assert (len(report.gpus), report.driver, gpu.index, gpu.bus_id) == (2, "570.1", 1, "0000:02:00.0")
    assert (gpu.readings["power_w"], gpu.readings["power_limit_w"]) == (77.5, 500.0)
    assert (gpu.readings["memory_total_mib"], gpu.readings["throttle"], gpu.pcie_width) == (97871.0, 33.0, 8.0)
    assert gpu.mig[0].memory_total_mib == 100.0


def test_xml_margins() -> None:
    heat = (
        "<gpu_temp>41 C</gpu_temp><gpu_temp_tlimit>44 C</gpu_temp_tlimit>"
        "<gpu_temp_max_tlimit_threshold>-8 C</gpu_temp_max_tlimit_threshold>"
        "<gpu_temp_slow_tlimit_threshold>-2 C</gpu_temp_slow_tlimit_threshold>"
    )
    readings = smi.xml(xml_of("", 1, heat)).gpus[0].readings
    assert (readings["slowdown_c"], readings["shutdown_c"], readings["margin_c"]) == (87.0, 93.0, 46.0)


def test_xml_that_ends_early_gives_the_gpus_that_are_whole() -> None:
    text = xml_of("", 3)
    report = smi.xml(text[: text.rindex("<gpu id") + 300])
    assert [gpu.bus_id for gpu in report.gpus] == ["0000:01:00.0", "0000:02:00.0"]


@pytest.mark.parametrize(
    "kind",
    [
        '<!DOCTYPE x [<!ENTITY a "bb"><!ENTITY b "&a;&a;">]>',
        '<!DOCTYPE x SYSTEM "y" [<!ENTITY a SYSTEM "file:///etc/passwd">]>',
    ],
)
def test_xml_with_entities_is_refused(kind: str) -> None:
    report = smi.xml(f"{kind}<nvidia_smi_log><gpu id='1'><product_name>&b;</product_name></gpu></nvidia_smi_log>")
    assert report.gpus == ()
    assert "entities" in (report.trouble or "")


def test_mig_instances_belong_to_the_gpu_above() -> None:
    report = smi.mig(
        "GPU 0: NVIDIA H20 (UUID: GPU-1)\n"
        "  MIG 1c.2g.24gb  Device  0: (UUID: MIG-1)\n  MIG 1g.12gb     Device 11: (UUID: MIG-2)\n"
        "Unable to determine the device handle for gpu 0000:09:00.0: GPU is lost.  Reboot the system\n"
        "GPU 2: NVIDIA H20 (96 GB) (UUID: GPU-2)\n"
    )
    assert [(gpu.index, gpu.uuid, [part.name for part in gpu.mig]) for gpu in report.gpus] == [
        (0, "GPU-1", ["1c.2g.24gb", "1g.12gb"]),
        (2, "GPU-2", []),
    ]
    assert report.gpus[1].name == "NVIDIA H20 (96 GB)"
    assert report.lost == ("0000:09:00.0",)


def test_processes_with_commas_in_both_names() -> None:
    found = smi.apps(
        "gpu_name, gpu_uuid, pid, process_name, used_gpu_memory [MiB]\n"
        "NVIDIA, odd, GPU-7, 41, ./a,b, with, commas, 512 MiB\n"
        "NVIDIA H20, GPU-7, 42, /usr/bin/python3, [N/A]\n"
        "NVIDIA H20, GPU-7, 0, ghost, 1 MiB\nNVIDIA H20, GPU-7\n"
    )
    assert [(app.gpu_uuid, app.pid, app.name, app.memory_mib) for app in found] == [
        ("GPU-7", 41, "./a, b, with, commas", 512.0),
        ("GPU-7", 42, "/usr/bin/python3", "absent"),
    ]
    assert smi.apps("No running processes found\n") == ()
