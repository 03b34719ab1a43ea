"""A measured run as its source gives it: what was trained, how, on what, and what came out. Any key may be missing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engine.profile import document
from engine.profile.document import ProfileError
from engine.profile.hardware import Count, NonNegative, Positive


class RunModel(msgspec.Struct, frozen=True, kw_only=True):
    """The transformer of a run; `head_dim` where it is not hidden / heads."""

    name: str = "model"
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count | None = None
    ffn: Count | None = None
    gated_mlp: bool = False
    vocab: Count = 50304
    tied_embeddings: bool = False
    seq: Count = 2048
    head_dim: Count | None = None
    experts: Count = 1
    topk: Count = 1
    shared_experts: Annotated[int, Meta(ge=0)] = 0
    dense_layers: Annotated[int, Meta(ge=0)] = 0


class RunParallel(msgspec.Struct, frozen=True, kw_only=True):
    """Group sizes; what is missing is 1, and `dp` what the GPUs leave over."""

    tp: Count = 1
    cp: Count = 1
    pp: Count = 1
    dp: Count | None = None
    ep: Count = 1
    vpp: Count | None = None
    zero: Annotated[int, Meta(ge=0, le=3)] | None = None
    zero_group: Count | None = None
    sequence_parallel: bool | None = None


class RunBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Sequences a microbatch on one device, and sequences an optimizer step."""

    micro: Count | None = None
    # `global` is a Python keyword.
    whole: Count | None = msgspec.field(default=None, name="global")


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One row. Keys that this version does not know are ignored: sources differ in what else they tell."""

    id: str
    hardware: str
    gpus: Count
    model: RunModel
    source: str = "unnamed"
    table: str = ""
    year: int | None = None
    framework: str | None = None
    note: str | None = None
    interconnect: str | None = None
    overlap: str | None = None
    gpus_per_node: Count = 8
    internode_gbps_per_node: Positive | None = None
    power_limit_w: Positive | None = None
    sm_clock_mhz: Positive | None = None
    precision: str = "bf16"
    recompute: str | None = None
    stack: str | None = None
    optimizer_bytes: NonNegative | None = None
    parallel: RunParallel = RunParallel()
    batch: RunBatch = RunBatch()
    measured: dict[str, Any] = {}

    @property
    def words(self) -> str:
        """Everything said in words, lower case."""
        return " ".join(filter(None, (self.note, self.interconnect, self.overlap, self.recompute))).lower()

    @property
    def node_gbps(self) -> float | None:
        """Network of one node, Gbit/s: the number when given, else read from `interconnect`."""
        if self.internode_gbps_per_node:
            return self.internode_gbps_per_node
        text = (self.interconnect or "").lower()
        found = re.search(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*gb(?:it)?(?:/s|ps)", text)
        if not found:
            return None
        ports = int(found.group(1) or (self.gpus_per_node if "per gpu" in text else 1))
        return ports * float(found.group(2))

    @property
    def zero_group(self) -> int | None:
        """Ranks that share optimizer states, where the row says that this is fewer than all."""
        if self.parallel.zero_group:
            return self.parallel.zero_group
        found = re.search(r"zero-?1[^;]*inside (\d+) (gpus|dp ranks)", self.words)
        if not found:
            return None
        size = int(found.group(1))
        return max(1, size // (self.parallel.tp if found.group(2) == "gpus" else 1))


class Rows(msgspec.Struct, frozen=True):
    """A file of runs. Rows are read one by one, so that a bad one does not hide the others."""

    runs: list[Any]


def read(path: Path) -> tuple[list[Run], list[tuple[str, str]]]:
    """The rows of a file, and (id, reason) of each row that is not one."""
    rows, good, bad = document.load(path, Rows).runs, [], []
    for number, row in enumerate(rows, 1):
        name = str(row.get("id", f"row {number}")) if isinstance(row, dict) else f"row {number}"
        try:
            good.append(msgspec.convert(row, Run))
        except msgspec.ValidationError as error:
            bad.append((name, _why(str(error))))
    if not rows:
        raise ProfileError(f"{path}: 'runs' is empty; there is nothing to compare.")
    return good, bad


def _why(message: str) -> str:
    """msgspec's message as a sentence that begins with the place in the row."""
    text, _, where = message.partition(" - at `$")
    place = where.strip("`.")
    missing = re.fullmatch(r"Object missing required field `(.*)`", text)
    told = f"the key '{missing.group(1)}' is missing" if missing else document.plain(text)
    return f"{place}: {told}." if place else f"{told}."
