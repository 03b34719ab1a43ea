"""Limits of AMD boards: a real sshd, amd-smi as a stand-in, the kernel's files as the driver lays them out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.telemetry.loader import PROBE
from engine.telemetry.shell import loader as shellloader
from engine.telemetry.snapshot import NodeState
from engine.telemetry.source import Backoff
from tests.parts.sshd import Sshd
from tests.parts.tools import HEAD, Tools, tools
from tests.parts.waiting import until
from tests.telemetry.test_shell import polled
from tests.telemetry.test_ssh import source_of

__all__ = ["tools"]

MakeSshd = Callable[..., Sshd]
BUSES = ("0000:c1:00.0", "0000:2f:00.0")
AMD = (
    HEAD
    + """
case "$1" in
metric) out metric ;;
static) out static ;;
set) read -r accepted; [ "$accepted" = y ] || exit 3; [ ! -e "$folder/refuses" ] || { cat "$folder/refuses"; exit 1; }
    hwmon=$RACKSIDE_SYS/bus/pci/devices/$3/hwmon/hwmon3
    [ "$4" != --perf-determinism ] || echo "$5"000000 >"$hwmon/freq1_input" ;;
reset) ;;
esac
"""
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "MOST_S", 0.5)
    monkeypatch.setattr(Backoff, "SLOW_S", 0.5)
    monkeypatch.setattr(shellloader, "POLL_S", 1.0)


@pytest.fixture
def kernel(tmp_path: Path) -> Path:
    """/sys with two boards, as amdgpu shows them, and a bridge that is none."""
    root = tmp_path / "sys"
    for bus in BUSES:
        folder = root / "bus/pci/devices" / bus
        (folder / "hwmon/hwmon3").mkdir(parents=True)
        (folder / "vendor").write_text("0x1002\n")
        (folder / "pp_dpm_sclk").write_text("0: 500Mhz\n1: 1700Mhz *\n")
        watts = {"power1_cap": 560, "power1_cap_min": 0, "power1_cap_max": 560}
        for name, value in watts.items():
            (folder / "hwmon/hwmon3" / name).write_text(f"{value * 10**6}\n")
        (folder / "hwmon/hwmon3/freq1_input").write_text("1650000000\n")
    (root / "bus/pci/devices/0000:00:01.0").mkdir()
    return root


def cap(kernel: Path, bus: str) -> int:
    """Watts; 0 while its writer has emptied this ordinary file, which the kernel's never is."""
    return int((kernel / "bus/pci/devices" / bus / "hwmon/hwmon3/power1_cap").read_text() or 0) // 10**6


def amd(tools: Tools) -> None:
    """amd-smi numbers the boards in another order than the kernel."""
    gpus = [{"gpu": i, "temperature": {"hotspot": {"value": 60 + i, "unit": "C"}}} for i in range(2)]
    static = [{"gpu": i, "bus": {"bdf": bus}, "asic": {"market_name": "MI250"}} for i, bus in enumerate(BUSES)]
    tools.amd(gpus, static)
    tools.program("amd-smi", AMD)


def environment(kernel: Path) -> dict[str, str]:
    return {"RACKSIDE_SYS": str(kernel)}


async def test_a_cap_is_set_read_back_leased_and_given_back(tools: Tools, make_sshd: MakeSshd, kernel: Path) -> None:
    amd(tools)
    server = make_sshd(environment(kernel), extra=tools.login(hide=False))
    source = source_of(server)
    async with polled(source) as watched:
        await watched.reaches(NodeState.LIVE)
        await until(lambda: len(source._session.state.boards()) == 2)  # type: ignore[union-attr]
        told = await source.command({"do": "power_limit", "id": "a", "gpus": {"0": 400}, "lease_s": 60}, 15)
        assert (told.state, told.gpus["0"].before_w, told.gpus["0"].now_w) == ("done", 560, 400), told.reason
        assert (cap(kernel, BUSES[0]), cap(kernel, BUSES[1])) == (400, 560), "by address, not by the kernel's order"
        again = await source.command({"do": "power_limit", "id": "a", "gpus": {"0": 100}, "lease_s": 60}, 15)
        assert (again.state, cap(kernel, BUSES[0])) == ("done", 400), "a repeated send acts once"
        high = await source.command({"do": "power_limit", "id": "b", "gpus": {"0": 900}, "lease_s": 60}, 15)
        assert (high.state, "outside the 0 to 560 W" in high.reason) == ("failed", True)
        await source.command({"do": "power_limit", "id": "c", "gpus": {"1": 300}, "lease_s": 60}, 15)
        back = await source.command({"do": "restore", "id": "d", "what": "power", "gpus": [1]}, 15)
        assert (back.state, cap(kernel, BUSES[1])) == ("done", 560)
        assert cap(kernel, BUSES[0]) == 400
    await until(lambda: cap(kernel, BUSES[0]) == 560, 15, "given back when the console is gone")


async def test_a_clock_is_held_and_let_go(tools: Tools, make_sshd: MakeSshd, kernel: Path) -> None:
    amd(tools)
    source = source_of(make_sshd(environment(kernel), extra=tools.login(hide=False)))
    async with polled(source) as watched:
        await watched.reaches(NodeState.LIVE)
        await until(lambda: len(source._session.state.boards()) == 2)  # type: ignore[union-attr]
        told = await source.command({"do": "clock_lock", "id": "a", "gpus": {"1": 1300}, "lease_s": 60}, 15)
        assert told.state == "done", told.reason
        assert tools.calls("set", "-g", BUSES[1], "--perf-determinism", "1300")
        high = await source.command({"do": "clock_lock", "id": "b", "gpus": {"1": 1900}, "lease_s": 60}, 15)
        assert "outside the 1 to 1700 MHz" in high.reason
    await until(lambda: tools.calls("reset", "-g", BUSES[1], "--perf-determinism"), 15)


async def test_a_node_without_python_says_why(tools: Tools, make_sshd: MakeSshd, kernel: Path) -> None:
    amd(tools)
    source = source_of(make_sshd(environment(kernel), extra=tools.login()))
    async with polled(source) as watched:
        await watched.reaches(NodeState.LIVE)
        told = await source.command({"do": "power_limit", "id": "a", "gpus": {"0": 400}, "lease_s": 60}, 15)
        assert told.state == "failed"
        assert "without python3: limits cannot be leased there" in told.reason


class Asked:
    """A host of another user, whose sudo runs what it is asked for, or refuses."""

    def __init__(self, answer: tuple[int, str], cap: str = "400000000") -> None:
        self.answer, self.cap, self.ran = answer, cap, []

    ran: list[tuple[list[str], bytes]]

    def is_root(self) -> bool:
        return False

    def user(self) -> str:
        return "ops"

    def list(self, path: str) -> list[str]:
        return ["hwmon3"] if path.endswith("/hwmon") else []

    def read(self, path: str) -> str | None:
        return {"power1_cap": self.cap, "power1_cap_max": "560000000"}.get(path.rpartition("/")[2])

    def run(self, argv: list[str], timeout_s: float, said: bytes = b"") -> tuple[int, str]:
        self.ran.append((argv, said))
        return self.answer


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The keeper as a node imports it."""
    monkeypatch.syspath_prepend(str(PROBE[0].parent))
    yield __import__("rackside_keeper")
    for name in [n for n in sys.modules if n.startswith("rackside_") and "hook" not in n]:
        monkeypatch.delitem(sys.modules, name)


def power_of(keeper: Any, host: Asked) -> Any:
    cards = keeper.Cards(host)
    cards.of = {0: keeper.Card(host, BUSES[0], "/nowhere", 0)}
    return keeper.CardPower(cards, host)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((0, ""), ""),
        ((1, "sudo: a password is required"), "amd-smi says: sudo: a password is required; allow it with the sudoers"),
        ((127, ""), "neither amd-smi nor rocm-smi is there"),
    ],
)
def test_another_user_needs_sudo(answer: tuple[int, str], says: str, keeper: Any) -> None:
    host = Asked(answer)
    said = power_of(keeper, host).put(0, 400000)
    assert says in said if says else said == ""
    assert host.ran[0] == (["sudo", "-n", "amd-smi", "set", "-g", BUSES[0], "--power-cap", "400"], b"y\n")


@pytest.mark.parametrize("cap", ["", "\n", "N/A"])
def test_a_cap_that_cannot_be_read_is_a_sentence(cap: str, keeper: Any) -> None:
    power = power_of(keeper, Asked((0, ""), cap))
    assert power.now(0) is None
    assert power.put(0, 400000) == "the driver took 400 W and does not tell what it kept"
    assert "before could not be read" in power.put(0, power.now(0)), "what is given back may not have been read"
