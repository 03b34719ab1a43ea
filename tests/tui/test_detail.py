"""The selected GPU: a number, or the word for why there is none."""

from __future__ import annotations

import json
from pathlib import Path

from engine.telemetry.reading import decode
from tests.parts.still import still
from tui.widgets.detail import detail


def test_what_is_not_read_is_a_word_and_never_a_number(tmp_path: Path) -> None:
    control = still(tmp_path).control
    name, words = control.cluster.nodes[0].name, ["unsupported"] + ["error"] * 7
    tick = {"tick": 99, "time": 1.0, "gpus": {"power_w": words, "utilization_pct": words, "temperature_c": [2112] * 8}}
    control.store.apply(name, decode(json.dumps(tick).encode()), control.snapshot.time)  # type: ignore[arg-type]
    snapshot = control.store.publish(control.snapshot.time)
    lines = detail(control.cluster, snapshot, 0, 0, {}, 60, plain=True).plain.splitlines()
    shown = {line[:12].strip(): line[12:23].strip() for line in lines}
    assert (shown["Temperature"], shown["Power"], shown["Utilisation"]) == ("implausible", "unsupported", "unsupported")
