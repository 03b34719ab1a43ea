"""`rackside report`: a recording as one page to send: plots, alarms, actions and what came of them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from engine.act.action import Stage
from engine.profile import ProfileError
from engine.record.reading import Reader, Series, Story, Told
from engine.record.schema import RecordError
from tui.chart import Floats, chart
from tui.output import write
from tui.widgets.figures import DASH, age, number

STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --dim: #667079; --paper: #fff; --rule: #dde1e5; --line: #0b6bcb; --mark: #d9480f; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ea; --dim: #98a2ab; --paper: #14181b; --rule: #2d343a; --line: #6cb2ff; --mark: #ff9e5e; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
p { margin: .3rem 0; } .dim { color: var(--dim); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; overflow-wrap: anywhere; }
th { color: var(--dim); font-weight: normal; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: var(--dim); }
.grid { stroke: var(--rule); } .line { fill: none; stroke: var(--line); stroke-width: 1.6; stroke-linejoin: round; }
.dot { fill: var(--line); } .mark { stroke: var(--mark); stroke-dasharray: 4 3; stroke-width: 1.5; }
@media print { body { margin: 0; max-width: none; } h2 { break-after: avoid; } svg, tr { break-inside: avoid; } }
"""  # noqa: E501
EFFECTS = (("step_s", "step", "s", 2, 1.0), ("peak_c", "hottest", "C", 1, 1.0), ("power_w", "power", "kW", 1, 1e-3))


def report(given: Any) -> int:
    """Read, write the page, say where it is."""
    path, out = Path(given.recording).expanduser(), Path(given.output).expanduser()
    try:
        with Reader(path) as reader:
            series = reader.window(reader.start, math.inf, ("temperature_c", "power_w"))
            told = reader.story()
    except RecordError as error:
        raise ProfileError(str(error)) from None
    print("wrote " + ", ".join(write({out: page(path.name, series, told)})))
    return 0


def page(name: str, series: Series, told: Story) -> str:
    """The whole page. Whatever came from nodes, jobs and people is escaped."""
    actions = _last_of_each(told.of("ticket"))
    marks = [(float(_figure(a.data.get("time")) or a.time), str(a.data.get("title", "action"))) for a in actions]
    body = [
        _head(name, series, told),
        *_section("Hottest GPU", _hottest(series, marks)),
        *_section("Power of all GPUs", _power(series, marks)),
        *_section("Step time", _steps(told, marks)),
        *_section("Alarms", _alarms(told)),
        *_section("Actions and their effect", _actions(actions)),
    ]
    title = escape(f"{told.cluster or name}: rackside report")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = (
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{STYLE}</style>'
    )
    return "\n".join(["<!doctype html>", f'<html lang="en"><head>{head}</head><body>', *body, "</body></html>", ""])


def _section(title: str, body: str) -> tuple[str, str]:
    return f"<h2>{escape(title)}</h2>", body


def _head(name: str, series: Series, told: Story) -> str:
    begin, end = float(series.times[0]), float(series.times[-1])
    nodes = len({node for node, _ in series.gpus})
    when = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(begin))
    facts = f"{nodes} nodes, {len(series.gpus)} GPUs; {age(end - begin)} from {when}; recording {name}"
    return f'<h1>{escape(told.cluster or name)}</h1><p class="dim">{escape(facts)}</p>'


def _hottest(series: Series, marks: Sequence[tuple[float, str]]) -> str:
    celsius = series.metrics["temperature_c"]
    if np.isnan(celsius).all():
        return _nothing("No temperature was recorded.")
    row = int(np.nanargmax(np.where(np.isnan(celsius), -np.inf, celsius).max(axis=0)))
    node, slot = series.gpus[row]
    peak = _largest(celsius)
    words = f"At most {np.nanmax(peak):.0f} C, on {node} GPU {slot}."
    return f"<p>{escape(words)}</p>{chart(series.times, peak, 'C', marks, peak=True)}{_legend(marks)}"


def _power(series: Series, marks: Sequence[tuple[float, str]]) -> str:
    watts = series.metrics["power_w"]
    if np.isnan(watts).all():
        return _nothing("No power was recorded.")
    read = ~np.isnan(watts).all(axis=1)
    total = np.where(read, np.nansum(watts, axis=1), np.nan) / 1000
    missing = np.isnan(watts).any()
    words = f"{np.nanmean(total):.1f} kW in the mean, {np.nanmax(total):.1f} kW at most."
    words += " GPUs whose power was not read are not in the sum." if missing else ""
    return f"<p>{escape(words)}</p>{chart(series.times, total, 'kW', marks)}{_legend(marks)}"


def _steps(told: Story, marks: Sequence[tuple[float, str]]) -> str:
    """A plot a job."""
    jobs: dict[str, list[tuple[float, float]]] = {}
    for event in told.of("step"):
        seconds = _figure(event.data.get("step_s"))
        if seconds is not None:
            jobs.setdefault(event.subject, []).append((event.time, seconds))
    if not jobs:
        return _nothing("No step of a job is in this recording.")
    names = {event.subject: str(event.data.get("name") or event.subject) for event in told.of("job")}
    out = []
    for key, points in jobs.items():
        times, values = np.array([p[0] for p in points]), np.array([p[1] for p in points])
        words = (
            f"{names.get(key, key or 'job')}: {np.median(values):.2f} s in the median, {values.max():.2f} s at most."
        )
        out.append(f"<p>{escape(words)}</p>{chart(times, values, 's', marks, peak=True)}")
    return "".join(out) + _legend(marks)


def _alarms(told: Story) -> str:
    events = told.of("alarm")
    if not events:
        return _nothing("No alarm is in this recording.")
    rows = []
    for event in events:
        data = event.data
        by = " ".join(str(data.get(key) or "") for key in ("by", "reason")).strip()
        rows.append((_clock(event.time), str(data.get("what", "")), str(data.get("text") or data.get("key", "")), by))
    return _table(("time", "what", "alarm", "by"), rows)


def _actions(actions: Sequence[Told]) -> str:
    if not actions:
        return _nothing("No action is in this recording.")
    rows = []
    for event in actions:
        data, stage = event.data, str(event.data.get("stage", ""))
        how = " ".join(part for part in (stage, str(data.get("reason") or "")) if part)
        predicted = data.get("predicted")
        before, after = (_part(predicted, key) for key in ("before", "after"))
        rows.append(
            (
                _clock(_figure(data.get("time")) or event.time),
                str(data.get("title", "")),
                how,
                _effect(before),
                _effect(after),
                _effect(_part(data, "measured")) if stage == Stage.DONE.value else "",
                str(data.get("operator", "")),
            )
        )
    return _table(("time", "action", "came to", "before", "predicted", "measured", "by"), rows)


def _last_of_each(tickets: Iterable[Told]) -> list[Told]:
    """The last word on each action."""
    last: dict[str, Told] = {}
    for event in tickets:
        last[str(event.data.get("id") or event.subject)] = event
    return list(last.values())


def _part(data: object, key: str) -> Mapping[str, Any]:
    found = data.get(key) if isinstance(data, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _effect(outlook: Mapping[str, Any]) -> str:
    parts = []
    for key, name, unit, digits, scale in EFFECTS:
        value = _figure(outlook.get(key))
        if value is not None:
            parts.append(f"{name} {number(value * scale, digits, unit)}")
    return ", ".join(parts) or DASH


def _figure(value: object) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None  # type: ignore[arg-type]


def _largest(values: Floats) -> Floats:
    """Of each moment, NaN where nothing was read."""
    filled = np.where(np.isnan(values), -np.inf, values).max(axis=1)
    return np.where(np.isinf(filled), np.nan, filled)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"


def _legend(marks: Sequence[tuple[float, str]]) -> str:
    return '<p class="dim">Dashed: actions.</p>' if marks else ""


def _nothing(sentence: str) -> str:
    return f'<p class="dim">{escape(sentence)}</p>'


def _clock(moment: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(moment))
