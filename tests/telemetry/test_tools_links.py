"""NVLink, topology and InfiniBand texts: links up, slow, down, hidden and missing are five different things."""

from __future__ import annotations

import pytest

from engine.telemetry.tools import infiniband, nvlink
from engine.telemetry.tools.topology import topology


def gpu(index: int) -> str:
    return f"GPU {index}: NVIDIA B200 (UUID: GPU-{index})\n"


def test_links_that_are_up_slow_and_down() -> None:
    text = (
        gpu(0) + "\t Link 0: 25 GB/s\n\t Link 1: 3.125 GB/s\n" + gpu(1) + "         Link 0: <inactive>\n\t Link 1: ?\n"
    )
    found = nvlink.status("Last login: today\n" + text)
    assert [(link.name, link.state, link.gb_s) for link in found[0].links] == [
        ("NVLink 0", "active", 25.0),
        ("NVLink 1", "active", 3.125),
    ]
    assert [(link.gpu, link.state, link.gb_s) for link in found[1].links] == [
        (1, "inactive", None),
        (1, "unknown", None),
    ]
    assert found[0].state == "links"


@pytest.mark.parametrize(
    ("said", "state"),
    [
        ("NVML: Unable to retrieve NVLink information as all links are inActive", "all inactive"),
        ("NVLink status is not supported in MIG mode", "hidden by MIG"),
        ("Device does not have or support Nvlink", "none"),
        ("something else", "unknown"),
        ("", "unknown"),
    ],
)
def test_what_is_said_instead_of_links(said: str, state: str) -> None:
    found = nvlink.status(gpu(4) + said + "\n" + gpu(5) + "\t Link 0: 50 GB/s\n")
    assert (found[4].state, found[4].links) == (state, ())
    assert len(found[5].links) == 1


def test_error_counters_are_summed_by_link() -> None:
    text = gpu(2) + (
        "\t Link 0: Replay Errors: 3\n\t Link 0: Recovery Errors: 1\n\t Link 0: CRC Errors: 0\n"
        "\t Link 1: Replay Errors: N/A\n\t Link 1: CRC Errors: N/A\n\t Link 2: Tx packets: 99\n"
    )
    assert nvlink.errors(text) == {2: {0: 4.0, 1: None}}


MATRIX = """\
\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tNIC2\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV12\tPXB\tNODE\tPXB\t0-31,64-95\t0\t\tN/A
GPU1\tNV12\t X \tSYS\tSYS\tSYS\t32-63\t1-2\t\tN/A
NIC0\tPXB\tSYS\t X \tNODE\tPIX\t\t\t
NIC1\tNODE\tSYS\tNODE\t X \tNODE\t\t\t
NIC2\tPXB\tSYS\tPIX\tNODE\t X \t\t\t

Legend:

  X    = Self
  NV#  = links

NIC Legend:

  NIC0: mlx5_3
  NIC1: mlx5_bond_0
  NIC2: mlx5_2
"""


def spaced(text: str) -> str:
    """The same table with spaces, where empty columns leave no trace."""
    return "\n".join("  ".join(line.split("\t")) for line in text.splitlines())


@pytest.mark.parametrize("text", [MATRIX, spaced(MATRIX), "Welcome to GPU0 land\n" + MATRIX])
def test_the_matrix_is_read_by_its_header(text: str) -> None:
    found = topology(text)
    assert found.nvlinks == {(0, 1): 12}
    assert found.pairs["GPU0", "mlx5_bond_0"] == "NODE"
    assert found.cpus == {0: "0-31,64-95", 1: "32-63"}
    assert found.numa == {0: 0}
    assert found.nearest_nic == {0: ("mlx5_3", "mlx5_2")}


def test_other_layouts_of_the_matrix() -> None:
    bare = topology("\tGPU0\tGPU1\nGPU0\t X \tPIX\nGPU1\tPIX\t X \n")
    assert (bare.pairs["GPU1", "GPU0"], bare.nvlinks, bare.numa, bare.cpus) == ("PIX", {}, {}, {})
    reversed_rails = topology(
        "\tmlx5_1\tmlx5_0\tGPU0\tCPU Affinity\nmlx5_1\t X \tSYS\tPIX\t\nGPU0\tPIX\tSYS\t X \t0-7\n"
    )
    assert (reversed_rails.nearest_nic, reversed_rails.cpus) == ({0: ("mlx5_1",)}, {0: "0-7"})
    assert topology("nothing here").pairs == {}


def sysfs(device: str, port: int, **values: str) -> str:
    counters = ("symbol_error", "link_downed", "port_rcv_data", "port_xmit_data")
    return "".join(
        f"/sys/class/infiniband/{device}/ports/{port}/{'counters/' if key in counters else ''}{key}:{value}\n"
        for key, value in values.items()
    )


UP = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "200 Gb/sec (4X HDR)", "link_layer": "InfiniBand"}


def test_ports_of_sysfs() -> None:
    text = (
        sysfs("mlx5_10", 1, **UP, port_rcv_data="250", port_xmit_data="1000", symbol_error="2", link_downed="255")
        + sysfs("mlx5_2", 2, **{**UP, "state": "1: DOWN", "phys_state": "3: Disabled"}, port_rcv_data="4294967295")
        + "/sys/class/infiniband/mlx5_4/fw_ver:1.2\n/sys/class/infiniband/mlx5_4/ports/1/rate:nothing\n"
    )
    second, odd, first = infiniband.ports(text)
    assert (first.link.name, first.link.state, first.link.gb_s) == ("mlx5_10", "active", 25.0)
    assert (first.rx_bytes, first.tx_bytes, first.errors) == (1000.0, 4000.0, 257.0)
    assert (first.saturated, first.layer) == (("link_downed",), "InfiniBand")
    assert (second.link.name, second.link.state) == ("mlx5_2/2", "inactive")
    assert (second.rx_bytes, second.tx_bytes, second.errors) == (None, None, None)
    assert (odd.link.state, odd.link.gb_s) == ("unknown", None)


def test_ibstat_keeps_what_it_printed_before_it_died() -> None:
    text = (
        "CA 'mlx5_0'\n\tCA type: MT4129\n\tNumber of ports: 1\n\tPort 1:\n\t\tState: Active\n"
        "\t\tPhysical state: LinkUp\n\t\tRate: 400\n\t\tLink layer: InfiniBand\n"
        "CA 'mlx5_1'\n\tNumber of ports: 1\n\tPort 1:\n\t\tState: Down\n"
        "ibpanic: [77] main: stat of IB device 'mlx5_2' failed: No such file or directory\n"
    )
    found = infiniband.ibstat(text)
    assert [(p.link.name, p.link.state, p.link.gb_s) for p in found.ports] == [
        ("mlx5_0", "active", 50.0),
        ("mlx5_1", "inactive", None),
    ]
    assert "mlx5_2" in (found.trouble or "")
    assert infiniband.ibstat(text.partition("ibpanic")[0]).trouble is None
