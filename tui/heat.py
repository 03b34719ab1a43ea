"""The commands about heat: tables to read, or JSON."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from engine.control import heating


def calibrate(path: Path, out: Path, as_json: bool) -> int:
    """Fit power and heat to measured readings, print each series with its errors, and write the profiles."""
    from tui.offline import printed, write

    found = heating.calibrate(path, _progress)
    told = heating.fit_json(found)
    written = write({out / name: text for name, text in found.files.items()})
    print(printed({**told, "written": written}) if as_json else fit_text(told, written))
    return 0


def fit_text(told: dict[str, Any], written: list[str]) -> str:
    """What was fitted, to read."""
    lines = [f"{'series':<48}{'n':>4}{'largest':>9}{'left out: mean':>16}{'largest':>9}"]
    for s in told["series"]:
        kelvin = s["name"].endswith("GPU")
        values = (s["max_error"], s["left_out_mean"], s["left_out_max"])
        of = [f"{v:.1f} K" if kelvin else f"{v:.1%}" for v in values]
        lines.append(f"{s['name']:<48}{s['n']:>4}{of[0]:>9}{of[1]:>16}{of[2]:>9}")
    lines += ["", f"{'constant':<48}{'fitted':>12}"]
    for group in ("power", "cooling"):
        for owner, values in told[group].items():
            lines += [f"{owner + '.' + name:<48}{value:>12.4g}" for name, value in values.items()]
    lines += [f"{owner + '.fan.least':<48}{value:>12.4g}" for owner, value in told["fan_least"].items()]
    lines += [f"{owner + '.host_w':<48}{value:>12.4g}" for owner, value in told["host_w"].items()]
    return "\n".join([*lines, "", *(f"wrote {name}" for name in written)])


def _progress(name: str) -> None:
    if sys.stderr.isatty():
        print(f"fitting {name}", file=sys.stderr, flush=True)
