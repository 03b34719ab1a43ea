"""The commands plan and compare: tables and bars to read, JSON and CSV for programs."""

from __future__ import annotations

import csv
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from engine.control import offline, planning
from engine.control.planning import Answer, Question
from engine.model.predict import Prediction
from engine.plan.export import to_yaml
from engine.plan.search import Ranked
from engine.plan.sweep import Size
from tui.offline import PARTS, bar, prediction_text, seats_text
from tui.output import printed, progress

FRONT = 20
"""Plans of a front that are printed to read."""
COLUMNS = (
    ("step s", "iteration_s", "{:.3f}"),
    ("tok/s", "tokens_per_s", "{:,.0f}"),
    ("tok/J", "tokens_per_joule", "{:.2f}"),
    ("$/Mtok", "cost_per_million_tokens", "{:.3f}"),
    ("MFU", "mfu", "{:.1%}"),
    ("GiB", "memory_gib", "{:.1f}"),
    ("free", "headroom_gib", "{:.1f}"),
    ("C", "temperature_c", "{:.0f}"),
    ("W", "power_w", "{:.0f}"),
    ("bubble", "bubble_share", "{:.0%}"),
    ("comm", "communication_share", "{:.0%}"),
)


def plan(given: Any) -> int:
    """Search and print; exit status 1 when nothing was left on any cluster."""
    question = Question(
        model=given.model,
        clusters=tuple(given.cluster),
        objective=given.objective,
        where=tuple(given.where),
        pareto=tuple(name for name in (given.pareto or "").split(",") if name),
        top=given.top,
        batch=given.batch,
        sequence=given.sequence,
        precision=given.precision,
        stack=given.stack,
        power_limits_w=tuple(given.power_limit),
        without=tuple(given.without),
        gpus=given.gpus,
    )
    answers = planning.plans(question, _progress if sys.stderr.isatty() else None)
    progress()
    if given.json:
        print(printed(planning.answers_json(answers)))
    elif given.csv:
        _csv(answers)
    else:
        print("\n\n".join(answer_text(answer) for answer in answers))
    return 0 if any(a.found.plans for a in answers) else 1


def answer_text(answer: Answer) -> str:
    """One cluster's best plans, and what was tried."""
    found = answer.found
    rate = f"{found.tried:,} plans in {found.seconds:.2f} s"
    lines = [f"{answer.cluster}, {answer.gpus} GPUs: {rate}" + ("" if found.complete else ", interrupted")]
    if answer.missing:
        lines.append(f"  without {', '.join(answer.missing)}: planned on what is left")
    if found.empty:
        lines.append(f"  {found.empty}")
        if found.nearest:
            lines += ["  Nearest to holding:", _heads(), _line("", found.nearest)]
        return "\n".join(lines)
    lines += [_heads(), *(_line(f"#{place}", one) for place, one in enumerate(found.plans, 1))]
    if answer.seats:
        lines += [f"  {line}" for line in seats_text(asdict(answer.seats))]
    if found.front:
        lines += ["  Pareto front:", _heads(), *(_line("", one) for one in found.front[:FRONT])]
        more = len(found.front) - FRONT
        lines += [f"  and {more} more on the front: --json has them all"] if more > 0 else []
    return "\n".join(lines)


def sweep(given: Any) -> int:
    """Print which cluster leads at each model size, and where the lead changes hands."""
    question = Question(
        model="",
        clusters=tuple(given.cluster),
        where=tuple(given.where),
        top=1,
        batch=given.batch,
        precision=given.precision,
        stack=given.stack,
    )
    sizes = planning.sweep(question)
    if given.json:
        told = [
            {
                "billions": size.billions,
                "leader": size.leader,
                "best": {name: planning.ranked_json(one) if one else None for name, one in size.best.items()},
            }
            for size in sizes
        ]
        print(printed(told))
    else:
        print(sweep_text(sizes, given.cluster))
    return 0


def sweep_text(sizes: Sequence[Size], clusters: Sequence[str]) -> str:
    """A row a size: tokens/s a GPU and the best plan of each cluster; then each change of the lead."""
    lines = [f"{'weights':>9}" + "".join(f"  {name[:34]:>34}" for name in clusters) + "  ahead per GPU"]
    for size in sizes:
        cells = []
        for name in clusters:
            one = size.best.get(name)
            text = "nothing fits"
            if one:
                text = f"{one.metrics['tokens_per_s_per_gpu']:,.0f} {planning.label(one.plan)[:26]}"
            cells.append(f"  {text:>34}")
        lines.append(f"{size.billions:>8.1f}B{''.join(cells)}  {size.leader}")
    lines += ["", "Each cell: tokens/s a GPU, and the plan that reaches it."]
    leaders = {size.leader for size in sizes if size.leader}
    if len(leaders) == 1:
        lines.append(f"{leaders.pop()} leads per GPU at every size that fits.")
    fitting = [size for size in sizes if size.leader]
    for small, large in pairwise(fitting):
        if small.leader != large.leader:
            lines.append(
                f"Between {small.billions:.0f} and {large.billions:.0f} billion weights {large.leader} overtakes "
                f"{small.leader} per GPU."
            )
    return "\n".join(lines)


def compare(given: Any) -> int:
    """Print plans side by side; the first is what the others are compared with."""
    rows, not_laid = planning.compared(given.model, given.cluster, given.plans)
    for sentence in not_laid:
        print(f"rackside: {sentence}", file=sys.stderr)
    if given.json:
        print(printed(planning.compared_json(rows)))
    else:
        print(compare_text([(name, asked.found) for name, asked in rows]))
    return 0


def export(given: Any) -> int:
    """Print a plan in a framework's words; what they do not carry goes to standard error."""
    text, lost = planning.exported(given.plan, given.to)
    print(text, end="")
    for sentence in lost:
        print(f"rackside: {sentence}", file=sys.stderr)
    return 0


def imported(given: Any) -> int:
    """Print what was read as a plan profile, or, on a cluster, what it will do."""
    found = planning.imported(given.words)
    if found.unused:
        print(f"rackside: not used for the plan: {', '.join(found.unused)}.", file=sys.stderr)
    if given.cluster is None:
        print(to_yaml(found.plan)[0], end="")
        return 0
    asked = planning.imported_prediction(found, given.model, given.cluster)
    told = offline.prediction_json(asked)
    print(printed(told) if given.json else prediction_text(asked.found, told))
    return 0


def compare_text(rows: Sequence[tuple[str, Prediction]]) -> str:
    """A table, stacked bars in one scale, and each difference by its largest terms."""
    names = {name: title for name, title, _ in PARTS}
    longest = max(found.iteration_s for _, found in rows)
    wide = max(len(name) for name, _ in rows)
    heads = f"{'step s':>9} {'+/-':>5} {'tok/s':>10} {'tok/J':>7} {'MFU':>6} {'GiB':>7} {'fits':>5} {'C':>4}"
    lines = [f"{'':<{wide}} {heads}"]
    for name, found in rows:
        lines.append(
            f"{name:<{wide}} {found.iteration_s:>9.3f} {found.confidence.band:>5.0%} {found.tokens_per_s:>10,.0f} "
            f"{found.tokens_per_joule:>7.2f} {found.mfu:>6.1%} {found.memory.total_gib:>7.1f} "
            f"{'yes' if found.fits else 'no':>5} {found.temperature_c:>4.0f}"
        )
    lines.append("")
    for name, found in rows:
        width = max(1, round(48 * found.iteration_s / longest))
        lines.append(f"{name:<{wide}} {bar([getattr(found.breakdown, part) for part, _, _ in PARTS], width)}")
    legend = ", ".join(f"{mark} {title}" for _, title, mark in PARTS)
    lines += textwrap.wrap(legend, 100, initial_indent=" " * (wide + 1), subsequent_indent=" " * (wide + 1))
    first = rows[0][1]
    for name, found in rows[1:]:
        seconds, terms = planning.difference(first, found)
        because = ", ".join(f"{names[part]} {value:+.3f}" for part, value in terms)
        lines.append(f"{name} against {rows[0][0]}: {seconds:+.3f} s" + (f": {because}" if because else ""))
    return "\n".join(lines)


def _heads() -> str:
    return f"  {'':<4}{'plan':<36}" + "".join(f"{title:>9}" for title, _, _ in COLUMNS)


def _line(place: str, one: Ranked) -> str:
    values = "".join(f"{form.format(one.metrics[name]):>9}" for _, name, form in COLUMNS)
    return f"  {place:<4}{planning.label(one.plan):<36}{values}" + (f"  {one.behind}" if one.behind else "")


def _csv(answers: Sequence[Answer]) -> None:
    out = csv.writer(sys.stdout)
    header: list[str] = []
    for answer in answers:
        for one in answer.found.plans:
            if not header:
                header = ["cluster", "plan", *one.metrics]
                out.writerow(header)
            out.writerow([answer.cluster, planning.label(one.plan), *one.metrics.values()])


def _progress(cluster: str, tried: int, seconds: float, done: float) -> None:
    rate, left = tried / max(seconds, 1e-9), seconds * (1 - done) / max(done, 1e-9)
    progress(f"{cluster}: {tried:,} plans, {rate:,.0f} a second, {left:.1f} s left; ctrl-c shows what was found")
