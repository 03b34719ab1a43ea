"""Live changes to real training jobs: the same step on every rank, the same parameters at the end."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from engine.job.protocol import PauseEvent
from tests.parts.jobs import attached, saved, training
from tests.parts.missing import need


async def test_two_ranks_change_at_the_same_step_and_end_alike(tmp_path: Path) -> None:
    plain, touched = tmp_path / "plain", tmp_path / "touched"
    async with training("train_light", tmp_path / "a", steps=60, save=plain) as job:
        await job.finished()
    async with training("train_light", tmp_path / "b", steps=60, step_s=0.02, save=touched) as job:
        async with attached(job.socket) as console:
            halved = await console.does("m", "microbatch", microbatch=2)
            moved = await console.does("r", "rebalance", microbatches=[11, 5])
            drained = await console.does("d", "rebalance", microbatches=[16, 0])
            assert [s.state for s in (halved, moved, drained)] == ["applied"] * 3
            assert [r.device for r in console.told[-1].ranks] if hasattr(console.told[-1], "ranks") else True
        await job.finished()
    first, second = saved(touched, 0), saved(touched, 1)
    assert first["log"] == second["log"], "each rank ran the same settings at the same step"
    assert first["log"][halved.step - 1][1:] == [2, [8, 8]]
    assert first["log"][halved.step - 2][1:] == [4, [4, 4]]
    assert first["log"][-1][1:] == [2, [16, 0]]
    untouched = saved(plain, 0)["weights"]
    np.testing.assert_allclose(first["weights"], untouched, rtol=1e-9)
    assert first["weights"] == second["weights"]


async def test_ranks_say_where_they_run(tmp_path: Path) -> None:
    async with (
        training("train_light", tmp_path / "a", steps=10000, step_s=0.01) as job,
        attached(job.socket) as console,
    ):
        await console.reaches(console.greeting.step + 3)
        ranks = next((m.ranks for m in console.told if hasattr(m, "ranks")), console.greeting.ranks)
        assert ranks is not None
        assert [(r.rank, r.device) for r in ranks] == [(0, "0"), (1, "1")]


async def test_consoles_that_come_and_go_never_stop_the_job(tmp_path: Path) -> None:
    async with training("train_light", tmp_path / "a", steps=120, step_s=0.01, save=tmp_path / "end") as job:
        for number in range(8):
            async with attached(job.socket, f"console {number}") as console:
                console.client._send({"id": f"left {number}", "do": "microbatch", "microbatch": 1 + number % 2})
        await job.finished()
    assert saved(tmp_path / "end", 0)["weights"] == saved(tmp_path / "end", 1)["weights"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
async def test_torch_ddp_ends_with_the_untouched_runs_parameters(tmp_path: Path, dtype: str) -> None:
    """Halving the microbatch, then an uneven split, on a real DistributedDataParallel job: 1e-5 relative."""
    need(importlib.util.find_spec("torch") is not None, "PyTorch")
    import torch

    options = {"steps": 40, "microbatch": 4, "global_batch": 32, "dtype": dtype}
    async with training("train_ddp", tmp_path / "a", save=tmp_path / "plain.pt", **options) as job:
        await job.finished()
    async with training("train_ddp", tmp_path / "b", save=tmp_path / "touched.pt", step_s=0.1, **options) as job:
        async with attached(job.socket) as console:
            halved = await console.does("m", "microbatch", microbatch=2)
            moved = await console.does("r", "rebalance", microbatches=[11, 5])
            assert (halved.state, moved.state) == ("applied", "applied")
            assert halved.settings is not None
            assert halved.settings.microbatches == (8, 8)
            assert (halved.step or 0) < (moved.step or 0) < 40
        await job.finished()
    plain, touched = torch.load(tmp_path / "plain.pt"), torch.load(tmp_path / "touched.pt")
    size = torch.sqrt(sum((p.double() ** 2).sum() for p in plain))
    off = torch.sqrt(sum(((p - q).double() ** 2).sum() for p, q in zip(plain, touched, strict=True)))
    assert float(off / size) < (1e-5 if dtype == "float32" else 1e-12)


async def test_a_pause_longer_than_the_groups_timeout_harms_nobody(tmp_path: Path) -> None:
    """Both ranks wait at one boundary, so no collective is under way: 5 s of it under a timeout of 3 s."""
    need(importlib.util.find_spec("torch") is not None, "PyTorch")
    async with training("train_ddp", tmp_path / "a", steps=60, step_s=0.05, timeout_s=3) as job:
        async with attached(job.socket) as console:
            paused = await console.does("p", "pause", seconds=5)
            assert paused.state == "applied"
            before = console.step
            await console.reaches(before + 3)
            pauses = [m for m in console.told if isinstance(m, PauseEvent)]
            assert [p.until is None for p in pauses] == [False, True]
            again = await console.does("q", "pause", seconds=60)
            resumed = await console.does("r", "resume")
            assert (again.state, resumed.state) == ("applied", "applied")
        await job.finished(60)


async def test_a_command_before_the_gradients_takes_effect_at_the_very_next_step(tmp_path: Path) -> None:
    """Sent as a step begins: in force one step later, not two."""
    async with (
        training("train_light", tmp_path / "a", steps=10000, step_s=0.2, work_s=0.2) as job,
        attached(job.socket) as console,
    ):
        late = []
        for number in range(5):
            await console.reaches(console.step + 1)
            running = console.step + 1
            state = await console.does(f"m{number}", "microbatch", microbatch=1 + number % 2)
            late.append((state.step or 0) - running)
    assert late == [1] * 5
