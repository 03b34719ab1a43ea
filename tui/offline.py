"""The commands that need no node: predict, validate, calibrate, reportcard. Tables to read, or JSON."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from engine.control import offline
from engine.model.predict import Prediction
from engine.plan.reportcard import Line
from engine.plan.validate import Errors, Row, Validation, errors
from engine.profile import ProfileError
from tui import heat
from tui.output import printed, progress, write

BAR = 48
PARTS = (
    ("compute_s", "matrix products", "█"),
    ("attention_s", "attention", "▓"),
    ("elementwise_s", "memory-bound rest", "▒"),
    ("exposed_comm_s", "communication seen", "░"),
    ("bubble_s", "pipeline bubble", "·"),
    ("optimizer_s", "optimizer", "o"),
    ("straggler_s", "stragglers", "s"),
    ("host_s", "host and data", "h"),
)


def predict(given: Any) -> int:
    """Print one prediction; exit status 0 whether it fits or not: that it does not is an answer."""
    asked = offline.prediction(given.model, given.cluster, given.plan)
    told = offline.prediction_json(asked)
    print(printed(told) if given.json else prediction_text(asked.found, told))
    return 0


def prediction_text(found: Prediction, told: dict[str, Any]) -> str:
    """A prediction to read: what, how long with its band, where the time goes, traffic, memory, power, advice."""
    b, s, parts = told["breakdown"], found.iteration_s, told["power_parts_w"]
    lines = [
        f"{told['model']} on {told['cluster']}, {found.plan.label()}: {found.gpus} GPUs, {found.dp} replicas, "
        f"{found.microbatches} microbatches a step",
        f"  step        {s:10.3f} s      {told['band'][0]:.3f} to {told['band'][1]:.3f} s "
        f"(four of five runs never seen in the fit fall within {found.confidence.band:.0%})",
        f"  tokens      {found.tokens_per_s:10,.0f} /s     {told['tokens_per_s_per_gpu']:,.0f} a GPU",
        f"  FLOP/s      {told['model_tflops_per_gpu']:10.0f} T      a GPU; MFU {found.mfu:.1%}; "
        f"with recompute {told['hardware_tflops_per_gpu']:.0f} T",
        f"  memory      {found.memory.total_gib:10.1f} GiB    of {found.capacity_gib:.1f}: "
        + (f"fits, {found.headroom_gib:.1f} free" if found.fits else f"does not fit by {-found.headroom_gib:.1f}"),
        f"  power       {found.power_w:10.0f} W      a GPU; {found.cluster_w / 1000:.1f} kW in all; "
        f"hottest GPU {found.temperature_c:.0f} C",
        f"              {told['burst_w']:10.0f} W      while kernels run; of the mean leakage {parts['leakage']:.0f}, "
        f"memory {parts['memory']:.0f}, core {parts['core']:.0f} W",
        f"  energy      {found.energy_j / 3.6e6:10.3f} kWh    a step; {found.tokens_per_joule:.2f} tokens/J, "
        f"{found.samples_per_kwh:.1f} samples/kWh, {found.cost_per_million_tokens:.3f} a million tokens",
        "",
        f"  [{bar([b[name] for name, _, _ in PARTS])}]",
    ]
    lines += [f"  {mark} {label:<20}{b[name]:10.4f} s {b[name] / s:6.1%}" for name, label, mark in PARTS if b[name]]
    if found.communication:
        lines += ["", "  traffic of one GPU a step      link       GB      times   reached   seconds"]
    for t in found.communication:
        lines.append(
            f"    {t.parallelism:<26} {t.link:<8}{t.bytes / 1e9:9.2f}{t.count:9.0f}{t.achieved_fraction:10.0%}"
            f"{t.seconds:10.4f}"
        )
    lines += ["", *(f"  {line}" for line in seats_text(told["placement"]))]
    lines += ["", *(f"  - {sentence}" for sentence in told["advice"])] if told["advice"] else []
    return "\n".join(lines)


def seats_text(seats: dict[str, Any]) -> list[str]:
    """Which nodes take which ranks, and over which links each parallelism talks."""
    spans = ", ".join(f"{name} over {link}" for name, link in seats["spans"].items())
    cooler = f", {seats['listed_c']:.0f} C in the order listed" if seats["listed_c"] - seats["hottest_c"] >= 0.5 else ""
    hosts = " ".join(seat["node"] for seat in seats["seats"])
    lines = [f"Hosts in rank order: {hosts} (hottest GPU {seats['hottest_c']:.0f} C{cooler})"]
    lines += [f"Links: {spans}"] if spans else []
    return [line for text in lines for line in textwrap.wrap(text, 116, subsequent_indent="  ")]


def bar(parts: list[float], width: int = BAR) -> str:
    """The parts as a bar of `width` cells, each at least drawn in proportion; every cell is filled."""
    total, out, done = sum(parts), "", 0.0
    for value, (_, _, mark) in zip(parts, PARTS, strict=True):
        done += value
        out += mark * (round(done / total * width) - len(out))
    return out


def validate(given: Any) -> int:
    """Print the comparison; exit status 1 when a row failed."""
    found = offline.validation(_file(given.runs))
    print(printed(offline.validation_json(found)) if given.json else validation_text(found))
    return 1 if found.failed else 0


def validation_text(found: Validation) -> str:
    """Every row, then the groups, memory and ranking."""
    lines = [f"{'run':<58}{'metric':<24}{'measured':>10}{'predicted':>11}{'error':>8}"]
    lines += [_row(row) for row in found.rows]
    lines += ["", f"{'by':<11}{'name':<76}{_heads()}"]
    lines += [f"{by:<11}{name[:75]:<76}{_errors(e)}" for by, name, e in found.groups]
    lines += [f"{'all':<11}{'time':<76}{_errors(errors(found.rows))}"]
    if found.memory:
        lines += [f"{'all':<11}{'memory':<76}{_errors(errors(found.memory))}", ""]
        lines += [_row(row) for row in found.memory]
    if found.ranking:
        lines += ["", f"{'plans of one model, ranked':<100}{'n':>4}{'tau':>7}{'regret':>8}"]
        lines += [f"{r.group[:99]:<100}{r.n:>4}{r.kendall_tau:>+7.2f}{r.regret:>8.1%}" for r in found.ranking]
        lines += ["", f"{'pairs':<11}{'ratio of the times of two of them':<76}{_errors(found.changes)}"]
    if found.failed:
        lines += ["", f"{len(found.failed)} rows failed:"]
        lines += [f"  {name}: {reason}" for name, reason in found.failed]
    return "\n".join(lines)


def calibrate(given: Any) -> int:
    """Fit, say what it was worth, and write the profile (or all of them). Exit status 1 when a row failed."""
    out = Path(given.output).expanduser()
    if given.heat:
        return heat.calibrate(_file(given.heat), out, given.json)
    if given.thermal:
        return heat.learn(_file(given.thermal), given.cluster, out, given.json)
    if not given.runs:
        raise ProfileError("What to fit to is missing: a file of runs, --heat FILE or --thermal RECORDING.")
    path = _file(given.runs)
    if given.hardware:
        fit = offline.calibrate_device(path, given.hardware, _progress)
        targets = {out: next(iter(fit.files.values()))}
    else:
        fit = offline.calibrate_all(path, _progress)
        targets = {out / name: text for name, text in fit.files.items()}
    summary = offline.fit_summary(fit)
    written = write(targets)
    print(printed({**summary, "written": written}) if given.json else fit_text(summary, written))
    return 1 if summary["failed"] else 0


def fit_text(summary: dict[str, Any], written: list[str]) -> str:
    """What a fit changed, to read."""
    lines = [f"{summary['n']} runs", f"{'':<12}{'median':>8}{'mean':>8}{'p90':>8}{'max':>8}"]
    for name, label in (("before", "before"), ("after", "after"), ("left_out", "left out")):
        e = summary[name]
        values = (e["median_abs_error"], e["mean_abs_error"], e["p90_abs_error"], e["max_abs_error"])
        lines.append(f"{label:<12}" + "".join(f"{v:>8.1%}" for v in values))
    lines += ["", f"{'source':<80}{'n':>4}{'after':>8}{'left out':>10}"]
    lines += [f"{s['source'][:79]:<80}{s['n']:>4}{s['after']:>8.1%}{s['left_out']:>10.1%}" for s in summary["sources"]]
    lines += ["", f"{'constant':<46}{'expected':>12}{'fitted':>12}"]
    lines += [
        f"{c['of'] + '.' + c['name']:<46}{c['expected']:>12.4g}{c['fitted']:>12.4g}" for c in summary["constants"]
    ]
    lines += [f"{f['id']} could not be used: {f['reason']}" for f in summary["failed"]]
    lines += ["", *(f"wrote {name}" for name in written)]
    return "\n".join(lines)


def reportcard(given: Any) -> int:
    """Print the report card."""
    lines = offline.report()
    if given.json:
        print(printed([{f: getattr(line, f) for f in line.__dataclass_fields__} for line in lines]))
    else:
        print("\n".join(card_text(line) for line in lines))
    return 0


def bench(given: Any) -> int:
    """Print how fast predictions or searches are."""
    from engine.control.bench import plans, predictions

    if given.what == "forecast":
        from tui import trials

        tried = trials.forecasts(given.seed)
        print(printed(tried) if given.json else trials.text(tried))
        return 0
    if given.what == "poll":
        from engine.control import bench_poll
        from tui.many import polled as poll_many

        polled = poll_many(given.nodes, given.seconds)
        print(printed(polled) if given.json else bench_poll.text(polled))
        return 0
    if given.what == "tui":
        from tui import tui_bench

        seen = tui_bench.measure(given.gpus, given.seconds)
        print(printed(seen) if given.json else tui_bench.text(seen))
        return 0
    if given.what == "soak":
        from tui import soak_bench

        grown = soak_bench.soaked(given.hours * soak_bench.HOUR_S)
        print(printed(grown) if given.json else soak_bench.text(grown))
        return 0
    if given.what == "guard":
        from tui import guard_bench

        hours = guard_bench.guarded()
        print(printed(hours) if given.json else guard_bench.text(hours))
        return 0
    if given.what == "hook":
        from tui import hook_bench

        cost = hook_bench.measured(given.seconds)
        print(printed(cost) if given.json else hook_bench.text(cost))
        return 0
    if given.what == "record":
        from engine.control import bench_record

        stored = bench_record.recorded(given.gpus)
        print(printed(stored) if given.json else bench_record.text(stored))
        return 0
    if given.what == "prometheus":
        from engine.control import bench_prometheus

        timed = bench_prometheus.reading(given.gpus)
        print(printed(timed) if given.json else bench_prometheus.text(timed))
        return 0
    found = plans() if given.what == "plans" else predictions()
    if given.json:
        print(printed(found))
    elif given.what == "plans":
        print(f"{found['plans']:,} plans in {found['seconds']:.2f} s: {found['plans_per_s']:,.0f} a second on one core")
        print(f"peak memory {found['peak_rss_mb']:.0f} MB")
    else:
        one, many = found["predict_ms"], found["columns"]
        print(f"one prediction    {one['median']:.2f} ms median, {one['p90']:.2f} ms 90th percentile")
        print(f"columns of plans  {many['plans_per_s']:,.0f} plans a second ({many['plans']:,} at once, one core)")
        print(f"peak memory       {found['peak_rss_mb']:.0f} MB")
    return 0


def card_text(line: Line) -> str:
    """One figure: claim, the model's value, verdict and why."""
    values = [f"claimed {_value(line.claimed)}"] if line.claimed is not None else []
    values += [f"model {_value(line.value)}"] if line.value is not None else []
    values += [line.unit] if line.unit else []
    text = f"{line.id:<15}{line.verdict.upper()}\n    {line.claim}"
    text += f"\n    {'; '.join(values)}" if values else ""
    return text + (f"\n    {line.why}" if line.why else "")


def _row(row: Row) -> str:
    head = f"{row.id[:57]:<58}{row.metric:<24}"
    return f"{head}{row.measured:>10.5g}{row.predicted:>11.5g}{row.error:>+8.1%}"


def _value(value: float | str | None) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else str(value)


def _heads() -> str:
    return f"{'n':>5}{'median':>8}{'mean':>8}{'p90':>8}{'max':>8}"


def _errors(e: Errors) -> str:
    if not e.n:
        return f"{0:>5}" + f"{'-':>8}" * 4
    return f"{e.n:>5}" + "".join(f"{v:>8.1%}" for v in (e.median, e.mean, e.p90, e.max))


def _progress(name: str, number: int, of: int) -> None:
    progress("" if number == of else f"left out {number} of {of}: {name}")


def _file(name: str) -> Path:
    path = Path(name).expanduser()
    if not path.is_file():
        raise ProfileError(f"There is no file {path} to read runs from.")
    return path
