"""The commands about heat: forecast, twin, and the fits of power, cooling and single GPUs."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from engine.control import heating
from engine.control.control import Control
from engine.control.events import Published
from engine.model.learn import Errors
from engine.profile import ProfileError, catalog
from tui.output import printed, progress, write
from tui.widgets.plot import sparkline

WIDE = 60


def calibrate(path: Path, out: Path, as_json: bool) -> int:
    """Fit power and cooling to measured readings, print each series with its errors, and write the profiles."""
    found = heating.calibrate(path, _fitting)
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


def learn(recording: Path, cluster: str | None, out: Path, as_json: bool) -> int:
    """Learn each GPU's thermal constants from a recording, print the errors of forecasts, and write the inventory."""
    if cluster is None:
        raise ProfileError("Whose recording it is is missing: --cluster C.")
    found = heating.learn_thermal(cluster, recording)
    written = write({out: found.text})
    told = {
        "gpus": found.gpus,
        "seconds": found.seconds,
        "profile": vars_of(found.before),
        "learned": vars_of(found.after),
        "written": written,
    }
    print(printed(told) if as_json else learned_text(told))
    return 0


def vars_of(errors: Errors) -> dict[str, float]:
    """Errors by name."""
    return {
        "one_step_k": errors.step_k,
        "minute_k": errors.minute_k,
        "minutes": errors.minutes,
        "inside_90": errors.inside,
    }


def learned_text(told: dict[str, Any]) -> str:
    """What was learned, to read."""
    lines = [
        f"{told['gpus']} GPUs over {told['seconds'] / 60:.1f} min, learned from the first 60 %; errors on the rest",
        f"{'':<24}{'next reading':>14}{'a minute later':>16}{'forecasts':>11}{'in the 90 % band':>18}",
    ]
    for name, label in (("profile", "from the profile"), ("learned", "from what was learned")):
        e = told[name]
        lines.append(
            f"{label:<24}{e['one_step_k']:>12.2f} K{e['minute_k']:>14.2f} K{e['minutes']:>11.0f}{e['inside_90']:>18.1%}"
        )
    return "\n".join([*lines, *(f"wrote {name}" for name in told["written"])])


def forecast(given: Any) -> int:
    """Print the next ten minutes of every GPU, from a recording or from watching the nodes."""
    cluster = catalog.cluster(given.cluster)
    if given.recording:
        watch = heating.replayed(cluster, Path(given.recording).expanduser())
        told = heating.forecast_json(cluster, watch, None, None)
    else:
        told = asyncio.run(_watched(given))
    print(printed(told) if given.json else forecast_text(told))
    return 0


async def _watched(given: Any) -> dict[str, Any]:
    from tui.start import control_of

    cluster = catalog.cluster(given.cluster)
    control = control_of(cluster, "margin", read_only=True)
    async with control.running():
        await follow(control, given.seconds)
        return heating.forecast_json(cluster, control.watch, *control.rack_and_load())


async def follow(control: Control, seconds: float, told: Callable[[], object] = lambda: None) -> None:
    """Follow the control for so long, without end for infinity; `told` is called with every snapshot."""
    ends = time.monotonic() + seconds
    events = control.events()
    while (left := ends - time.monotonic()) > 0:
        try:
            event = await asyncio.wait_for(anext(events), None if left == float("inf") else left)
        except TimeoutError:
            break
        if isinstance(event, Published):
            told()
            progress(_state(control, seconds, left))
    progress()


def _state(control: Control, seconds: float, left: float) -> str:
    live = sum(n.state.value == "live" for n in control.snapshot.nodes)
    end = "ctrl-c ends" if seconds == float("inf") else f"{left:.0f} s left"
    return f"{live} of {len(control.snapshot.nodes)} nodes live, {control.watch.watched_s:.0f} s watched, {end}"


def forecast_text(told: dict[str, Any]) -> str:
    """A row a GPU: now, in one and in ten minutes with the band, where it settles, and what is amiss."""
    at = {t: i for i, t in enumerate(told["times_s"])}
    one, ten = at[60.0], at[600.0]
    lines = [
        f"{told['cluster']}, watched for {told['watched_s']:.0f} s",
        f"  {'GPU':<12}{'now':>7}{'power':>8}{'in 1 min':>10}{'9 of 10':>12}{'in 10 min':>11}{'9 of 10':>12}"
        f"{'limit':>7}",
    ]
    for g in told["gpus"]:
        name = f"{g['node']}:{g['slot']}"
        if np.isnan(g["now_c"]):
            lines.append(f"  {name:<12}  nothing read")
            continue
        notes = []
        if np.isfinite(g["reaches_limit_s"]):
            notes.append(f"reaches {g['limit_c']:.0f} C in {g['reaches_limit_s']:.0f} s")
        if g["odd"]:
            notes.append(f"{g['hotter_than_explained_k']:.0f} K hotter than explained")
        if g["sensor"]:
            notes.append(f"its reading {g['sensor']}")
        bands = [f"{g['low'][i]:.0f}-{g['high'][i]:.0f}" for i in (one, ten)]
        lines.append(
            f"  {name:<12}{g['now_c']:>5.0f} C{g['power_w']:>6.0f} W{g['celsius'][one]:>8.0f} C{bands[0]:>12}"
            f"{g['celsius'][ten]:>9.0f} C{bands[1]:>12}{g['limit_c']:>5.0f} C"
            + (f"  {', '.join(notes)}" if notes else "")
        )
    t = told["throttling"]
    if t:
        cost = ""
        if t["step_s"] and t["slowed_step_s"]:
            cost = f"; the job's step goes from {t['step_s']:.2f} to {t['slowed_step_s']:.2f} s"
        lines.append(f"{len(t['gpus'])} GPUs will slow themselves, the first in {t['first_s']:.0f} s{cost}")
    return "\n".join(lines)


def twin(given: Any) -> int:
    """Print the course of a plan over some minutes, for one microbatch or for several."""
    sizes = given.microbatch or [None]
    rows = [
        heating.foreseen_json(heating.foreseen(given.model, given.cluster, given.plan, given.minutes, size))
        for size in sizes
    ]
    if given.json:
        print(printed(rows if given.microbatch else rows[0]))
    elif len(rows) == 1:
        print(course_text(rows[0], given.ascii))
    else:
        print(sweep_text(rows))
    return 0


def course_text(told: dict[str, Any], plain: bool) -> str:
    """A row a node, and lines over time."""
    lines = [
        f"{told['model']} on {told['cluster']}, {told['label']}, {told['minutes']:.0f} min from cold: step "
        f"{told['step_s']:.2f} s ({told['predicted_step_s']:.2f} s without heat), {told['tokens_per_s']:,.0f} "
        f"tokens/s, {told['energy_kwh']:.1f} kWh" + ("" if told["fits"] else "; it does not fit into memory"),
        f"  {'node':<10}{'hottest':>9}{'peak':>8}{'clock':>11}{'mean':>8}{'burst':>8}{'power-limited':>15}"
        f"{'heat-limited':>14}",
    ]
    for n in told["nodes"]:
        lines.append(
            f"  {n['node']:<10}{n['hottest_c']:>7.0f} C{n['peak_c']:>6.0f} C{n['clock_mhz']:>7.0f} MHz"
            f"{n['mean_w']:>6.0f} W{n['peak_w']:>6.0f} W{n['power_limited_share']:>15.0%}"
            f"{n['heat_limited_share']:>14.0%}"
        )
    for name, label, unit in (
        ("hottest_c", "hottest GPU", "C"),
        ("coolest_c", "coolest GPU", "C"),
        ("slowest_clock_mhz", "slowest clock", "MHz"),
        ("gpus_kw", "GPU power", "kW"),
        ("steps_s", "step", "s"),
    ):
        values = np.array(told[name])
        digits = 2 if unit in ("kW", "s") else 0
        span = f"{values.min():.{digits}f}-{values.max():.{digits}f} {unit}"
        lines.append(f"  {label:<14}{span:>18}  {sparkline(values, WIDE, plain=plain)}")
    return "\n".join(lines)


def sweep_text(rows: list[dict[str, Any]]) -> str:
    """A row a microbatch: what it buys and what it heats."""
    first = rows[0]
    lines = [
        f"{first['model']} on {first['cluster']}, {first['plan']}, {first['minutes']:.0f} min from cold",
        f"  {'microbatch':>10}{'fits':>6}{'step':>9}{'tokens/s':>12}{'mean':>8}{'burst':>8}{'hottest':>9}{'clock':>11}"
        f"{'power-limited':>15}{'heat-limited':>14}",
    ]
    for told in rows:
        nodes = told["nodes"]
        lines.append(
            f"  {told['microbatch']:>10}{'yes' if told['fits'] else 'no':>6}{told['step_s']:>7.2f} s"
            f"{told['tokens_per_s']:>12,.0f}{max(n['mean_w'] for n in nodes):>6.0f} W"
            f"{max(n['peak_w'] for n in nodes):>6.0f} W{max(n['hottest_c'] for n in nodes):>7.0f} C"
            f"{min(n['clock_mhz'] for n in nodes):>7.0f} MHz{max(n['power_limited_share'] for n in nodes):>15.0%}"
            f"{max(n['heat_limited_share'] for n in nodes):>14.0%}"
        )
    return "\n".join(lines)


def _fitting(name: str) -> None:
    if sys.stderr.isatty():
        print(f"fitting {name}", file=sys.stderr, flush=True)
