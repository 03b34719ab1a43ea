"""Jobs that have no hook: their processes are stopped on the nodes, or their scheduler does it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.act import effect
from engine.act.action import Freeze, Outlook, Proposal, Requeue, Suspend, Unsuspend
from engine.act.effect import Load, Rack

MOST_S = 300.0
"""Half of the ten minutes after which NCCL gives up a collective by default (torch.distributed.init_process_group)."""
TIMEOUTS = (
    "Its collectives' time goes on: one that waits longer than its process group's timeout (NCCL 10 min, gloo 30 min, "
    "if the trainer sets no other) ends the job."
)


def freeze(rack: Rack, load: Load | None, job: str, pids: Mapping[str, tuple[int, ...]], seconds: float) -> Proposal:
    """Stop all processes that a job has on GPUs."""
    count = sum(map(len, pids.values()))
    refusal = _too_long(seconds) or ("" if count else f"No process of {job} is seen on a GPU.")
    return _standing(
        f"Stop {job} for {seconds:.0f} s",
        Freeze(job, pids, seconds),
        rack,
        load,
        f"{count} processes on {len(pids)} node{'s' * (len(pids) != 1)}, stopped by the nodes (SIGSTOP)",
        refusal,
        seconds,
    )


def thaw(rack: Rack, action: Freeze, frozen: bool) -> Proposal:
    """Let the processes that a job has on GPUs go on."""
    return Proposal(
        title=f"Let {action.job} go on",
        action=action,
        before=effect.now(rack, None),
        after=Outlook(None, None, None, None),
        scope="by the nodes (SIGCONT)",
        refusal="" if frozen else f"This console has not stopped {action.job}.",
    )


def suspend(rack: Rack, load: Load | None, job: str, nodes: tuple[str, ...], state: str, seconds: float) -> Proposal:
    """Let Slurm suspend a job."""
    refusal = _too_long(seconds)
    if not refusal and state != "RUNNING":
        refusal = f"Slurm's job {job} is {state.lower() or 'not known'}: only one that runs can be suspended."
    where = f"on {len(nodes)} node{'s' * (len(nodes) != 1)}, by Slurm (it wants an operator or root)"
    return _standing(
        f"Suspend job {job} for {seconds:.0f} s", Suspend(job, nodes, seconds), rack, load, where, refusal, seconds
    )


def unsuspend(rack: Rack, job: str, nodes: tuple[str, ...], state: str) -> Proposal:
    """Let Slurm resume a job."""
    return Proposal(
        title=f"Resume job {job}",
        action=Unsuspend(job, nodes),
        before=effect.now(rack, None),
        after=Outlook(None, None, None, None),
        scope="by Slurm",
        refusal="" if state == "SUSPENDED" else f"Slurm's job {job} is {state.lower() or 'not known'}, not suspended.",
    )


def requeue(
    rack: Rack, load: Load | None, action: Requeue, state: str, reads_plan: bool, name: str, lost: tuple[str, ...]
) -> Proposal:
    """Start a job of Slurm's anew with another plan. `reads_plan`: whether its script reads the file of the words."""
    refusal = ""
    if state not in ("RUNNING", "SUSPENDED"):
        refusal = f"Slurm's job {action.job} is {state.lower() or 'not known'}: only one that runs can be requeued."
    elif not reads_plan:
        refusal = (
            f"The script of job {action.job} would start as before: it does not read {action.path.rpartition('/')[2]} "
            "from its work folder. Put $(cat rackside-$SLURM_JOB_ID.plan 2>/dev/null || echo YOUR ARGUMENTS) into its "
            "launch line."
        )
    return Proposal(
        title=f"Requeue job {action.job} with the plan {name}",
        action=action,
        before=effect.now(rack, load),
        after=Outlook(None, None, None, None),
        scope=f"ends and starts again on {len(action.nodes)} node{'s' * (len(action.nodes) != 1)}, by Slurm",
        refusal=refusal,
        notes=(
            "What was trained since the last checkpoint is trained again; this cannot be undone.",
            f"Its arguments: {' '.join(action.words.split())}",
            *lost,
        ),
    )


def _too_long(seconds: float) -> str:
    if 0 < seconds <= MOST_S:
        return ""
    return f"A job without a hook is stopped for at most {MOST_S:.0f} s: its collectives would run out of time."


def _standing(
    title: str,
    action: Freeze | Suspend,
    rack: Rack,
    load: Load | None,
    scope: str,
    refusal: str,
    seconds: float,
) -> Proposal:
    before = effect.now(rack, load)
    return Proposal(
        title=title,
        action=action,
        before=before,
        after=replace(effect.waiting(rack), memory_gib=before.memory_gib),
        scope=scope,
        refusal=refusal,
        notes=(f"It goes on by itself after {seconds:.0f} s.", TIMEOUTS),
    )
