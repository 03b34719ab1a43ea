"""The jobs: how the current one steps, against its model, who lags, what each action would do; and all others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from rich.text import Text

from engine.act.action import Proposal
from engine.act.effect import Load, Rack
from engine.control.discover import FoundJob
from engine.job.status import JobStatus
from engine.model.predict import Prediction
from tui.widgets.figures import DASH, age, change, clock, large, number
from tui.widgets.pane import Pane
from tui.widgets.plot import sparkline

LAGS = 0.97
"""A rank whose clock is below this share of the job's median holds the others up."""


@dataclass(frozen=True)
class Effect:
    """What an action would do, as it is offered: its name and its proposal."""

    label: str
    proposal: Proposal


class Jobs(Pane):
    """`show` draws them; nothing is kept."""

    def show(
        self,
        job: JobStatus | None,
        others: Sequence[FoundJob],
        rack: Rack,
        load: Load | None,
        own: Prediction | None,
        effects: Sequence[Effect],
        now: float,
    ) -> None:
        """`own` is the model's word on the plan that runs, `effects` what each action would do just now."""
        self.fill(lambda w, _: jobs(job, others, rack, load, own, effects, now, max(30, w or 60), self.plain))


def jobs(
    job: JobStatus | None,
    others: Sequence[FoundJob],
    rack: Rack,
    load: Load | None,
    own: Prediction | None,
    effects: Sequence[Effect],
    now: float,
    width: int,
    plain: bool,
) -> Text:
    """The text of the pane."""
    text = Text(no_wrap=True)
    text.append("Jobs\n", "bold")
    if job is None:
        text.append("No job with a hook: a trainer with rackside_hook on one of these nodes appears here.\n", "dim")
    else:
        _current(text, job, rack, load, own, now, width, plain)
        for effect in effects:
            _effect(text, effect)
    for found in others:
        gpus = DASH if found.gpus is None else str(found.gpus)
        text.append(f"\n{found.id} ", "bold")
        text.append(f"{found.name}  {found.state.lower()}  {gpus} GPUs on {', '.join(found.nodes[:4]) or DASH}")
        text.append(f"  ({found.source})\n", "dim")
    return text


def _current(
    text: Text,
    job: JobStatus,
    rack: Rack,
    load: Load | None,
    own: Prediction | None,
    now: float,
    width: int,
    plain: bool,
) -> None:
    text.append(f"{job.name}", "bold")
    text.append(f"  {job.framework or 'a trainer'}, {job.world_size} ranks, on {job.node}\n", "dim")
    if not job.attached:
        text.append(f"gone: {job.reason or 'it ended well'}\n", "bold red" if job.reason else "dim")
        return
    if job.paused_until is not None:
        text.append(f"paused, goes on in {age(max(0.0, job.paused_until - now))}\n", "bold yellow")
    if job.holder:
        text.append(f"held by {job.holder} since {clock(job.held_since or now)}: {job.held_because}\n", "dim")
    steps = job.recent_step_s
    middle = median(steps) if steps else job.step_s
    spread = f"  {min(steps):.2f}-{max(steps):.2f}" if steps else ""
    _row(text, "step", f"{job.step}  {number(job.step_s, 2, 's')}  median {number(middle, 2, 's')}{spread}")
    if own is not None and middle:
        _row(text, "model", f"{own.iteration_s:.2f} s, {middle / own.iteration_s - 1:+.0%} measured")
    watts = _job_w(rack, load)
    mfu = own.mfu * own.iteration_s / middle if own is not None and middle else None
    per_joule = job.tokens_per_s / watts if job.tokens_per_s and watts else None
    _row(text, "tokens/s", f"{large(job.tokens_per_s)}   tokens/J {number(per_joule, 2)}   MFU {_percent(mfu)}")
    _row(text, "loss", number(job.loss, 4))
    most, least = max(job.microbatches), min(job.microbatches)
    split = f"{least}" if most == least else f"{least}-{most}, uneven"
    _row(text, "microbatch", f"{job.microbatch} x {split} a rank, global batch {job.global_batch}")
    _lagging(text, rack, load)
    if len(steps) > 1:
        drawn = sparkline(np.asarray(steps), max(10, min(60, width - 14)), plain=plain)
        _row(text, "last steps", drawn)


def _lagging(text: Text, rack: Rack, load: Load | None) -> None:
    """Ranks whose slowest GPU runs below the others': a synchronous step waits for them."""
    if load is None:
        return
    clocks = np.array([_least(rack.clock_mhz[load.replica == r]) for r in range(len(load.microbatches))])
    middle = float(np.nanmedian(clocks)) if not np.isnan(clocks).all() else float("nan")
    slow = [r for r in np.argsort(clocks) if clocks[r] < LAGS * middle][:4]
    told = ", ".join(f"rank {r} at {clocks[r]:.0f} MHz" for r in slow) or "none"
    _row(text, "stragglers", told + (f" (the others {middle:.0f})" if slow else ""), "yellow" if slow else "")


def _least(values: np.typing.NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.min()) if len(known) else float("nan")


def _job_w(rack: Rack, load: Load | None) -> float | None:
    """Power of the job's GPUs."""
    watts = rack.power_w[load.replica >= 0] if load is not None else rack.power_w
    known = watts[~np.isnan(watts)]
    return float(known.sum()) if len(known) else None


def _effect(text: Text, effect: Effect) -> None:
    p = effect.proposal
    text.append(f"{effect.label:<12}", "bold cyan")
    if p.refusal:
        text.append(f"{p.refusal}\n", "dim")
        return
    before, after = p.before, p.after
    peak = f"{number(before.peak_c)} -> {number(after.peak_c, 0, 'C')}"
    text.append(f"{change(before.step_s, after.step_s, 2, 's')}, {peak}\n")


def _row(text: Text, name: str, value: str, style: str = "") -> None:
    text.append(f"{name:<12}", "dim")
    text.append(f"{value}\n", style)


def _percent(share: float | None) -> str:
    return DASH if share is None else f"{share:.0%}"
