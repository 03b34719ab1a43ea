"""`rackside bench hook`, shortly: that it runs and what it tells, not how fast this machine is."""

from __future__ import annotations

import json
import subprocess
import sys

from engine.control.bench_hook import command_ms


def test_it_tells_what_the_hook_costs() -> None:
    command = [sys.executable, "-m", "tui.cli", "bench", "hook", "--seconds", "3", "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert 0 < found["idle_us_per_step"] <= found["idle_us_p99"] < 1e5
    assert 0 < found["idle_us_per_step_group"] <= found["idle_us_group_p99"] < 1e6
    assert 0 < found["idle_us_per_step_apart"] <= found["idle_us_apart_p99"] < 1e6
    for ranks in ("", "_group", "_apart"):
        assert 0 < found["attached_fraction" + ranks] < 1
    for key in ("command_ms", "command_ms_apart"):
        assert found[key]["commands"] > 0
        assert 0 < found[key]["p50"] <= found[key]["p99"] < 10_000
    assert min(found["steps"].values()) > 0


def test_the_wait_for_the_steps_end_is_left_out() -> None:
    """Pressed at 10.0, in the job at 10.002; the last rank comes to step 7 at 10.5, and has it at 10.501."""
    found = command_ms({"a": (10.0, 7), "lost": (11.0, 9)}, {"a": 10.002}, {7: (10.5, 10.501)})
    assert found["commands"] == 1
    assert abs(found["p50"] - 3.0) < 1e-6
