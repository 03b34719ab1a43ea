"""Jobs from processes, Slurm and hooks: grouped, placed and merged, whatever the environment holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.control.discover import RANKLESS, RankAt, from_processes, from_slurm, merged
from engine.job.status import JobStatus
from engine.profile import Cluster, catalog
from engine.telemetry.snapshot import Process, Snapshot
from engine.telemetry.store import Store
from engine.telemetry.tools.slurm import Job

NODES = ("n1", "n2")
Placed = dict[tuple[str, int], list[Process]]


def seen(placed: Placed, hostnames: tuple[str, str] = ("host-1.lab", "host-2.lab")) -> Snapshot:
    """Two nodes of two GPUs with these processes."""
    snapshot = Store([(name, 2) for name in NODES]).publish(1.0)
    processes = tuple(tuple(placed.get((name, slot), ())) for name in NODES for slot in range(2))
    nodes = tuple(replace(n, hostname=h) for n, h in zip(snapshot.nodes, hostnames, strict=True))
    return replace(snapshot, nodes=nodes, gpus=replace(snapshot.gpus, processes=processes))


def ranks(size: int = 4, job: str | None = None) -> Placed:
    return {
        (NODES[r // 2], r % 2): [Process(100 + r, "python", 500.0, job, str(r), str(r % 2), str(size))]
        for r in range(4)
    }


def cluster(folder: Path) -> Cluster:
    path = folder / "c.yaml"
    path.write_text(
        "name: c\nnodes:\n- {name: n1, type: hgx-h100, local: true}\n- {name: n2, type: hgx-h100, ssh: n2, u: 20}\n"
    )
    return catalog.cluster(str(path))


@pytest.mark.parametrize("job", [None, "77"])
def test_ranks_of_one_job_across_nodes(job: str | None) -> None:
    (found,) = from_processes(seen(ranks(job=job)))
    assert found.id == (job or "python/4")
    assert found.ranks == tuple(RankAt(r, NODES[r // 2], r % 2, 100 + r) for r in range(4))
    assert (found.world_size, found.nodes, found.gpus, found.said) == (4, NODES, 4, "")


def test_a_data_loader_is_not_a_second_rank() -> None:
    placed = ranks()
    placed["n1", 0].insert(0, replace(placed["n1", 0][0], pid=5, memory_mib=None))
    (found,) = from_processes(seen(placed))
    assert [at.pid for at in found.ranks] == [100, 101, 102, 103]


def test_processes_without_a_rank_only_where_they_hold_memory() -> None:
    placed: Placed = {
        ("n1", 0): [Process(1, "Xorg", None), Process(2, "python", 40.0)],
        ("n2", 1): [Process(3, "X", 0)],
    }
    (found,) = from_processes(seen(placed))
    assert (found.name, found.ranks, found.world_size) == (RANKLESS, (RankAt(None, "n1", 0, 2),), None)


@pytest.mark.parametrize("rank", ["x", "-1", "", "1e3", "٣", "9" * 30, "²"])
def test_a_rank_that_is_no_number_is_none(rank: str) -> None:
    (found,) = from_processes(seen({("n1", 0): [Process(1, "python", 9.0, None, rank, "0", "4")]}))
    assert found.ranks == (RankAt(None, "n1", 0, 1),)


@pytest.mark.parametrize(("size", "said"), [(8, "4 of 8 ranks were seen"), (2, "a rank is not below the 2"), (4, "")])
def test_what_does_not_fit_is_said(size: int, said: str) -> None:
    (found,) = from_processes(seen(ranks(size)))
    assert said in found.said
    assert bool(found.said) == bool(said)


@pytest.mark.parametrize("host", ["n1", "N1", "n1.lab", "host-1", "host-1.lab"])
def test_slurms_hosts_are_our_nodes(host: str, tmp_path: Path) -> None:
    job = Job("7", "t", "ann", "RUNNING", (host,), 2, {host: (1, 6)}, 5.0, "train")
    (found,) = from_slurm([job], cluster(tmp_path), seen({}))
    assert (found.nodes, found.ranks) == (("n1",), (RankAt(None, "n1", 1, None),)), "slot 6 is not shown by the node"


def test_a_short_name_of_two_nodes_names_neither(tmp_path: Path) -> None:
    snapshot = seen({}, ("gpu.east", "gpu.west"))
    assert from_slurm([Job("7", hosts=("gpu",), state="RUNNING")], cluster(tmp_path), snapshot) == ()
    (found,) = from_slurm([Job("7", hosts=("gpu.west", "far"), state="RUNNING")], cluster(tmp_path), snapshot)
    assert (found.nodes, found.said) == (("n2",), "1 of its hosts are not in the inventory")


def test_ended_jobs_are_left_out_and_waiting_ones_kept(tmp_path: Path) -> None:
    told = [
        Job("1", state="COMPLETED", hosts=("n1",)),
        Job("2", state="PENDING"),
        Job("3", state="RUNNING", hosts=("z",)),
    ]
    assert [job.id for job in from_slurm(told, cluster(tmp_path), seen({}))] == ["2"]


def test_one_entry_a_job(tmp_path: Path) -> None:
    snapshot = seen(ranks(job="7"))
    slurm = from_slurm([Job("7", "t", "ann", "RUNNING", NODES, 4, {"n1": (0, 1)})], cluster(tmp_path), snapshot)
    hook = JobStatus("pretrain", "n1", "/run/hook.sock", True, world_size=4, can=frozenset({"rebalance"}))
    (found,) = merged(slurm, from_processes(snapshot), [hook])
    assert (found.id, found.name, found.user, found.source) == ("7", "pretrain", "ann", "Slurm, processes, hook")
    assert [at.rank for at in found.ranks] == [0, 1, 2, 3]
    assert found.said == "takes rebalance"


def test_a_hook_without_other_signs_is_a_job() -> None:
    (found,) = merged((), (), [JobStatus("a", "n1", "/s", False, "refused", greeted=False)])
    assert (found.name, found.source, found.said) == ("a", "hook", "its hook is not attached: refused")


TEXTS = st.one_of(st.none(), st.sampled_from(["0", "1", "3", "-1", "", "x", "٣", "4"]), st.text(max_size=6))
PROCESSES = st.builds(
    Process, st.integers(1, 9), st.text(max_size=5), st.one_of(st.none(), st.floats(0, 9)), TEXTS, TEXTS, TEXTS, TEXTS
)


@given(st.dictionaries(st.tuples(st.sampled_from(NODES), st.integers(0, 1)), st.lists(PROCESSES, max_size=4)))
def test_no_rank_is_invented(placed: Placed) -> None:
    for job in merged((), from_processes(seen(placed))):
        for at in job.ranks:
            told = {p.rank for p in placed[at.node, at.slot] if p.pid == at.pid}
            assert told
            assert at.rank is None or at.rank in {int(t) for t in told if t and t.isascii() and t.isdecimal()}
