"""Which job an action reaches, and how many nodes: what a console must know before it lets anything be sent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rackside_hook import Hook

from engine.act.action import Microbatch, Stage
from engine.sim.job import MemoryStore
from tests.parts.console import console
from tests.parts.nvml import FakeNvml
from tests.parts.waiting import until

pytestmark = pytest.mark.usefixtures("quick_retries")


@pytest.fixture
def pair(tmp_path: Path, nvml: FakeNvml, hooks: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This machine, and a second node that nobody reaches."""
    nvml.write(8)
    for name, value in {**nvml.environment, "RACKSIDE_HOOK_DIR": str(hooks)}.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "pair.yaml"
    path.write_text(
        "name: pair\nnodes:\n  - {name: me, type: hgx-h100, local: true}\n"
        '  - {name: far, type: hgx-h100, u: 20, ssh: "nobody@127.0.0.1:1"}\npoll_interval_s: 0.2\n'
    )
    return path


@asynccontextmanager
async def stepping(*hooks: Hook) -> AsyncIterator[None]:
    """The hooks' jobs take steps until the end."""

    async def steps() -> None:
        while True:
            for hook in hooks:
                await asyncio.to_thread(hook.step)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(steps())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_two_jobs_of_one_name_are_never_taken_for_each_other(pair: Path, hooks: Path) -> None:
    with (
        Hook("train", microbatch=4, global_batch=32, directory=str(hooks)) as first,
        Hook("train", microbatch=4, global_batch=32, directory=str(hooks)) as second,
    ):
        async with stepping(first, second), console(pair) as c:
            names = lambda: sorted(j.name for j in c.control.jobs.statuses.values() if j.attached)  # noqa: E731
            await until(lambda: len(names()) == 2)
            name = f"train-{os.getpid()}@me"
            assert names() == [name, "train@me"]
            while (job := c.control.jobs.current) is None or job.name != name:
                c.control.jobs.select_next()
            assert (await c.does(c.control.propose_microbatch(job, 2))).stage is Stage.DONE
            assert (first.settings.microbatch, second.settings.microbatch) == (4, 2)


async def test_a_job_that_has_not_told_where_it_runs_may_be_on_every_node(pair: Path, hooks: Path) -> None:
    """Until then a change of it wants the second key, as one of several nodes does."""
    options = {"microbatch": 4, "global_batch": 32, "world_size": 2, "store": MemoryStore(), "directory": str(hooks)}
    with Hook("wide", rank=0, **options) as first:
        async with console(pair) as c:
            await c.job(lambda j: not j.ranks)
            assert c.control.nodes_reached(Microbatch("wide", 2)) == 2
            assert c.control.nodes_reached(Microbatch("nobody", 2)) == 2
            with Hook("wide", rank=1, **options) as second:
                async with stepping(first, second):
                    await c.job(lambda j: len(j.ranks) == 2)
                    assert c.control.nodes_reached(Microbatch("wide", 2)) == 1
