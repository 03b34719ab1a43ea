"""Random interventions on a real training job, while consoles, SSH sessions, probes and connections are killed.

A two-rank PyTorch DDP job is reached through sshd; operators are processes that are killed in mid-command, some of them
`rackside act`. Nothing may hang, no command be lost or act twice, and at the end the parameters are those of a run that
nobody touched. RACKSIDE_INTERVENTIONS is how many; RACKSIDE_SEED repeats the choices of a run,
not its timing.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.act.audit import Audit
from engine.job import CommandState, StepEvent
from tests.parts.console import write_inventory
from tests.parts.jobs import Attached, attached, training
from tests.parts.missing import need
from tests.parts.nvml import FakeNvml
from tests.parts.operators import Told
from tests.parts.proxy import Proxy, proxy
from tests.parts.sshd import Sshd
from tests.parts.waiting import until

COUNT = int(os.environ.get("RACKSIDE_INTERVENTIONS", "500"))
STEPS, STEP_S = 600 + 3 * COUNT, 0.08
SLOTS, FAULT_EACH = 4, 20
# Rounding alone parts two float32 runs of this length by 1e-2, neither of them touched (1e-7 after 400 steps, then a
# rectifier's input falls on the other side of zero). In float64 what is left is 1e-15, or a fault.
JOB = {"microbatch": 4, "global_batch": 16, "sequence": 8, "dtype": "float64"}


@dataclass
class Campaign:
    """What is done to the job, and what was seen of it."""

    seed: str
    inventory: Path
    environment: dict[str, str]
    server: Sshd
    line: Proxy
    sent: int = 0
    refused: int = 0
    did: Counter[str] = field(default_factory=Counter)
    answers: list[dict[str, Any]] = field(default_factory=list)
    confirmed: set[str] = field(default_factory=set)
    waits_s: dict[str, list[float]] = field(default_factory=dict)

    @property
    def over(self) -> bool:
        return self.sent - self.refused >= COUNT

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for slot in range(SLOTS):
                group.create_task(self._consoles(slot))
            group.create_task(self._commands())

    async def _consoles(self, slot: int) -> None:
        """One console after the other, most of them killed while something is on its way."""
        dice, number = random.Random(f"{self.seed} {slot}"), 0
        while not self.over:
            number += 1
            name = f"ops{slot}-{number}@desk" if dice.random() < 0.8 else f"guard{slot}-{number}@head"
            told = await Told.start(str(self.inventory), name, self.environment)
            try:
                began = time.monotonic()
                await until(lambda told=told: told.ready or told.gone, 90, f"{name} is ready")
                self.waits_s.setdefault("start", []).append(time.monotonic() - began)
                for _ in range(dice.randint(12, 40)):
                    if self.over:
                        break
                    await self._order(told, dice)
                for _ in range(dice.randint(0, 2)):
                    self._tell(told, dice)
                await asyncio.sleep(dice.uniform(0, 0.15))
                kill = dice.random() < 0.8
                self.did["consoles killed" if kill else "consoles ended"] += 1
                await told.end(kill)
            finally:
                with suppress(ProcessLookupError):
                    told.process.kill()
            self.refused += sum("refused" in a for a in told.answers.values())
            self.answers += told.answers.values()
            self.confirmed.update(told.confirmed)
            lost = told.orders - len(told.answers)
            assert kill or not lost, f"{name} did not answer {lost} orders and was not killed"

    async def _order(self, told: Told, dice: random.Random) -> None:
        order, began = self._tell(told, dice), time.monotonic()
        if dice.random() < 0.8:
            await until(lambda: order in told.answers or told.gone, 90, f"an answer to order {order}: no hang")
            self.waits_s.setdefault("answer", []).append(time.monotonic() - began)
        else:
            await asyncio.sleep(dice.uniform(0, 0.1))
        if dice.random() < 1 / FAULT_EACH:
            self._fault(dice)

    def _tell(self, told: Told, dice: random.Random) -> int:
        order = random_order(dice)
        self.sent += 1
        self.did[order["do"]] += 1
        return told.tell(order)

    async def _commands(self) -> None:
        """`rackside act`, killed or not."""
        dice = random.Random(f"{self.seed} act")
        while not self.over:
            words = [dice.choice(("halve", "double", "1", "2", "4", "8"))]
            ended = await self.act(
                ["microbatch", "job", *words], dice.uniform(1.0, 4.0) if dice.random() < 0.5 else None
            )
            self.did["act killed" if ended is None else "act"] += 1

    async def act(self, words: list[str], killed_after_s: float | None = None) -> dict[str, Any] | None:
        """What one `rackside act` printed, or None when it was killed before."""
        command = (sys.executable, "-m", "tui.cli", "act", "--cluster", str(self.inventory), *words)
        process = await asyncio.create_subprocess_exec(
            *command,
            *("--yes", "--json", "--wait", "60", "--steal", "a test"),
            env=self.environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), killed_after_s or 120)
        except TimeoutError:
            assert killed_after_s, f"rackside act {words} hangs"
            process.kill()
            await process.wait()
            return None
        found: dict[str, Any] = json.loads(said) if said else {}
        if "id" in found:
            self.answers.append(found)
            self.confirmed.add(found["id"])
            self.sent += 1
        return found

    def _fault(self, dice: random.Random) -> None:
        kind = dice.choice(("connections reset", "cut in mid-line", "session killed", "session killed", "sshd killed"))
        self.did[kind] += 1
        if kind == "connections reset":
            self.line.reset()
        elif kind == "cut in mid-line":
            self.line.reset_after(dice.randint(1, 3000))
        elif kind == "session killed":  # a session of sshd, a probe below it, or the heir of one
            with suppress(ProcessLookupError, IndexError):
                os.kill(dice.choice(self._killable()[1:]), signal.SIGKILL)
        else:
            for pid in self._killable():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.server.stop()
            self.server.start()

    def _killable(self) -> list[int]:
        """The server, its sessions and the probes; not what a login shell runs at its start."""
        found: list[int] = []
        for pid in self.server.sessions():
            with suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith(("sshd", "python")):
                    found.append(pid)
        return found


def random_order(dice: random.Random) -> dict[str, Any]:
    do = dice.choices(
        ("microbatch", "rebalance", "undo", "again", "pause", "resume", "throttle", "clock"),
        (30, 22, 12, 10, 6, 6, 8, 6),
    )[0]
    value: Any = None
    if do == "microbatch":
        value = dice.choice(("halve", "double", 1, 2, 4, 8))
    elif do == "rebalance":
        value = dice.random()
    elif do == "pause":
        value = dice.uniform(0.1, 0.4)
    elif do == "throttle":
        value = dice.choice((450.0, 550.0, 600.0))
    elif do == "clock":
        value = dice.choice((1200.0, 1500.0))
    gpus = sorted(dice.sample(range(8), dice.randint(1, 3)))
    return {"do": do, "value": value, "gpus": gpus, "steal": f"reason {dice.randint(1, 99)}"}


@contextmanager
def told_on_failure(seed: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        print(f"seed of this run: RACKSIDE_SEED={seed}")
        raise


async def test_random_interventions_harm_nothing(
    tmp_path: Path, nvml: FakeNvml, make_sshd: Callable[..., Sshd], hooks: Path
) -> None:
    need(importlib.util.find_spec("torch") is not None, "PyTorch")
    seed = os.environ.get("RACKSIDE_SEED") or f"{random.SystemRandom().getrandbits(32):x}"
    nvml.write(8)
    server = make_sshd(
        {**nvml.environment, "RACKSIDE_HOOK_DIR": str(hooks), "HOME": str(tmp_path)},
        extra="MaxStartups 100\nMaxSessions 100\n",
    )
    # A home of its own: what a user's shell runs at its start (pyenv, say) leaves locks behind when it is killed.
    slow, touched, plain = tmp_path / "slow", tmp_path / "touched", tmp_path / "plain"
    slow.touch()
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    began = time.monotonic()
    with told_on_failure(seed):
        async with (
            proxy(server.port) as line,
            training("train_ddp", hooks, steps=STEPS, step_s=STEP_S, slow_file=slow, **JOB, **results(touched)) as job,
            attached(job.socket, "observer") as observer,
        ):
            inventory = through(line.port, server, tmp_path / "lab.yaml")
            campaign = Campaign(seed, inventory, environment, server, line)
            await campaign.run()
            took_s = time.monotonic() - began
            for what, waits in campaign.waits_s.items():
                print(f"{what}: {len(waits)} times, {sum(waits) / len(waits):.2f} s, {max(waits):.2f} s at most")
            last = await campaign.act(["microbatch", "job", "8"])
            assert last is not None
            assert last.get("stage") == "done" or "already" in last.get("refusal", ""), last
            assert observer.step < STEPS, "the job ended before the interventions did"
            unlocked = lambda: set(nvml.limits().values()) <= {700_000} and not any(nvml.limits("lock").values())  # noqa: E731
            await until(unlocked, 40, "every limit and lock is back")
            slow.unlink()
            await job.finished(180)
        async with training("train_ddp", tmp_path / "other", steps=STEPS, **JOB, **results(plain)) as untouched:
            await untouched.finished(180)
        audit = tmp_path / "state" / "rackside" / "audit.jsonl"
        applied = the_job_took_each_once(observer, settings_log(touched))
        entries = everything_is_logged(audit, observer, campaign)
        operators_were_told_the_truth(campaign, applied)
        off = difference(touched, plain)
        repeated = sum("again" in answer for answer in campaign.answers)
        print(f"seed {seed}: {dict(campaign.did)}; {campaign.refused} refused by the console, {len(entries)} confirmed")
        print(f"and logged, {repeated} repeated, {len(applied)} in force; {took_s:.0f} s of it; off by {off:.1e}")
        assert off < 1e-5
        assert settings_log(plain)[-1][0] == settings_log(touched)[-1][0] == STEPS


def results(path: Path) -> dict[str, Any]:
    return {"save": f"{path}.pt", "log": f"{path}.log"}


def through(port: int, server: Sshd, path: Path) -> Path:
    """The inventory, with the way through the proxy."""
    write_inventory(path, [server])
    path.write_text(path.read_text().replace(f":{server.port}", f":{port}"))
    known = path.with_name("all_known_hosts")
    known.write_text(known.read_text().replace(f":{server.port} ", f":{port} "))
    return path


def settings_log(path: Path) -> list[Any]:
    """Each step's settings; all ranks must have run the same."""
    ranks = [json.loads(Path(f"{path}.log.{rank}").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1], "both ranks ran the same settings at the same step"
    found: list[Any] = ranks[0]
    assert [step for step, _, _ in found] == list(range(1, len(found) + 1))
    return found


def the_job_took_each_once(observer: Attached, log: list[Any]) -> dict[str, CommandState]:
    """Each command is in force once, where the hook said, and the steps ran with exactly these settings."""
    states = [m for m in observer.told if isinstance(m, CommandState)]
    applied = [s for s in states if s.state == "applied"]
    twice = [one for one, times in Counter(s.id for s in applied).items() if times > 1]
    assert not twice, f"took effect twice: {twice}"
    open_ = {s.id for s in states if s.state == "scheduled"} - {s.id for s in states if s.ended}
    assert not open_, f"scheduled and lost: {open_}"
    changes = [s for s in applied if s.settings is not None]
    now = (JOB["microbatch"], (2, 2))
    by_step: dict[int, tuple[int, tuple[int, ...]]] = {}
    for change in changes:
        assert change.before is not None
        assert change.settings is not None
        assert change.step is not None
        assert (change.before.microbatch, change.before.microbatches) == now
        now = by_step[change.step] = (change.settings.microbatch, change.settings.microbatches)
    now = (JOB["microbatch"], (2, 2))
    for step, microbatch, microbatches in log:
        now = by_step.get(step, now)
        assert (microbatch, tuple(microbatches)) == now, f"step {step} ran with other settings"
    steps = [m.step for m in observer.told if isinstance(m, StepEvent)]
    assert steps == sorted(set(steps)), "each step is told once, in order"
    return {s.id: s for s in applied}


def everything_is_logged(path: Path, observer: Attached, campaign: Campaign) -> dict[str, list[dict[str, Any]]]:
    """What reached the job, and what was confirmed, was in the log before; each action once."""
    entries: dict[str, list[dict[str, Any]]] = {}
    for entry in Audit(path).read():
        entries.setdefault(entry["id"], []).append(entry)
    whole = [line for line in path.read_text().splitlines() if line]
    assert len(whole) == sum(map(len, entries.values())), "no line is cut short"
    reached = {m.id for m in observer.told if isinstance(m, CommandState)}
    assert reached <= set(entries), f"in the job and not in the log: {reached - set(entries)}"
    assert campaign.confirmed <= set(entries), "confirmed and not in the log"
    for one, lines in entries.items():
        stages = [line["stage"] for line in lines]
        assert stages[0] == "pending", one
        assert stages.count("pending") == 1, f"{one} began twice"
        assert len({line["step"] for line in lines if line["stage"] == "done"}) <= 1, f"{one} ended at two steps"
    return entries


def operators_were_told_the_truth(campaign: Campaign, applied: dict[str, CommandState]) -> None:
    """Done is done at that step; refused and failed is not done."""
    wrong = Counter[str]()
    for answer in campaign.answers:
        one, stage = answer.get("id") or answer.get("again"), answer.get("stage")
        if one is None or stage is None:
            continue
        if stage in ("failed", "rejected") and one in applied:
            wrong[f"{one} was said to have failed, and is in force"] += 1
        if stage in ("done", "applied") and one in applied and answer.get("step") is not None:
            step = applied[one].step
            wrong[f"{one} is in force at {step}, not {answer['step']}"] += answer["step"] != step
        wrong[f"{one} was said to be applied and is not"] += stage == "applied" and one not in applied
    assert not +wrong, +wrong


def difference(first: Path, second: Path) -> float:
    """Of all parameters, relative."""
    import torch

    one, other = torch.load(f"{first}.pt"), torch.load(f"{second}.pt")
    size = sum(float((p.double() ** 2).sum()) for p in other) ** 0.5
    off = sum(float(((p.double() - q.double()) ** 2).sum()) for p, q in zip(one, other, strict=True)) ** 0.5
    return off / size
