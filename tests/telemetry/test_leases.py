"""What the probe holds down on a node: set, read back, undone, and given back whatever ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parts.nvml import FakeNvml
from tests.parts.probe import probe
from tests.parts.waiting import until


async def test_a_limit_is_set_read_back_and_answered_once(nvml: FakeNvml) -> None:
    async with probe(nvml) as running:
        running.send(id="one", do="power_limit", gpus={"0": 500, "1": 450}, lease_s=60)
        result = await running.record("result")
        assert result["state"] == "done"
        assert result["gpus"]["1"] == {"before_w": 700, "asked_w": 450, "now_w": 450}
        assert nvml.limits() == {0: 500000, 1: 450000}
        nvml.overrule(0, 600000)
        running.send(id="one", do="power_limit", gpus={"0": 500, "1": 450}, lease_s=60)
        assert (await running.record("result"))["state"] == "done"
        assert nvml.limits()[0] == 600000, "a repeated id must not act again"


@pytest.mark.parametrize(
    ("readings", "limits", "says"),
    [
        ({}, {"0": 900}, "outside the 200 to 700 W"),
        ({}, {"0": 500, "7": 500}, "there is no such GPU"),
        ({"gpu1_limit_set": "!17"}, {"0": 500, "1": 500}, "the driver refused 500 W"),
        ({"gpu1_limit_set": "ignored"}, {"0": 500, "1": 500}, "the driver took 500 W and kept 700.0 W"),
        ({"gpu0_limit_set": "!4"}, {"0": 500}, "sudoers line"),
        ({}, {"zero": 500}, "malformed"),
        ({}, {"0": "much"}, "malformed"),
    ],
)
async def test_all_or_nothing(nvml: FakeNvml, readings: dict[str, str], limits: dict[str, Any], says: str) -> None:
    nvml.write(**readings)
    async with probe(nvml) as running:
        running.send(id="x", do="power_limit", gpus=limits, lease_s=60)
        result = await running.record("result")
        assert result["state"] == "failed"
        assert says in result["reason"]
    assert set(nvml.limits().values()) <= {700000}


async def test_a_lease_that_is_not_renewed_gives_back_what_was_before(nvml: FakeNvml) -> None:
    nvml.overrule(0, 650000)
    async with probe(nvml) as running:
        running.send(id="a", do="power_limit", gpus={"0": 500}, lease_s=60)
        await running.record("result")
        running.send(id="b", do="power_limit", gpus={"0": 400}, lease_s=0.4)
        await running.record("result")
        released = await running.record("released")
        assert (released["released"], released["value"], released["reason"]) == (0, 650, "the lease ran out")
    assert nvml.limits()[0] == 650000, "the limit before the first command, not the default and not the one between"


async def test_the_end_of_input_gives_back_but_not_what_others_set_since(nvml: FakeNvml) -> None:
    async with probe(nvml) as running:
        running.send(id="a", do="power_limit", gpus={"0": 500, "1": 500}, lease_s=60)
        await running.record("result")
        nvml.overrule(1, 300000)
    assert nvml.limits() == {0: 700000, 1: 300000}


async def test_a_permanent_limit_stays(nvml: FakeNvml) -> None:
    async with probe(nvml) as running:
        running.send(id="a", do="power_limit", gpus={"0": 500}, lease_s=None)
        await running.record("result")
    assert nvml.limits() == {0: 500000}


async def test_restore_gives_back_at_once(nvml: FakeNvml) -> None:
    async with probe(nvml) as running:
        running.send(id="a", do="power_limit", gpus={"0": 500}, lease_s=60)
        await running.record("result")
        running.send(id="b", do="restore", gpus=[0])
        assert (await running.record("result"))["state"] == "done"
        assert nvml.limits()[0] == 700000
        running.send(id="c", do="restore", gpus=[1])
        assert "holds nothing" in (await running.record("result"))["reason"]
        running.send(do="nonsense", id="d")
        assert "cannot do 'nonsense'" in (await running.record("result"))["reason"]


async def test_a_clock_is_locked_seen_to_come_down_and_let_go(nvml: FakeNvml) -> None:
    async with probe(nvml) as running:
        running.send(id="a", do="clock_lock", gpus={"0": 1200}, lease_s=60)
        result = await running.record("result")
        assert result["gpus"]["0"] == {"before_mhz": None, "asked_mhz": 1200, "now_mhz": 1200}
        assert nvml.limits("lock") == {0: 1200}
        running.send(id="b", do="restore", what="clock", gpus=[0])
        assert (await running.record("result"))["state"] == "done"
        assert nvml.limits("lock") == {0: 0}
        running.send(id="c", do="clock_lock", gpus={"1": 1300}, lease_s=0.3)
        await running.record("result")
        assert (await running.record("released"))["what"] == "clock"
    assert nvml.limits("lock") == {0: 0, 1: 0}


@pytest.mark.parametrize(
    ("readings", "mhz", "says"),
    [
        ({}, 2500, "2500 MHz is outside the 1 to 1980 MHz"),
        ({"gpu0_clock_set": "!3"}, 1200, "cannot lock its clock"),
        ({"gpu0_clock_set": "!4"}, 1200, "nvidia-smi -i * -lgc *"),
        ({"gpu0_clock_set": "ignored"}, 1200, "took a lock at 1200 MHz and the clock still is 1755 MHz"),
    ],
)
async def test_a_clock_that_is_not_locked_is_told(
    nvml: FakeNvml, readings: dict[str, str], mhz: int, says: str
) -> None:
    nvml.write(**readings)
    async with probe(nvml) as running:
        running.send(id="x", do="clock_lock", gpus={"0": mhz}, lease_s=60)
        result = await running.record("result")
        assert result["state"] == "failed"
        assert says in result["reason"]


@pytest.mark.parametrize("heir", [True, False])
async def test_a_probe_that_is_killed_gives_back_all_the_same(nvml: FakeNvml, heir: bool) -> None:
    """SIGKILL cannot be caught: its heir puts the limit back, or, when that died too, the next probe does."""
    nvml.overrule(0, 650000)
    async with probe(nvml) as running:
        running.send(id="a", do="power_limit", gpus={"0": 500}, lease_s=600)
        running.send(id="b", do="clock_lock", gpus={"1": 1200}, lease_s=600)
        await running.record("result")
        await running.record("result")
        children = _children(running.process.pid)
        assert len(children) == 1
        if not heir:
            os.kill(int(children[0]), signal.SIGKILL)
        running.process.kill()
        await running.process.wait()
        if not heir:
            assert nvml.limits()[0] == 500000
            async with probe(nvml, node="another") as later:
                await later.record("tick")
        await until(lambda: (nvml.limits()[0], nvml.limits("lock")[1]) == (650000, 0))


async def test_what_is_set_after_the_heir_was_killed_is_noted_all_the_same(nvml: FakeNvml) -> None:
    async with probe(nvml, node="first") as running:
        await running.record("tick")
        (heir,) = _children(running.process.pid)
        os.kill(int(heir), signal.SIGKILL)
        await until(lambda: _state(int(heir)) == "Z")
        for gpu in ("0", "1"):
            running.send(id=gpu, do="power_limit", gpus={gpu: 500}, lease_s=600)
            assert (await running.record("result"))["state"] == "done"
        running.send(id="back", do="restore", gpus=[1])
        assert (await running.record("result"))["state"] == "done"
        running.process.kill()
        await running.process.wait()
        nvml.overrule(1, 500000)  # another's: the note names it no more
        async with probe(nvml, node="another") as later:
            await later.record("tick")
            assert (nvml.limits()[0], nvml.limits()[1]) == (700000, 500000)


async def test_what_a_killed_probe_had_set_is_not_what_was_before(nvml: FakeNvml) -> None:
    """Two consoles, one of which is killed with all that would give back for it: the other sets the same GPU, and what
    comes back at its end is what was there before both. A lock that it sets stays, too, whoever gives back late."""
    async with probe(nvml, node="first") as first, probe(nvml, node="second") as second:
        for do, value in (("power_limit", 600), ("clock_lock", 1200)):
            first.send(id=do, do=do, gpus={"0": value}, lease_s=600)
            assert (await first.record("result"))["state"] == "done"
        (heir,) = _children(first.process.pid)
        os.kill(int(heir), signal.SIGSTOP)  # late
        first.process.kill()
        await first.process.wait()
        for do, value in (("power_limit", 600), ("clock_lock", 1300)):
            second.send(id=do, do=do, gpus={"0": value}, lease_s=600)
            assert (await second.record("result"))["state"] == "done"
        os.kill(int(heir), signal.SIGCONT)
        await until(lambda: not Path(f"/proc/{heir}").exists() or _state(int(heir)) == "Z")
        assert (nvml.limits()[0], nvml.limits("lock")[0]) == (600000, 1300), "the late heir takes nothing from others"
    await until(lambda: (nvml.limits()[0], nvml.limits("lock")[0]) == (700000, 0))


async def test_a_console_that_comes_back_gives_back_what_its_killed_probe_held(nvml: FakeNvml) -> None:
    async with probe(nvml, node="same") as running:
        running.send(id="a", do="power_limit", gpus={"0": 500}, lease_s=600)
        await running.record("result")
        (heir,) = _children(running.process.pid)
        os.kill(int(heir), signal.SIGKILL)
        running.process.kill()
        await running.process.wait()
        async with probe(nvml, node="same") as later:
            await later.record("tick")
            assert nvml.limits()[0] == 700000
            later.send(id="b", do="power_limit", gpus={"0": 600}, lease_s=600)
            assert (await later.record("result"))["state"] == "done"
            later.send(id="c", do="power_limit", gpus={"1": 600}, lease_s=600)
            assert (await later.record("result"))["state"] == "done"
            assert (nvml.limits()[0], nvml.limits()[1]) == (600000, 600000), "its own note is no dead one's"
    await until(lambda: (nvml.limits()[0], nvml.limits()[1]) == (700000, 700000))


async def test_what_another_console_holds_is_left_to_it(nvml: FakeNvml) -> None:
    async with probe(nvml, node="first") as first, probe(nvml, node="second") as second:
        first.send(id="a", do="power_limit", gpus={"0": 500}, lease_s=60, operator="ann@desk")
        await first.record("result")
        second.send(id="b", do="power_limit", gpus={"0": 400, "1": 400}, lease_s=60, operator="guard@head")
        refused = await second.record("result")
        assert (refused["state"], refused["reason"]) == (
            "failed",
            "GPU 0 is held by ann@desk; it is to be undone there first",
        )
        first.send(id="c", do="restore", gpus=[0])
        await first.record("result")
        second.send(id="d", do="power_limit", gpus={"0": 400}, lease_s=60)
        assert (await second.record("result"))["state"] == "done"


async def test_a_stopped_process_goes_on_when_the_lease_ends(nvml: FakeNvml) -> None:
    """Only processes on this node's GPUs; whoever stopped them may die."""
    trainer = await asyncio.create_subprocess_exec(sys.executable, "-c", "import sys; sys.stdin.read()", stdin=-1)
    try:
        nvml.write(pid=trainer.pid, pid_memory=1 << 30)
        async with probe(nvml) as running:
            await running.record("processes")
            running.send(id="a", do="stop", pids=[trainer.pid], lease_s=60)
            assert (await running.record("result"))["state"] == "done"
            assert _state(trainer.pid) == "T"
            running.send(id="b", do="stop", pids=[os.getpid()], lease_s=60)
            assert "is not on a GPU of this node" in (await running.record("result"))["reason"]
            running.send(id="c", do="stop", pids=[trainer.pid])
            assert "for a time only" in (await running.record("result"))["reason"]
            running.process.kill()
            await running.process.wait()
        await until(lambda: _state(trainer.pid) == "S")
    finally:
        trainer.kill()
        await trainer.wait()


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_each_undo_is_one_step_back(nvml: FakeNvml) -> None:
    async with probe(nvml) as running:
        for number, watts in enumerate((650, 600, 500)):
            running.send(id=f"s{number}", do="power_limit", gpus={"0": watts}, lease_s=60)
            await running.record("result")
        for number, expected in enumerate((600, 650, 700)):
            running.send(id=f"u{number}", do="restore", gpus=[0])
            assert (await running.record("result"))["state"] == "done"
            assert nvml.limits()[0] == 1000 * expected
        running.send(id="none", do="restore", gpus=[0])
        assert "holds nothing" in (await running.record("result"))["reason"]


async def test_what_is_leased_is_not_made_permanent_over_it(nvml: FakeNvml) -> None:
    """It would lose what was before the lease."""
    async with probe(nvml) as running:
        running.send(id="a", do="power_limit", gpus={"0": 500}, lease_s=60)
        await running.record("result")
        running.send(id="b", do="power_limit", gpus={"0": 600})
        assert "undo that before it is made permanent" in (await running.record("result"))["reason"]
    assert nvml.limits() == {0: 700000}


async def test_a_probe_killed_while_it_sets_gives_back_what_it_had_set(nvml: FakeNvml) -> None:
    nvml.write(gpu1_clock_set="ignored")  # it is looked at for a second
    async with probe(nvml) as running:
        await running.record("tick")
        running.send(id="a", do="clock_lock", gpus={"0": 1200, "1": 1200}, lease_s=600)
        await until(lambda: nvml.limits("lock") == {0: 1200})
        running.process.kill()
        await running.process.wait()
        await until(lambda: nvml.limits("lock")[0] == 0)


async def test_a_board_is_known_by_its_uuid_whatever_its_index(nvml_library: Path, tmp_path: Path) -> None:
    """Programs of one node may see different GPUs, as containers do: index 0 of one is not index 0 of the other."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, other = FakeNvml(nvml_library, tmp_path / "a/r"), FakeNvml(nvml_library, tmp_path / "b/r")
    one.write()
    other.write()
    async with probe(one, node="one") as first, probe(other, node="other") as second:
        for running in (first, second):
            running.send(id="a", do="power_limit", gpus={"0": 500}, lease_s=600)
            assert (await running.record("result"))["state"] == "done"
        os.kill(int(_children(first.process.pid)[0]), signal.SIGKILL)
        first.process.kill()
        await first.process.wait()
    async with probe(other, node="third") as third:
        await third.record("tick")
        assert one.limits() == {0: 500000}, "not this one's to give back"
    async with probe(one, node="fourth") as fourth:
        await fourth.record("tick")
    assert (one.limits(), other.limits()) == ({0: 700000}, {0: 700000})
