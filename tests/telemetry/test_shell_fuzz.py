"""What a shell reader may print: any lines at all, and what becomes of counters and of lines in pieces."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.telemetry.reading import PLAUSIBLE
from engine.telemetry.shell.reader import LETTERS, ShellReader
from engine.telemetry.store import Store
from tests.parts.tools import h100
from tests.telemetry.test_shell import die, instinct, values

TEXTS = [
    ", ".join(h100(0)),
    ", ".join(h100(0).values()),
    "Unable to determine the device handle for GPU0000:21:00.0: Unknown Error",
    'Field "name" is not a valid field to query.',
    "GPU 0: H (UUID: GPU-1)",
    "\t Link 0: 26.562 GB/s",
    "\t Link 0: CRC Errors: 2",
    json.dumps([instinct(0, 50, 300)]),
    json.dumps({"card0": die("1", "2")}),
    "/sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data:77",
    "/sys/class/net/eth0/statistics/rx_bytes:5",
    "discover",
    "reader nvidia-smi",
    "hot, hot, hot",
]
framed = st.builds(
    lambda letter, kind, text: f"\x1e{letter}{kind}{text}\n".encode("utf-8", "replace"),
    st.sampled_from([*LETTERS, *(f".{letter}" for letter in LETTERS), "q", ""]),
    st.sampled_from([" ", "+", ""]),
    st.sampled_from(TEXTS) | st.text(max_size=30) | st.sampled_from(["0", "1", "12.5", "255"]),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(framed | st.binary(max_size=40), max_size=30))
def test_any_lines_raise_nothing_and_make_no_number(lines: list[bytes]) -> None:
    store = Store([("n", 1)])
    reader = ShellReader("n", store, 1.0, "")
    for count, line in enumerate(lines):
        reader.take(line, 1000.0 + count)
    snapshot = store.publish(2000.0)
    for name, (low, high) in PLAUSIBLE.items():
        if name in snapshot.gpus.columns:
            assert all(math.isnan(v) or low <= v <= high for v in snapshot.gpus[name])


@given(st.text(alphabet=st.characters(exclude_characters="0123456789,\n\r\x1e"), max_size=12))
def test_a_word_never_becomes_a_number(word: str) -> None:
    store = Store([("n", 1)])
    reader = ShellReader("n", store, 1.0, "")
    head = "index, pci.bus_id, temperature.gpu, power.draw [W]"
    reader.take(f"\x1eQ {head}\n\x1eQ 0, 0000:01:00.0, {word}, {word} W\n\x1e.Q 0\n".encode("utf-8", "replace"), 1.0)
    snapshot = store.publish(1.0)
    assert values(snapshot, "temperature_c") == [None]
    assert values(snapshot, "power_w") == [None]


def test_rates_of_ports_are_by_the_nodes_own_clock() -> None:
    store = Store([("n", 1)])
    reader = ShellReader("n", store, 1.0, "")
    row = "\x1eQ index, pci.bus_id, temperature.gpu\n\x1eQ 0, 0000:01:00.0, 40\n\x1e.Q 0\n"
    base = "/sys/class/infiniband/mlx5_0/ports/1"
    for words, uptime, arrived in ((0, "100.00", 50.0), (250_000_000, "102.00", 51.0)):
        lines = [
            f"{base}/state:4: ACTIVE",
            f"{base}/rate:400 Gb/sec (4X NDR)",
            f"{base}/counters/port_rcv_data:{words}",
        ]
        lines += ["hook:/tmp/x/job.sock", "/proc/loadavg:3.25 1 1 1/2 3"]
        said = "".join(f"\x1eS {line}\n" for line in lines) + f"\x1e.S {uptime}\n" + row
        reader.take(said.encode(), arrived)
    snapshot = store.publish(51.0)
    assert snapshot.links["rx_gb_s"][snapshot.links.name.index("mlx5_0")] == pytest.approx(0.5)
    assert snapshot.nodes[0].hook_sockets == ("/tmp/x/job.sock",)
    assert snapshot.nodes[0].load == 3.25


def test_a_long_line_comes_in_pieces() -> None:
    store = Store([("n", 1)])
    reader = ShellReader("n", store, 1.0, "")
    text = json.dumps([instinct(0, 50, 300)])
    pieces = [text[i : i + 20] for i in range(0, len(text), 20)]
    said = "".join(f"\x1eM+{piece}\n" for piece in pieces[:-1]) + f"\x1eM {pieces[-1]}\n\x1e.M 0\n"
    reader.take(said.encode(), 1.0)
    assert values(store.publish(1.0), "power_w") == [300]
