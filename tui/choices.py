"""What each action's panel offers, as values with the proposals behind them."""

from __future__ import annotations

from dataclasses import replace

from engine.act.action import Proposal
from engine.act.propose import LEASED, PERMANENT
from engine.control.control import Control
from engine.control.discover import FoundJob
from engine.control.hookless import trains
from engine.job.status import JobStatus
from tui.screens.act import Choice
from tui.widgets.jobs import Effect

THROTTLE_STEPS_W = (200.0, 150.0, 100.0, 50.0, -50.0, -100.0, -200.0)
THROTTLE_DEFAULT = 2
CLOCK_SHARES = (0.95, 0.9, 0.8)
MOVES = (1, 2, 4)
PAUSES_S = (30.0, 60.0, 120.0, 300.0)
MOST_MICROBATCHES = 10


def supposed(choice: Choice) -> Choice:
    """The same where nothing is sent: without a word on who holds what."""

    def propose(scope: int) -> Proposal:
        found = choice.propose(scope)
        return replace(found, notes=tuple(n for n in found.notes if n not in (LEASED, PERMANENT)))

    return Choice(choice.label, propose)


def throttle(control: Control, node: int, slot: int) -> tuple[list[Choice], tuple[str, ...]]:
    """Watts down and up, and clocks down, for the GPU under the cursor, its node, its rack, the job."""
    cluster = control.cluster
    profile = cluster.nodes[node]

    def cells(numbers: list[int]) -> list[tuple[int, int]]:
        return [(n, s) for n in numbers for s in range(cluster.type_of(cluster.nodes[n]).gpus)]

    rack = [n for n, other in enumerate(cluster.nodes) if other.rack == profile.rack]
    scopes = [
        (f"{profile.name} GPU {slot}", [(node, slot)]),
        (profile.name, cells([node])),
        (f"rack {profile.rack}", cells(rack)),
    ]
    job = control.jobs.current
    where = control.cells_of_job(job) if job is not None and job.attached else []
    if job is not None and where:
        scopes.append((f"job {job.name}", where))

    def choice(step_w: float) -> Choice:
        return Choice(f"{-step_w:+.0f} W", lambda scope: control.propose_throttle(*scopes[scope], step_w))

    def lock(share: float) -> Choice:
        return Choice(f"clock {share - 1:+.0%}", lambda scope: control.propose_clock(*scopes[scope], share))

    offered = [*(choice(step) for step in THROTTLE_STEPS_W), *(lock(share) for share in CLOCK_SHARES)]
    return offered, tuple(label for label, _ in scopes)


def microbatch(control: Control, job: JobStatus) -> tuple[list[Choice], int]:
    """The values that fit around the present one; half of it is chosen first where it fits, else its double."""
    ranks, now = len(job.microbatches), job.microbatch
    fits = [m for m in range(1, job.global_batch // max(1, ranks) + 1) if job.global_batch % m == 0]
    fits = [m for m in fits if m != now] or [now]
    fits = sorted(sorted(fits, key=lambda m: max(m / now, now / m))[:MOST_MICROBATCHES])

    def choice(value: int) -> Choice:
        def propose(_: int) -> Proposal:
            return control.propose_microbatch(control.jobs.statuses.get(job.key, job), value)

        words = {now / 2: " halve", now * 2: " double"}
        return Choice(f"{value}{words.get(value, '')}", propose)

    first = next((fits.index(m) for m in (now // 2, now * 2) if m in fits), 0)
    return [choice(m) for m in fits], first


def rebalance(control: Control, job: JobStatus) -> list[Choice]:
    """How many microbatches each hot rank gives away."""

    def choice(moves: int) -> Choice:
        def propose(_: int) -> Proposal:
            return control.propose_rebalance(control.jobs.statuses.get(job.key, job), moves)

        return Choice(f"{moves} a rank", propose)

    return [choice(m) for m in MOVES]


def pause(control: Control, job: JobStatus) -> list[Choice]:
    """How long the job waits."""

    def choice(seconds: float) -> Choice:
        def propose(_: int) -> Proposal:
            return control.propose_pause(control.jobs.statuses.get(job.key, job), seconds)

        return Choice(f"{seconds:.0f} s", propose)

    return [choice(s) for s in PAUSES_S]


def resume(control: Control, job: JobStatus) -> list[Choice]:
    """A paused job, now."""
    return [Choice("now", lambda _: control.propose_resume(control.jobs.statuses.get(job.key, job)))]


def hookless_at(control: Control, node: str, slot: int) -> FoundJob | None:
    """The job without a hook on a GPU; the only one there is, where none is."""
    jobs = [f for f in control.found_jobs if trains(f) and "hook" not in f.source]
    here = [f for f in jobs if any((at.node, at.slot) == (node, slot) for at in f.ranks)]
    return here[0] if here else jobs[0] if len(jobs) == 1 else None


def stands(control: Control, job: FoundJob) -> bool:
    """Whether it is suspended, or stopped by this console."""
    return job.state == "SUSPENDED" or control.frozen(job)


def standstill(control: Control, job: FoundJob) -> list[Choice]:
    """How long a job without a hook is stopped."""

    def choice(seconds: float) -> Choice:
        return Choice(f"{seconds:.0f} s", lambda _: control.propose_standstill(job, seconds))

    return [choice(s) for s in PAUSES_S]


def go_on(control: Control, job: FoundJob) -> list[Choice]:
    """A job that stands, now."""
    return [Choice("now", lambda _: control.propose_go_on(job))]


def effects(control: Control, job: JobStatus, node: int) -> list[Effect]:
    """What each action would do now, in its usual measure."""
    cluster = control.cluster
    rack = [n for n, other in enumerate(cluster.nodes) if other.rack == cluster.nodes[node].rack]
    cells = [(n, s) for n in rack for s in range(cluster.type_of(cluster.nodes[n]).gpus)]
    found = [Effect("t rack -100", control.propose_throttle(f"rack {cluster.nodes[node].rack}", cells, 100.0))]
    if job.microbatch > 1:
        found.append(Effect("m halve", control.propose_microbatch(job, job.microbatch // 2)))
    found.append(Effect("m double", control.propose_microbatch(job, job.microbatch * 2)))
    found.append(Effect("r 1 a rank", control.propose_rebalance(job)))
    return found


def undo(control: Control) -> list[Choice]:
    """The last action that is in force, put back."""
    last = control.propose_undo()
    assert last is not None

    def propose(_: int) -> Proposal:
        return control.propose_undo() or last

    return [Choice("undo", propose)]
