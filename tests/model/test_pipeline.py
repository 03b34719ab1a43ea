"""The pipeline's closed form against every forward and backward played out one by one."""

from __future__ import annotations

import numpy as np
import pytest

from engine.model.pipeline import bubble_s, zero_bubble_s


def played(forward: list[float], backward: list[float], microbatches: int, chunks: int = 1) -> float:
    """Seconds until the last backward of a 1F1B schedule, interleaved when there are several chunks a stage.

    `forward` and `backward` are each stage's seconds for one microbatch, all chunks together. The order of each
    stage's work is Megatron-LM's; a piece starts when its stage is free and what it waits for is done.
    """
    stages, total = len(forward), microbatches * chunks

    def piece(k: int, back: bool) -> tuple[int, int]:
        group, within = divmod(k, stages * chunks)
        chunk = within // stages
        return group * stages + within % stages, chunks - 1 - chunk if back else chunk

    orders = []
    for i in range(stages):
        warm = stages - i - 1 if chunks == 1 else (stages - i - 1) * 2 + (chunks - 1) * stages
        warm = min(warm, total)
        order = [("F", *piece(k, False)) for k in range(warm)]
        for k in range(total - warm):
            order += [("F", *piece(warm + k, False)), ("B", *piece(k, True))]
        order += [("B", *piece(k, True)) for k in range(total - warm, total)]
        orders.append(order)
    done: dict[tuple[str, int, int, int], float] = {}
    free, at = [0.0] * stages, [0] * stages
    while any(at[i] < len(orders[i]) for i in range(stages)):
        moved = False
        for i in range(stages):
            while at[i] < len(orders[i]):
                kind, micro, chunk = orders[i][at[i]]
                if kind == "F":
                    before = ("F", micro, chunk, i - 1) if i else ("F", micro, chunk - 1, stages - 1)
                    first = i == 0 and chunk == 0
                else:
                    before = ("B", micro, chunk, i + 1) if i < stages - 1 else ("B", micro, chunk + 1, 0)
                    first = False
                    if i == stages - 1 and chunk == chunks - 1:
                        before = ("F", micro, chunk, i)
                if not first and before not in done:
                    break
                start = max(free[i], 0.0 if first else done[before])
                free[i] = start + (forward[i] if kind == "F" else backward[i]) / chunks
                done[kind, micro, chunk, i] = free[i]
                at[i] += 1
                moved = True
        assert moved, "the schedule is stuck"
    return max(free)


def closed(forward: list[float], backward: list[float], microbatches: int, chunks: int = 1) -> float:
    each = np.add(forward, backward)
    slowest, total = np.array([each.max()]), np.array([each.sum()])
    return float((microbatches * slowest + bubble_s(total, slowest, np.array([float(chunks)])))[0])


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("microbatches", [8, 16, 64])
def test_even_stages_are_exact(stages: int, microbatches: int) -> None:
    f, b = [1.0] * stages, [2.0] * stages
    assert played(f, b, microbatches) == pytest.approx(closed(f, b, microbatches))


@pytest.mark.parametrize("chunks", [2, 3, 6])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_interleaved_stages_are_exact(stages: int, chunks: int) -> None:
    f, b = [1.0] * stages, [2.0] * stages
    assert played(f, b, 4 * stages, chunks) == pytest.approx(closed(f, b, 4 * stages, chunks))


@pytest.mark.parametrize("slow", [0, 2, 3])
def test_an_uneven_stage_sets_the_pace(slow: int) -> None:
    """One stage half as long again, first, inside or last (where the head stands): within 3 % of what plays out."""
    f, b = [1.0] * 4, [2.0] * 4
    f[slow], b[slow] = 1.5, 3.0
    assert played(f, b, 32) == pytest.approx(closed(f, b, 32), rel=0.03)


def test_zero_bubble_is_the_papers() -> None:
    """F = B = W: 1F1B waits 3 (p - 1), ZB-H1 waits (p - 1) (Qi et al. 2023, table 1)."""
    bubble = np.array([3.0 * 7])
    assert zero_bubble_s(bubble, np.array([1 / 3])) == pytest.approx(7.0)
