"""Slurm's jobs: squeue as JSON or text, scontrol show job -d, and lists of hosts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from engine.telemetry.text import clean
from engine.telemetry.tools.cell import label, lines
from engine.telemetry.tools.json_text import embedded

MOST_HOSTS = 65536
MOST_JOBS = 100_000

_NOBODY = ("", "(null)", "n/a", "none", "none assigned", "null")
_STATES = {
    "BF": "BOOT_FAIL",
    "CA": "CANCELLED",
    "CD": "COMPLETED",
    "CF": "CONFIGURING",
    "CG": "COMPLETING",
    "DL": "DEADLINE",
    "F": "FAILED",
    "NF": "NODE_FAIL",
    "OOM": "OUT_OF_MEMORY",
    "PD": "PENDING",
    "PR": "PREEMPTED",
    "R": "RUNNING",
    "RQ": "REQUEUED",
    "S": "SUSPENDED",
    "SO": "STAGE_OUT",
    "TO": "TIMEOUT",
}
# Titles of squeue's columns without signs, in the order of preference.
_TITLES: dict[str, tuple[str, ...]] = {
    "id": ("JOBARRAYID", "JOBID", "ARRAYJOBID"),
    "name": ("NAME", "JOBNAME"),
    "user": ("USER", "USERNAME"),
    "state": ("STATE", "ST", "STATECOMPACT"),
    "hosts": ("NODELIST", "NODELISTREASON", "REASONLIST"),
    "nodes": ("NODES", "NUMNODES"),
    "partition": ("PARTITION",),
    "per node": ("TRESPERNODE", "GRES"),
    "in all": ("TRESALLOC", "TRES"),
    "run": ("TIME", "TIMEUSED"),
}
_DURATION = re.compile(r"(?:(\d{1,6})-)?(\d{1,6})(?::(\d{1,2}))?(?::(\d{1,2}))?(?:\.\d{1,9})?", re.A)
_IN_ALL = re.compile(r"gres/gpu(:[^=,]*)?=(\d{1,9})", re.A)
_PER_NODE = re.compile(r"(?:gres[/:])?gpu(?::[A-Za-z][^:,=(]*)?(?:[:=](\d{1,6}))?(?:\(.*)?", re.A)
_SLOTS = re.compile(r"gpu(?![a-z])[^(),]{0,200}\(IDX:([\d,\-]{1,400})\)", re.A)
_BRACKETS = re.compile(r"([^\[\]]*)\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d{1,12})(?:-(\d{1,12}))?", re.A)
_FIRST_LINE = re.compile(
    r"JobId=(\S+)(?:\s+ArrayJobId=(\S+))?(?:\s+ArrayTaskId=(\S+))?(?:\s+(?!JobName=)[^\s=]+=\S*)*?(?:\s+JobName=(.*))?",
)


@dataclass(frozen=True)
class Job:
    """A job. `gpus` in all, None where that is not told; `gpu_index` which GPUs of each host; `run_s` since it
    started, None while it has not."""

    id: str
    name: str = ""
    user: str = ""
    state: str = ""
    hosts: tuple[str, ...] = ()
    gpus: int | None = None
    gpu_index: dict[str, tuple[int, ...]] = field(default_factory=dict)
    run_s: float | None = None
    partition: str = ""


def jobs_json(text: str) -> tuple[Job, ...]:
    """`squeue --json`, whose fields differ between releases. A job's time is that up to the list's own moment."""
    value, _ = embedded(text)
    jobs = value.get("jobs") if isinstance(value, dict) else None
    if not isinstance(jobs, list):
        return ()
    now = _number(value.get("last_update"))
    found = (_from_json(job, now) for job in jobs[:MOST_JOBS] if isinstance(job, dict))
    return tuple(job for job in found if job)


def jobs_text(text: str, columns: Sequence[str] = ()) -> tuple[Job, ...]:
    """squeue with `|#` or `|` between columns, by its header, or by `columns` where it has none."""
    titles = [_title(column) for column in columns]
    found: list[Job] = []
    for line in lines(text, 65536):
        cells = [cell.strip() for cell in line.split("|#" if "|#" in line else "|")]
        here = [_title(cell) for cell in cells]
        if any(title in here for title in _TITLES["id"]) and len(cells) > 1:
            titles = here
        elif titles and len(found) < MOST_JOBS:
            job = _from_row(titles, cells)
            found += [job] if job else []
    return tuple(found)


def job_details(text: str) -> tuple[Job, ...]:
    """`scontrol show job -d`: also which GPUs of each host a job has."""
    records: list[list[str]] = []
    for line in lines(text, 1 << 20):
        if line.startswith("JobId=") and len(records) < MOST_JOBS:
            records.append([line])
        elif records and line.strip():
            records[-1].append(line.strip())
    found = (_from_record(record) for record in records)
    return tuple(job for job in found if job)


def hosts(nodelist: str) -> tuple[str, ...]:
    """`node[1281-1288,1301],login1` as names, zeros kept; at most MOST_HOSTS, and none for (null) or a reason."""
    text = nodelist.strip()
    if text.lower() in _NOBODY or text.startswith("("):
        return ()
    every = (name for entry in _entries(text[: 1 << 20]) for name in _expanded(entry))
    return tuple(shown for name in islice(every, MOST_HOSTS) if (shown := clean(name, 120)))


def duration(text: str) -> float | None:
    """`2-05:32:24`, `17:22:49` or `4:59` in seconds."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        return None
    days, *parts = found.groups()
    clock = [int(part) for part in parts if part is not None]
    if not days and len(clock) < 2:
        return None
    # With days the first is hours, without them the last is seconds.
    clock = [*clock, 0, 0][:3] if days else [0] * (3 - len(clock)) + clock
    return float(int(days or 0) * 86400 + clock[0] * 3600 + clock[1] * 60 + clock[2])


def _entries(text: str) -> Iterator[str]:
    """Parts at the commas outside brackets."""
    start, depth = 0, 0
    for place, sign in enumerate(text):
        depth = max(0, depth + (sign == "[") - (sign == "]"))
        if sign == "," and not depth:
            yield text[start:place].strip()
            start = place + 1
    yield text[start:].strip()


def _expanded(entry: str, depth: int = 0) -> Iterator[str]:
    found = _BRACKETS.match(entry)
    if found is None or depth > 8:
        yield entry
        return
    for number in _numbers(found[2]):
        for rest in _expanded(entry[found.end() :], depth + 1):
            yield f"{found[1]}{number}{rest}"


def _numbers(text: str) -> Iterator[str]:
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
        if found is None or high < low:
            # No range: as it stands. Each part gives a name, so that the work is bounded by the names.
            yield part.strip()
        else:
            yield from (str(n).zfill(len(found[1])) for n in range(low, high + 1))


def _gpus(in_all: str, per_node: str, nodes: int | None) -> int | None:
    """GPUs of a job: what is allocated; else what was asked for on each node. What neither tells is not known."""
    counts = [(kind, int(count)) for kind, count in _IN_ALL.findall(in_all)]
    untyped = [count for kind, count in counts if not kind]
    if counts:
        return untyped[0] if untyped else sum(count for _, count in counts)
    asked = [found for part in per_node.split(",") if (found := _PER_NODE.fullmatch(part.strip()))]
    if not asked or not nodes:
        return None
    return nodes * sum(int(found[1] or 1) for found in asked)


def _slots(gres: str) -> tuple[int, ...]:
    """The GPUs' indices in `gpu:h100:4(IDX:0-1,6)`."""
    found: set[int] = set()
    for listed in _SLOTS.findall(gres[:4096]):
        for part in listed.split(","):
            span = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part, re.A)
            if span:
                found.update(range(int(span[1]), int(span[2] or span[1]) + 1))
    return tuple(sorted(found))


def _title(text: str) -> str:
    return re.sub(r"[^A-Z]", "", text[:80].upper())


def _from_row(titles: list[str], cells: list[str]) -> Job | None:
    extra = len(cells) - len(titles)
    name_at = next((titles.index(t) for t in _TITLES["name"] if t in titles), None)
    if extra > 0 and name_at is not None:
        # Of the columns only a name can hold the separator.
        cells = [*cells[:name_at], "|".join(cells[name_at : name_at + extra + 1]), *cells[name_at + extra + 1 :]]
    if len(cells) != len(titles):
        return None
    said = {
        key: next((cells[titles.index(title)] for title in wanted if title in titles), "")
        for key, wanted in _TITLES.items()
    }
    if not re.match(r"\d", said["id"], re.A):
        return None
    state = _STATES.get(said["state"].upper(), said["state"].upper())
    names = hosts(said["hosts"])
    nodes = int(said["nodes"]) if re.fullmatch(r"\d{1,6}", said["nodes"], re.A) else len(names) or None
    return Job(
        id=clean(said["id"], 80),
        name=clean(said["name"]),
        user=clean(said["user"], 80),
        state=clean(state, 40),
        hosts=names,
        gpus=_gpus(said["in all"], said["per node"], nodes),
        run_s=None if state == "PENDING" else duration(said["run"]),
        partition=clean(said["partition"], 80),
    )


def _from_record(record: list[str]) -> Job | None:
    first = _FIRST_LINE.fullmatch(record[0][:4096].strip())
    if first is None:
        return None
    said: dict[str, str] = {}
    index: dict[str, tuple[int, ...]] = {}
    for line in record[1:]:
        key, equals, value = line.partition("=")
        if not equals:
            continue
        if key == "Nodes":
            _add_slots(index, line)
        # Only a line's first key is looked at: others may stand in a path or a comment that a user wrote.
        said.setdefault(key, value.split(" ")[0])
    state = said.get("JobState", "")
    names = hosts(said.get("NodeList", ""))
    counted = sum(len(slots) for slots in index.values())
    nodes = re.match(r"\d{1,6}", said.get("NumNodes", ""), re.A)
    gpus = _gpus(
        said.get("AllocTRES", said.get("TRES", "")), said.get("TresPerNode", ""), int(nodes[0]) if nodes else None
    )
    task = first[2] and first[3]
    return Job(
        id=clean(f"{first[2]}_{first[3]}" if task else first[1], 80),
        name=clean(first[4] or ""),
        user=clean(said.get("UserId", "").partition("(")[0], 80),
        state=clean(state, 40),
        hosts=names,
        gpus=counted or None if gpus is None else gpus,
        gpu_index=index,
        run_s=None if state == "PENDING" else duration(said.get("RunTime", "")),
        partition=clean(said.get("Partition", ""), 80),
    )


def _add_slots(index: dict[str, tuple[int, ...]], line: str) -> None:
    """A line of the allocation: these hosts, these GPUs of each. A host may come again with other GPUs."""
    found = re.match(r"Nodes=(\S+)", line)
    gres = re.search(r"\sGRES=(\S*)", line)
    slots = _slots(gres[1]) if gres else ()
    for host in hosts(found[1]) if found and slots else ():
        index[host] = tuple(sorted({*index.get(host, ()), *slots}))


def _from_json(job: dict[str, Any], now: float | None) -> Job | None:
    number = _number(job.get("job_id"))
    if number is None:
        return None
    array, task = _number(job.get("array_job_id")), _number(job.get("array_task_id"))
    state = _state(job.get("job_state"))
    names = hosts(_nodes(job))
    started = _number(job.get("start_time"))
    ran = None if now is None or not started or started > now or state == "PENDING" else now - started
    elapsed = job["time"].get("elapsed") if isinstance(job.get("time"), dict) else None
    asked = _number(job.get("node_count"))
    return Job(
        id=f"{array:.0f}_{task:.0f}" if array and task is not None else f"{number:.0f}",
        name=_text(job.get("name")),
        user=_text(job.get("user_name")) or _text(job.get("user")),
        state=state,
        hosts=names,
        gpus=_gpus(
            _text(job.get("tres_alloc_str"), 4096) or _text(job.get("gres_alloc"), 4096),
            _text(job.get("tres_per_node"), 4096),
            len(names) or (int(asked) if asked is not None and 0 < asked <= MOST_HOSTS else None),
        ),
        gpu_index=_json_index(job.get("gres_detail"), names),
        run_s=_number(elapsed) if ran is None and state != "PENDING" else ran,
        partition=_text(job.get("partition")),
    )


def _nodes(job: dict[str, Any]) -> str:
    """The hosts, where the release puts them."""
    resources = job.get("job_resources")
    inner = resources.get("nodes") if isinstance(resources, dict) else None
    listed = inner.get("list") if isinstance(inner, dict) else inner
    return next((text for text in (job.get("nodes"), listed) if isinstance(text, str) and text.strip()), "")


def _json_index(details: Any, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """One text a host, in the hosts' order; a list of another length cannot be told apart."""
    if not isinstance(details, list) or len(details) != len(names):
        return {}
    found = {host: _slots(text) for host, text in zip(names, details, strict=True) if isinstance(text, str)}
    return {host: slots for host, slots in found.items() if slots}


def _number(value: Any) -> float | None:
    """A number, plain, as text, or as {"set": …, "infinite": …, "number": …}."""
    if isinstance(value, dict):
        unset = value.get("set") is False or value.get("infinite") is True
        return None if unset or isinstance(value.get("number"), dict) else _number(value.get("number"))
    if isinstance(value, str) and re.fullmatch(r"\d{1,15}", value, re.A):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < 2**53 and math.isfinite(value) else None


def _state(value: Any) -> str:
    """The state; of several, such as RUNNING and COMPLETING, the last, which is what it is doing now."""
    words: Iterable[Any] = value if isinstance(value, list) else [value]
    said = [clean(word, 40).upper() for word in words if isinstance(word, str)]
    return _STATES.get(said[-1], said[-1]) if said else ""


def _text(value: Any, limit: int = 200) -> str:
    return clean(value, limit) if isinstance(value, str) and label(value, limit) is not None else ""
