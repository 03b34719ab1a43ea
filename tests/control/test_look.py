"""One look at real nodes: what `poll` and `doctor` tell of them, through a real sshd and the real probe."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.control.look import cpus_of, examine
from engine.profile import catalog
from engine.telemetry.reading import decode
from engine.telemetry.snapshot import NodeState
from engine.telemetry.store import Store
from tests.parts.nvml import FakeNvml
from tests.parts.sshd import Sshd, free_port
from tui.cli import main

MakeSshd = Callable[..., Sshd]


def inventory(folder: Path, server: Sshd, nodes: str) -> Path:
    """A cluster file of nodes behind one server."""
    path = folder / "cluster.yaml"
    path.write_text(
        f"name: here\npoll_interval_s: 0.2\nssh: {{known_hosts: {server.known_hosts}, identity: {server.identity}}}\n"
        f"nodes:\n{nodes}"
    )
    return path


def node(server: Sshd, name: str = "n1", port: int | None = None, u: int = 1) -> str:
    return f'- {{name: {name}, type: hgx-h100, ssh: "{server.user}@127.0.0.1:{port or server.port}", u: {u}}}\n'


def test_poll_prints_every_gpu_once(
    nvml: FakeNvml, make_sshd: MakeSshd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = make_sshd(nvml.environment)
    path = inventory(tmp_path, server, node(server))
    assert main(["poll", "--cluster", str(path), "--once", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["state"], told["reader"], len(told["gpus"])) == ("live", "NVML", 2)
    assert told["gpus"][1]["temperature_c"] == 61
    assert told["gpus"][1]["ecc_corrected"] is None, "what is not read is no number"
    assert [link["state"] for link in told["links"] if link["kind"] == "nvlink"] == ["active"] * 4
    assert main(["poll", "--cluster", str(path), "--once"]) == 0
    assert "NVIDIA H100 80GB HBM3" in capsys.readouterr().out


def test_poll_names_what_cannot_be_read(
    nvml: FakeNvml, make_sshd: MakeSshd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = make_sshd(nvml.environment)
    nothing = free_port()
    path = inventory(tmp_path, server, node(server) + node(server, "n2", nothing, u=20))
    assert main(["poll", "--cluster", str(path), "--once"]) == 1
    out = capsys.readouterr().out
    assert "no SSH server answers" in out
    assert "NVIDIA H100 80GB HBM3" in out


def test_a_node_that_is_well(
    nvml: FakeNvml, make_sshd: MakeSshd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nvml.write(count=8, persistence=1)
    server = make_sshd(nvml.environment)
    assert main(["doctor", "--cluster", str(inventory(tmp_path, server, node(server)))]) == 0
    out = capsys.readouterr().out
    assert "8 GPUs through NVML, power limits: yes" in out
    assert "1 of 1 nodes are well." in out


@pytest.mark.parametrize(
    ("readings", "says"),
    [
        ({"persistence": 0}, "persistence mode is off (0, 1, 2, 3, 4, 5, 6, 7): nvidia-smi -pm 1"),
        ({"gpu3_field4": 2}, "uncorrected memory errors since the driver started (3)"),
        ({"gpu5_field144": 1}, "rows wait to be remapped: reset the GPU (5)"),
        ({"gpu2_xid": 79}, "a critical event (XID) was told (2)"),
        ({"gpu1_nvlink0.active": 0}, "1 links inactive: GPU 1 NVLink 0"),
        ({"gpu4_field90": 1562}, "2 links degraded: GPU 4 NVLink 0, GPU 4 NVLink 1"),
        ({"gpu6_pcie_width_now": 8}, "1 links degraded: GPU 6 PCIe"),
        ({"gpu7_field161": 12}, "2 links have counted errors"),
        ({"gpu0_throttle": 0x40}, "clocks are held by heat (0)"),
        ({"gpu0_temperature": "!15"}, "GPU at 00000000:11:00.0 does not answer"),
        ({"temperature": 2112}, "readings out of physical range were dropped"),
        ({"energy": "!3", "power": "!3"}, "not to be read here: power_w (unsupported)"),
        ({"count": 7}, "it shows 7 GPUs; its node type has 8"),
    ],
)
def test_what_is_wrong_is_named(
    nvml: FakeNvml,
    make_sshd: MakeSshd,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    readings: dict[str, object],
    says: str,
) -> None:
    nvml.write(**{"count": 8, "persistence": 1, **readings})  # type: ignore[arg-type]
    server = make_sshd(nvml.environment)
    main(["doctor", "--cluster", str(inventory(tmp_path, server, node(server)))])
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cpus", "wrong", "says"),
    [
        ("48-95", True, "ranks are bound to the wrong CPUs, far from their GPUs: 3"),
        ("0-191", False, "ranks are not bound to the CPUs beside their GPUs: 3"),
        ("4-7", None, ""),
    ],
)
def test_a_rank_and_the_cpus_beside_its_gpu(cpus: str, wrong: bool | None, says: str) -> None:
    cluster = catalog.cluster("h100x64-400g")
    store = Store([(n.name, 8) for n in cluster.nodes])
    facts = [{"index": slot, "cpus": "0-47,96-143"} for slot in range(8)]
    name = cluster.nodes[0].name
    store.apply(name, decode(json.dumps({"hello": 1, "hostname": "h", "gpus": facts}).encode()), 1.0)  # type: ignore[arg-type]
    process = {"gpu": 2, "pid": 77, "rank": "3", "cpus": cpus}
    tick = {"tick": 1, "time": 1.0, "gpus": {}, "processes": [process]}
    store.apply(name, decode(json.dumps(tick).encode()), 1.0)  # type: ignore[arg-type]
    found = [f for f in examine(cluster, store.publish(1.0), {})[0].findings if f.text.startswith("ranks")]
    assert [(f.wrong, f.text) for f in found] == ([] if wrong is None else [(wrong, says)])


@pytest.mark.parametrize(
    ("ahead_s", "says"),
    [
        (7200, "its clock is 7200 s ahead of this machine's"),
        (-7200, "its clock is 7200 s behind this machine's"),
        (1, ""),
    ],
)
def test_a_clock_that_is_wrong_is_told_and_changes_no_age(ahead_s: float, says: str) -> None:
    cluster = catalog.cluster("h100x64-400g")
    store, name = Store([(n.name, 8) for n in cluster.nodes]), cluster.nodes[0].name
    tick = {"tick": 1, "time": 1000.0 + ahead_s, "gpus": {"temperature_c": [50] * 8}}
    store.apply(name, decode(json.dumps(tick).encode()), 1000.0)  # type: ignore[arg-type]
    snapshot = store.publish(1001.0)
    assert snapshot.nodes[0].state is NodeState.LIVE
    assert snapshot.nodes[0].last_sample == 1000.0
    found = [f.text for f in examine(cluster, snapshot, {})[0].findings if "clock is" in f.text]
    assert found == ([says] if says else [])


def test_a_process_is_found_with_its_environment_and_cpus(
    nvml: FakeNvml, make_sshd: MakeSshd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The probe reads a process's environment and CPUs from the kernel: this very process stands in for a rank."""
    nvml.write(count=8, persistence=1, gpu0_pid=os.getpid(), gpu0_pid_memory=1 << 30)
    server = make_sshd(nvml.environment)
    assert main(["poll", "--cluster", str(inventory(tmp_path, server, node(server))), "--once", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    (process,) = told["gpus"][0]["processes"]
    assert (process["pid"], process["memory_mib"]) == (os.getpid(), 1024)
    assert process["name"] == Path("/proc/self/comm").read_text().strip()


def test_mig_instances_are_listed_and_utilisation_is_unknown(
    nvml: FakeNvml, make_sshd: MakeSshd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = "NVIDIA H100 80GB HBM3 MIG 3g.40gb"
    nvml.write(count=2, gpu0_mig=2, gpu0_utilization="!3", gpu8_name=part, gpu9_name=part)
    server = make_sshd(nvml.environment)
    main(["poll", "--cluster", str(inventory(tmp_path, server, node(server))), "--once", "--json"])
    (told,) = json.loads(capsys.readouterr().out)
    assert told["gpus"][0]["utilization_pct"] is None
    assert [m["name"] for m in told["gpus"][0]["mig"]] == ["3g.40gb", "3g.40gb"]
    assert told["gpus"][1]["mig"] == []


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-2,8", {0, 1, 2, 8}), ("5", {5}), ("", set()), (None, set()), ("x-3,4", {4}), ("0-99999999", set())],
)
def test_cpu_lists(text: str | None, cpus: set[int]) -> None:
    assert cpus_of(text) == cpus
