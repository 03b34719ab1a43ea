"""The hook alone: settings, steps, and the commands that change them."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
import timeit
from pathlib import Path
from typing import Any

import pytest
import rackside_hook
from hypothesis import given
from hypothesis import strategies as st
from rackside_hook import Hook, even_split, fitting_microbatches, make_settings, split_for

from tests.parts.hook import Line
from tests.parts.jobs import attached
from tests.parts.waiting import until


def test_it_is_one_stdlib_file_for_old_pythons() -> None:
    tree = ast.parse(Path(rackside_hook.__file__).read_text(), feature_version=(3, 8))
    roots = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert roots <= set(sys.stdlib_module_names)
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 16))
def test_every_sample_has_one_rank(ranks: int, microbatch: int, each: int) -> None:
    total = ranks * each
    settings = make_settings(1, microbatch, even_split(total, ranks))
    taken = [i for rank in range(ranks) for i in settings.samples(rank)]
    assert taken == list(range(total * microbatch))


@given(st.data())
def test_a_change_of_microbatch_keeps_the_global_batch(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 6))
    batch = ranks * data.draw(st.sampled_from([4, 8, 12, 24]))
    fits = fitting_microbatches(batch, ranks)
    before = make_settings(0, data.draw(st.sampled_from(fits)), [0] * ranks)
    counts = even_split(batch // before.microbatch, ranks)
    if ranks > 1 and counts[0] > 1:
        counts[0], counts[-1] = counts[0] - 1, counts[-1] + 1
    before = make_settings(0, before.microbatch, counts)
    after = data.draw(st.sampled_from(fits))
    split = split_for(after, before, batch)
    assert sum(split) * after == batch
    if all(c * before.microbatch % after == 0 for c in counts):
        assert [s * after for s in split] == [c * before.microbatch for c in counts], "samples stay with their ranks"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            {"microbatch": 5, "global_batch": 32},
            "microbatch 5 does not fit a global batch of 32 on 1 ranks; 1, 2, 4, 8",
        ),
        ({"rank": 2, "world_size": 2}, "rank 2 is not one of the 2 ranks"),
        ({"world_size": 2}, "need the process group's store"),
    ],
)
def test_a_trainer_that_is_wrong_is_told(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Hook("job", **arguments)


async def test_a_command_takes_effect_at_the_step_that_it_names(hook: Hook, folder: Path) -> None:
    async with attached(folder / "job.sock") as console:
        assert console.greeting.settings.microbatches == (8,)
        answer = asyncio.create_task(console.does("a", "microbatch", microbatch=2))
        await until(lambda: hook._server.commands)
        settings = hook.step(loss=2.0, tokens=4096, step_time_s=0.5)
        state = await answer
        assert (state.state, state.step) == ("applied", settings.step)
        assert (settings.microbatch, settings.microbatches) == (2, (16,))
        assert state.before is not None
        assert state.before.microbatch == 4
        hook.step(loss=float("nan"), tokens=4096, step_time_s=0.5)
        await console.reaches(1)
        told = [m for m in console.told if getattr(m, "step_time_s", None)]
        assert told[-1].loss is None, "a loss that is not a number is not sent as one"  # type: ignore[union-attr]


def test_steps_in_quick_succession_are_told_together_and_in_order(hook: Hook, folder: Path) -> None:
    """None is lost, though the last ones find nobody who sends them along: the serving thread does, a second later."""
    line = Line(folder / "job.sock")
    line.greet()
    for _ in range(4):
        hook.step(loss=0.5, tokens=None, step_time_s=1e-7)
    line.say({"id": "c", "do": "microbatch", "microbatch": 2})
    told = [line.hear() for _ in range(3)]
    assert [t["step"] for t in told] == [1, 2, 3]
    assert (told[0]["loss"], told[0]["tokens"], told[0]["step_time_s"]) == (0.5, None, 1e-7)
    assert told[0]["settings"] == {"step": 1, "microbatch": 4, "microbatches": [8]}
    assert line.hear()["event"] == "holder"
    late = Line(folder / "job.sock")
    hook.step()
    assert late.greet()["step"] == 5
    hook.step(loss=1)
    assert late.hear()["step"] == 5, "what was told before it came is not for it"


def test_a_number_that_its_owner_changes_later_is_told_as_it_was(hook: Hook, folder: Path) -> None:
    class Tensor(list[float]):
        def __float__(self) -> float:
            return self[0]

    line, loss = Line(folder / "job.sock"), Tensor([0.5])
    line.greet()
    for _ in range(3):
        hook.step(loss=loss, tokens=Tensor([8.0]))
    loss[0] = 0.0
    assert [(told["loss"], told["tokens"]) for told in (line.hear(), line.hear())] == [(0.5, 8.0)] * 2


async def test_a_repeated_id_acts_once(hook: Hook, folder: Path) -> None:
    line = Line(folder / "job.sock")
    line.greet()
    for _ in range(2):
        line.say({"id": "same", "do": "microbatch", "microbatch": 2})
    await until(lambda: len(hook._server.commands) == 1)
    hook.step()
    line.say({"id": "other", "do": "microbatch", "microbatch": 8})
    await until(lambda: hook._server.commands)
    hook.step()
    line.say({"id": "same", "do": "microbatch", "microbatch": 2})
    line.say({"ask": "same"})
    line.say({"ask": "never"})
    while (heard := line.hear()).get("state") != "unknown":
        pass
    assert heard["id"] == "never"
    assert hook.step().microbatch == 8


async def test_a_command_sent_again_before_it_is_in_force_is_answered_twice(hook: Hook, folder: Path) -> None:
    async with attached(folder / "job.sock") as console:
        both = [asyncio.create_task(console.does("same", "microbatch", microbatch=2)) for _ in range(2)]
        await until(lambda: hook._server.commands)
        both.append(asyncio.create_task(console.client.ask("same", 30)))
        while not all(answer.done() for answer in both):
            hook.step()
            await asyncio.sleep(0.005)
        assert [(a.result().state, a.result().step) for a in both] == [("applied", both[0].result().step)] * 3


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ({"do": "microbatch", "microbatch": 3}, "Microbatch 3 does not fit the global batch of 32"),
        ({"do": "microbatch", "microbatch": True}, "must be a whole number"),
        ({"do": "microbatch"}, "must be a whole number, not None"),
        ({"do": "rebalance", "microbatches": [7]}, "must add up to 8"),
        ({"do": "rebalance", "microbatches": [4, 4]}, "one number for each of the 1 ranks"),
        ({"do": "rebalance", "microbatches": "all"}, "one number for each of the 1 ranks"),
        ({"do": "microbatch", "microbatch": 2, "microbatches": [8]}, "must add up to 16"),
        ({"do": ["explode"]}, "does not offer ['explode']"),
        ({"do": "explode"}, "does not offer 'explode'"),
    ],
)
async def test_what_does_not_fit_is_rejected_with_a_reason(
    hook: Hook, folder: Path, command: dict[str, Any], says: str
) -> None:
    async with attached(folder / "job.sock") as console:
        answer = asyncio.create_task(console.client.submit({"id": "x", **command}, 10))
        while not answer.done():
            hook.step()
            await asyncio.sleep(0.005)
        assert answer.result().state == "rejected"
        assert says in answer.result().reason
        assert hook.settings.microbatch == 4


async def test_a_job_that_ends_in_mid_command(hook: Hook, folder: Path) -> None:
    async with attached(folder / "job.sock") as console:
        answer = asyncio.create_task(console.does("late", "microbatch", microbatch=2))
        await until(lambda: hook._server.commands)
        hook.close()
        state = await answer
        assert state.state == "unknown"
        assert "may or may not have taken effect" in state.reason


def test_a_step_with_nobody_attached_costs_microseconds(hook: Hook) -> None:
    """Not a benchmark: a bound a hundred times above what was measured, to catch I/O on the step's way."""
    assert timeit.timeit(hook.step, number=2000) / 2000 < 100e-6


def test_rackside_hook_prints_the_file(tmp_path: Path) -> None:
    printed = subprocess.run([sys.executable, "-m", "tui.cli", "hook"], capture_output=True, text=True, timeout=30)
    assert printed.stdout == Path(rackside_hook.__file__).read_text()
