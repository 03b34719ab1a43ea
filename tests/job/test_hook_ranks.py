"""The hooks of several ranks: what they see of each other, and at which step."""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import rackside_hook
from rackside_hook import Hook

from engine.sim.job import MemoryStore
from tests.parts.hook import Line
from tests.parts.jobs import attached
from tests.parts.waiting import until


def light_store() -> Any:
    """A store of one process."""
    values: dict[str, Any] = {}

    class Store:
        set, get = values.__setitem__, values.__getitem__

        def add(self, key: str, amount: int) -> int:
            values[key] = values.get(key, 0) + amount
            return int(values[key])

    return Store()


def test_where_ranks_must_run_as_many_only_an_even_split_fits(folder: Path) -> None:
    """FSDP: 12 samples in microbatches of 4 would be two on one rank and one on the other."""
    ranks = {"global_batch": 12, "world_size": 2, "store": MemoryStore(), "directory": str(folder)}
    with Hook("even", microbatch=2, rebalance=False, **ranks) as even, Hook("any", microbatch=2, **ranks) as uneven:
        assert (even.fits, uneven.fits) == ([1, 2, 3, 6], [1, 2, 3, 4, 6])
    with Hook("loader", microbatch=2, fits=[1, 2], **ranks) as narrowed:
        assert narrowed.fits == [1, 2]
    with Hook("fixed", microbatch=2, fits=[2], rebalance=False, **ranks) as fixed:
        assert fixed._facts["can"] == ["pause", "resume"]


async def test_further_processes_of_a_rank_follow_it(folder: Path) -> None:
    """Two data-parallel ranks of two processes each, as in tensor parallelism: one serves, all change at one step."""
    store = MemoryStore()
    places = [(0, False), (0, True), (1, False), (1, True)]
    hooks = [
        Hook("job", 4, 16, rank=rank, world_size=2, store=store, directory=str(folder), follows=follows)
        for rank, follows in places
    ]
    assert [hook._server is not None for hook in hooks] == [True, False, False, False]
    settings = [hook.step() for hook in hooks]
    async with attached(folder / "job.sock") as console:
        doing = asyncio.create_task(console.does("m", "microbatch", microbatch=2))
        await until(lambda: hooks[0]._server.commands)
        for _ in range(3):
            settings = [hook.step() for hook in hooks]
            assert len({(s.step, s.microbatch) for s in settings}) == 1
        assert (await doing).step == 3
        paused = asyncio.create_task(console.does("p", "pause", seconds=100))
        await until(lambda: hooks[0]._server.commands)
        for hook in hooks:
            hook.step()
        waiting = asyncio.gather(*(asyncio.to_thread(hook.step) for hook in hooks))
        await until(lambda: hooks[0]._server.paused_until)
        assert (await paused).state == "applied"
        assert (await console.does("r", "resume")).state == "applied"
        settings = await waiting
    assert {(s.step, s.microbatch) for s in settings} == {(6, 2)}
    for hook in hooks:
        hook.close()


def test_what_is_not_rank_0s_flag_is_not_taken_for_it(tmp_path: Path) -> None:
    flag = rackside_hook.Flag()
    where, path, mark = flag.place
    assert rackside_hook.found_flag(flag.place)[0] == 0
    flag.numbers[0] = 7
    assert rackside_hook.found_flag(flag.place)[0] == 7
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "short").write_bytes(b"")
    others = [[where, path, mark + 1], ["another", path, mark]]
    others += [[where, str(tmp_path / name), mark] for name in ("pipe", "short", "none")]
    assert {rackside_hook.found_flag(other) for other in others} == {rackside_hook.NO_FLAG}
    flag.close()
    assert rackside_hook.found_flag(flag.place) == rackside_hook.NO_FLAG


def test_a_rank_that_ran_ahead_of_rank_0_says_so(folder: Path) -> None:
    """Its GPU had not ended the step: the change comes late, and that must not pass in silence."""
    store = light_store()
    with Hook("job", 4, 32, 0, 2, store, str(folder)) as first, Hook("job", 4, 32, 1, 2, store, str(folder)) as other:
        [other.step() for _ in range(5)]
        first.step()
        line = Line(folder / "job.sock")
        line.greet()
        line.say({"id": "a", "do": "microbatch", "microbatch": 2})
        assert first._server is not None
        while not first._server.commands:
            time.sleep(0.01)
        assert [first.step().microbatch for _ in range(2)] == [4, 2]
        with pytest.warns(RuntimeWarning, match="wait for the GPU once a step"):
            assert other.step().microbatch == 2


async def test_a_microbatch_and_its_split_are_one_change(tmp_path: Path) -> None:
    """An undo puts both back; as two commands it would stay half done where somebody else's came in between."""
    store = light_store()
    with Hook("job", 4, 32, 0, 2, store, str(tmp_path / "hooks")) as hook:
        async with attached(tmp_path / "hooks" / "job.sock") as console:
            answer = asyncio.create_task(console.does("both", "microbatch", microbatch=2, microbatches=[11, 5]))
            while not answer.done():
                hook.step()
                await asyncio.sleep(0.005)
            assert answer.result().state == "applied"
            assert hook.settings[1:3] == (2, (11, 5))


def test_a_store_that_fails_stops_nothing(folder: Path) -> None:
    class Broken:
        def set(self, key: str, value: str) -> None:
            raise ConnectionError("gone")

        get = add = set

    with pytest.warns(RuntimeWarning, match="store failed"):
        hook = Hook("job", microbatch=1, global_batch=2, world_size=2, store=Broken(), directory=str(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [hook.step().step for _ in range(3)] == [1, 2, 3], "warned once, not every step"
    hook.close()
