"""The twin at work beside real and made-up sensors: alarms before a throttle, evidence, and commands around them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from engine.act.alarm import Priority
from engine.control import heating
from engine.control.control import Control
from engine.control.watch import Watch
from engine.model import thermal
from engine.model.limiter import Demand
from engine.profile import Cluster, ProfileError, catalog
from engine.record import reading
from engine.sim.fine import FineRack
from tests.parts.console import console
from tests.parts.nvml import FakeNvml
from tests.parts.still import still
from tests.parts.waiting import until
from tui.cli import main


def climbing(watch: Watch, seconds: int, start_s: int = 0) -> None:
    """Every GPU as its profile has it, but GPU 5 of n04, which has a hotter sink and heads for 95 C."""
    chassis, n = watch.boards.chassis, len(watch.boards.operating_c)
    watts, limit = np.full(n, 600.0), np.full(n, 700.0)
    settled = thermal.steady(chassis, watts).junction_c
    for second in range(start_s, start_s + seconds):
        celsius = settled.copy()
        celsius[29] = 95.0 - 40.0 * np.exp(-second / 60.0)
        watch.take(np.round(celsius), watts, limit, 1.0)


def test_a_throttle_is_an_alarm_before_it_happens(tmp_path: Path) -> None:
    control = still(tmp_path).control
    control.watch = Watch(control.cluster)
    climbing(control.watch, 70)
    coming = [a for a in control.amiss() if a.key.startswith("coming:")]
    assert [a.key for a in coming] == ["coming:n04:5"]
    assert coming[0].priority is Priority.WARNING
    assert coming[0].text.startswith("n04 GPU 5 reaches 87 C in ")
    seconds = float(coming[0].text.split(" in ")[1].split(" s")[0])
    assert 20 < seconds < 80  # 87 C comes at 97 s
    assert "and will slow down; the job's step would go from 2.61 to " in coming[0].text
    assert control.snapshot.nodes[3].rows[5] == coming[0].row


def test_a_node_that_stays_hot_is_to_be_drained(tmp_path: Path) -> None:
    """In the still console heat holds GPU 5 of n04: not worth a word for five minutes, and for nine it is."""
    control = still(tmp_path).control
    for seconds, keys in ((300, []), (240, ["drain:n04"])):
        for _ in range(seconds):
            control.watch.look(control.snapshot, 1.0)
        found = [a for a in control.amiss() if a.key.startswith("drain:")]
        assert [a.key for a in found] == keys
    assert "heat held GPU 5 for 59% of the last ten minutes" in found[0].text
    assert found[0].text.endswith("drain it: rackside plan --without n04")


def test_many_gpus_of_one_node_are_one_alarm(tmp_path: Path) -> None:
    control = still(tmp_path).control
    watch = control.watch = Watch(control.cluster)
    n = len(watch.boards.operating_c)
    settled = thermal.steady(watch.boards.chassis, np.full(n, 600.0)).junction_c
    for second in range(70):
        celsius = settled.copy()
        celsius[8:16] = 95.0 - 40.0 * np.exp(-second / 60.0)
        watch.take(np.round(celsius), np.full(n, 600.0), np.full(n, 700.0), 1.0)
    coming = [a for a in control.amiss() if a.key.startswith("coming:")]
    assert [a.key for a in coming] == ["coming:n02:many"]
    assert coming[0].text.startswith("n02: 8 GPUs, GPU ")


def test_a_gpu_hotter_than_it_should_be_comes_with_its_neighbours(tmp_path: Path) -> None:
    control = still(tmp_path).control
    watch = control.watch = Watch(control.cluster)
    n = len(watch.boards.operating_c)
    settled = thermal.steady(watch.boards.chassis, np.full(n, 600.0)).junction_c
    settled[29] += 14
    for _ in range(180):
        watch.take(np.round(settled), np.full(n, 600.0), np.full(n, 700.0), 1.0)
    (odd,) = [a for a in control.amiss() if a.key.startswith("odd:")]
    assert odd.text.startswith(
        "n04 GPU 5 settles 14 K hotter than its power and air explain; its neighbours stay within "
    )
    assert odd.priority is Priority.NOTICE


def test_a_sensor_that_lies_is_named(tmp_path: Path) -> None:
    control = still(tmp_path).control
    watch = control.watch = Watch(control.cluster)
    n = len(watch.boards.operating_c)
    settled = thermal.steady(watch.boards.chassis, np.full(n, 500.0)).junction_c
    for _ in range(60):
        watch.take(np.round(settled), np.full(n, 500.0), np.full(n, 700.0), 1.0)
    settled[2] = 255.0
    watch.take(settled, np.full(n, 500.0), np.full(n, 700.0), 1.0)
    (lie,) = [a for a in control.amiss() if a.key.startswith("sensor:")]
    assert lie.text.startswith("n01 GPU 2: its temperature reading is out of range (255 C; the twin has ")


def test_a_proposal_carries_the_band_of_its_hottest_gpu(tmp_path: Path) -> None:
    control: Control = still(tmp_path).control
    proposal = control.propose_throttle("n04", [(3, slot) for slot in range(8)], 250.0)
    assert proposal.after.peak_band_c is not None
    low, high = proposal.after.peak_band_c
    assert low < high
    held = control.watch.forecast(proposal.after.gpu_w)
    assert held.celsius[24:, -1].max() < control.watch.forecast().celsius[24:, -1].max() - 5


async def test_a_node_is_forecast_and_recorded_over_ssh(
    inventory: Path, nvml: FakeNvml, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with console(inventory) as c:
        await c.live()
        await until(lambda: c.control.watch.watched_s > 1)
        told = heating.forecast_json(c.control.cluster, c.control.watch, *c.control.rack_and_load())
        assert told["gpus"][0]["now_c"] == pytest.approx(61, abs=1.5)
        assert told["gpus"][0]["power_w"] == pytest.approx(512.34, abs=1)
    path = tmp_path / "run.rks"
    command = ["record", "--cluster", str(inventory), "-o", str(path), "--seconds", "6"]
    assert await asyncio.to_thread(main, command) == 0
    found = reading.read(path)
    assert len(found.times) > 5
    assert np.nanmax(found.metrics["temperature_c"]) == 61
    assert np.nanmax(found.metrics["power_w"]) == pytest.approx(512.3)
    capsys.readouterr()
    assert await asyncio.to_thread(main, ["forecast", "--cluster", str(inventory), "--recording", str(path)]) == 0
    assert "n1:0" in capsys.readouterr().out
    live = ["forecast", "--cluster", str(inventory), "--seconds", "4", "--json"]
    assert await asyncio.to_thread(main, live) == 0
    assert json.loads(capsys.readouterr().out)["watched_s"] > 0
    learned = tmp_path / "learned.yaml"
    words = ["calibrate", "--thermal", str(path), "--cluster", str(inventory), "-o", str(learned)]
    assert await asyncio.to_thread(main, words) == 0
    assert "a minute later" in capsys.readouterr().out
    assert catalog.cluster(str(learned)).nodes[0].learned is not None
    assert await asyncio.to_thread(main, command) == 2
    assert "never written over" in capsys.readouterr().err


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """An inventory of one node, as a user has it."""
    path = tmp_path / "one.yaml"
    path.write_text("name: one\nnodes:\n  - {name: n01, type: hgx-h100}\ninlet: {bottom_c: 25}\n")
    return path


def traced(cluster: Cluster, path: Path, seconds: int = 900) -> FineRack:
    """A CSV of a rack that is unlike its profile."""
    rack, lines = FineRack(cluster, np.random.default_rng(5)), ["time,gpu,power,temperature"]
    for second in range(seconds):
        if second % 200 == 30:
            level = (0.9, 0.5, 1.0, 0.6, 0.8)[second // 200 % 5]
            rack.demand = Demand(np.full(8, level), np.full(8, 0.92))
        rack.advance(1.0)
        celsius, watts = rack.read()
        lines += [f"{second},n01:{slot},{watts[slot]:.1f},{celsius[slot]:.0f}" for slot in range(8)]
    path.write_text("\n".join(lines) + "\n")
    return rack


def test_constants_are_learned_from_a_csv_and_forecasts_get_better(
    single: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = tmp_path / "trace.csv", tmp_path / "learned.yaml"
    rack = traced(catalog.cluster(str(single)), trace)
    command = ["calibrate", "--thermal", str(trace), "--cluster", str(single), "-o", str(out)]
    assert main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["gpus"] == 8
    assert told["learned"]["minute_k"] <= told["profile"]["minute_k"] + 0.05
    assert told["learned"]["minute_k"] < 1.3  # readings scatter by 1 K themselves
    assert told["learned"]["one_step_k"] < 1.2
    learned = thermal.chassis_of(catalog.cluster(str(out)))
    built = thermal.chassis_of(catalog.cluster(str(single)))
    truth = rack.boards.chassis
    # The rack's own fans and memory put a common factor on all; how GPUs differ from one another is what is learned.
    apart = [np.log((c.r_sink + c.r_die) / (truth.r_sink + truth.r_die)).std() for c in (learned, built)]
    assert apart[0] < 0.5 * apart[1]
    assert main(command) == 0
    assert "a minute later" in capsys.readouterr().out
    assert main(["profiles", "cluster", str(out)]) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["calibrate", "-o", "x"], "What to fit to is missing"),
        (["calibrate", "--thermal", "TRACE", "-o", "x"], "Whose recording it is is missing"),
        (["calibrate", "--thermal", "none.csv", "--cluster", "ONE", "-o", "x"], "There is no file none.csv"),
        (["forecast", "--cluster", "ONE", "--recording", "none.rks"], "There is no file none.rks"),
        (["record", "--cluster", "ONE", "-o", "x.rks"], "n01 has no address"),
        (["twin", "--plan", "compute-bound", "--cluster", "h200x32"], "needs 64 GPUs"),
    ],
)
def test_mistakes_are_sentences(
    single: Path, tmp_path: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.csv"
    short.write_text("time,gpu,power,temperature\n0,0,500,60\n")
    named = {"ONE": str(single), "TRACE": str(short)}
    assert main([named.get(word, word) for word in words]) == 2
    assert says in capsys.readouterr().err
    with pytest.raises(ProfileError, match="too few to learn from"):
        heating.learn_thermal(str(single), short)


def test_twin_offline(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["twin", "--plan", "data-parallel", "--cluster", "h200x32-hot", "--minutes", "5"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["nodes"][3]["hottest_c"] > told["nodes"][0]["hottest_c"] + 8
    assert len(told["times_s"]) == len(told["hottest_c"]) == 31
    assert main([*words, "--ascii"]) == 0
    text = capsys.readouterr().out
    assert "hottest GPU" in text
    assert text.isascii()
    assert main([*words, "--microbatch", "1,2,4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["microbatch"] for row in rows] == [1, 2, 4]
    assert rows[2]["nodes"][3]["hottest_c"] > rows[0]["nodes"][3]["hottest_c"]
    assert main([*words, "--microbatch", "1,2"]) == 0
    assert "heat-limited" in capsys.readouterr().out


def test_bench_forecast_says_everything(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from tui import trials

    monkeypatch.setattr(trials, "RACKS", 1)
    monkeypatch.setattr(trials, "WARNED", 1)
    assert main(["bench", "forecast", "--json", "--seed", "3"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"mae_60s_steady_c", "mae_60s_step_c", "coverage_90", "announced", "missed", "false_announced"} <= set(told)
    assert told["step_ms_8192"] > 0
    assert told["seed"] == 3
    assert msgspec.json.encode(told)
