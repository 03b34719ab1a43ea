"""Slurm's texts to jobs: which hosts, how many GPUs, which of them, for how long."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.telemetry.tools import slurm


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("n1", ("n1",)),
        ("n[1-3,7]", ("n1", "n2", "n3", "n7")),
        ("gpu[008-011]", ("gpu008", "gpu009", "gpu010", "gpu011")),
        ("r[1-2]n[01-02],login", ("r1n01", "r1n02", "r2n01", "r2n02", "login")),
        ("n[1-2].cluster", ("n1.cluster", "n2.cluster")),
        ("(null)", ()),
        ("", ()),
        ("(Priority)", ()),
        ("None assigned", ()),
    ],
)
def test_lists_of_hosts(text: str, right: tuple[str, ...]) -> None:
    assert slurm.hosts(text) == right


@pytest.mark.parametrize(
    "text", ["n[1-999999999]", "n[1-70000][1-70000]", "n[1-65536][5-3],m[1-9]", ",".join(["a"] * 10**5)]
)
def test_lists_of_hosts_are_bounded(text: str) -> None:
    assert len(slurm.hosts(text)) <= slurm.MOST_HOSTS


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("1-02:03:04", 93784.0),
        ("10:20:30", 37230.0),
        ("4:59", 299.0),
        ("0:00", 0.0),
        ("2-01", 176400.0),
        ("N/A", None),
        ("INVALID", None),
        ("UNLIMITED", None),
        ("7", None),
        ("", None),
    ],
)
def test_durations(text: str, right: float | None) -> None:
    assert slurm.duration(text) == right


COLUMNS = (
    "JOBID",
    "PARTITION",
    "NAME",
    "USER",
    "STATE",
    "TIME",
    "NODES",
    "NODELIST(REASON)",
    "TRES_PER_NODE",
    "TRES_ALLOC",
)
ROWS = [
    ("81", "gpu", "train", "ann", "RUNNING", "1-00:00:01", "2", "n[7-8]", "N/A", "cpu=8,node=2,gres/gpu=12"),
    ("82_5", "gpu", "a|b", "bob", "R", "5:00", "2", "n[1-2]", "gres/gpu:h100:4", ""),
    ("83_[1-9%2]", "gpu", "wait", "bob", "PD", "0:00", "1", "(Priority)", "N/A", "cpu=1,node=1"),
    ("84", "gpu", "typed", "eve", "CG", "1:00:00", "1", "n9", "gpu:2", "gres/gpu:a100=1,gres/gpu:h100=2"),
]


@pytest.mark.parametrize("separator", ["|", "|#"])
@pytest.mark.parametrize("header", [True, False])
def test_squeue_with_its_separators(separator: str, header: bool) -> None:
    rows = [COLUMNS, *ROWS] if header else ROWS
    text = "Welcome | to all\n" + "\n".join(separator.join(row) for row in rows) + "\ncut|row\n"
    jobs = slurm.jobs_text(text, () if header else COLUMNS)
    assert [(j.id, j.name, j.user, j.state, j.hosts, j.gpus, j.run_s) for j in jobs] == [
        ("81", "train", "ann", "RUNNING", ("n7", "n8"), 12, 86401.0),
        ("82_5", "a|b", "bob", "RUNNING", ("n1", "n2"), 8, 300.0),
        ("83_[1-9%2]", "wait", "bob", "PENDING", (), None, None),
        ("84", "typed", "eve", "COMPLETING", ("n9",), 3, 3600.0),
    ]
    assert {j.partition for j in jobs} == {"gpu"}


DETAIL = """\
JobId=912 ArrayJobId=900 ArrayTaskId=12 JobName=a run NodeList=evil[1-9]
   UserId=ann(1001) GroupId=g(5) MCS_label=N/A
   JobState=RUNNING Reason=None Dependency=(null)
   RunTime=1-01:01:01 TimeLimit=2-00:00:00 TimeMin=N/A
   Partition=big AllocNode:Sid=login:1
   ReqNodeList=(null) ExcNodeList=x[1-5]
   NodeList=n[1-3]
   NumNodes=3 NumCPUs=96
   AllocTRES=cpu=96,node=3,gres/gpu=9
   JOB_GRES=gpu:h100:9
     Nodes=n[1-2] CPU_IDs=0-31 Mem=1 GRES=gpu:h100:4(IDX:0-1,6-7)
     Nodes=n3 CPU_IDs=0-31 Mem=1 GRES=gpu:h100:1(IDX:5),nic:1(IDX:0)
   Command=/home/ann/x.sh JobState=FAILED

JobId=913 JobName=next
   UserId=bob(1002) GroupId=g(5)
   JobState=PENDING Reason=Priority
   RunTime=00:00:00 TimeLimit=1:00
   Partition=big
   NodeList=(null)
   NumNodes=2-2
   TresPerNode=gres/gpu:8
"""


def test_scontrol_tells_which_gpus_of_which_host() -> None:
    running, pending = slurm.job_details("a banner\n" + DETAIL)
    assert (running.id, running.name, running.user, running.state) == (
        "900_12",
        "a run NodeList=evil[1-9]",
        "ann",
        "RUNNING",
    )
    assert (running.hosts, running.gpus, running.run_s, running.partition) == (("n1", "n2", "n3"), 9, 90061.0, "big")
    assert running.gpu_index == {"n1": (0, 1, 6, 7), "n2": (0, 1, 6, 7), "n3": (5,)}
    assert (pending.id, pending.hosts, pending.gpus, pending.run_s) == ("913", (), 16, None)


def test_gpus_are_counted_by_index_where_nothing_else_tells() -> None:
    text = "\n".join(line for line in DETAIL.splitlines() if "AllocTRES" not in line)
    assert slurm.job_details(text)[0].gpus == 9


def number(value: int) -> dict[str, Any]:
    return {"set": True, "infinite": False, "number": value}


UNSET = {"set": False, "infinite": False, "number": 0}
COMMON = {
    "job_id": 77,
    "name": "pre\x1b[31mtrain",
    "user_name": "ann",
    "partition": "big",
    "tres_per_node": "gres/gpu:8",
    "gres_detail": ["gpu:h100:2(IDX:0-1)", "gpu:h100:1(IDX:3)"],
}
NEW = {
    **COMMON,
    "job_state": ["RUNNING"],
    "nodes": "n[1-2]",
    "start_time": number(1000),
    "array_job_id": number(70),
    "array_task_id": number(0),
    "tres_alloc_str": "cpu=4,gres/gpu=3",
}
OLD = {
    **COMMON,
    "job_state": "RUNNING",
    "nodes": "",
    "job_resources": {"nodes": "n[1-2]"},
    "start_time": 1000,
    "array_job_id": 70,
    "array_task_id": 0,
    "tres_alloc_str": "cpu=4,gres/gpu:h100=3",
}


@pytest.mark.parametrize(("job", "now"), [(NEW, number(1250)), (OLD, 1250)])
def test_squeue_json_of_either_release(job: dict[str, Any], now: Any) -> None:
    text = "slurm: warning\n" + json.dumps({"meta": {}, "jobs": [job, 5, {}], "last_update": now}, indent=1)
    (found,) = slurm.jobs_json(text)
    assert (found.id, found.user, found.state, found.hosts) == ("70_0", "ann", "RUNNING", ("n1", "n2"))
    assert (found.gpus, found.run_s, found.gpu_index) == (3, 250.0, {"n1": (0, 1), "n2": (3,)})
    assert "\x1b" not in found.name


def test_what_squeue_json_leaves_unset_is_not_known() -> None:
    job = {
        "job_id": 5,
        "job_state": ["PENDING"],
        "start_time": UNSET,
        "array_job_id": number(0),
        "array_task_id": UNSET,
        "nodes": "",
        "tres_per_node": "",
        "gres_detail": [],
    }
    (found,) = slurm.jobs_json(json.dumps({"jobs": [job]}))
    assert found == slurm.Job(id="5", state="PENDING")
    assert slurm.jobs_json("squeue: error: Unable to contact slurm controller") == ()
