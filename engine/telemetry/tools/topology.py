"""nvidia-smi topo -m: what joins which devices, and where the GPUs sit. Read by the header's words, whatever it has."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from engine.telemetry.text import clean
from engine.telemetry.tools.cell import lines

_ANSI = re.compile(r"\x1b?\[[\d;]{0,8}m|\x1b\[[0-9;?]{0,16}[ -/]?[@-~]")
_GPU = re.compile(r"GPU(\d{1,4})", re.A)
_LEGEND = re.compile(r"\s*(NIC\d{1,4})\s*:\s*(\S+)\s*", re.A)
_NVLINK = re.compile(r"NV(\d{1,3})", re.A)
_CLASS = re.compile(r"X|NV\d{1,3}|PIX|PXB|PHB|NODE|SYS|PSB|SOC|N/A", re.A)
_CPUS = re.compile(r"\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*", re.A)
# Nearest first. Across sockets, SYS, no port is near.
_NEAR = ("PIX", "PXB", "PHB", "NODE")
_TITLES = ("CPU", "NUMA")


@dataclass(frozen=True)
class Topology:
    """Devices by name, a NIC by its own where the legend tells it; GPUs by index. `pairs` as each row has them,
    `nvlinks` how many join two GPUs, `nearest_nic` the ports of the best class that a GPU has, none across sockets."""

    pairs: dict[tuple[str, str], str] = field(default_factory=dict)
    nvlinks: dict[tuple[int, int], int] = field(default_factory=dict)
    numa: dict[int, int] = field(default_factory=dict)
    cpus: dict[int, str] = field(default_factory=dict)
    nearest_nic: dict[int, tuple[str, ...]] = field(default_factory=dict)


def topology(text: str) -> Topology:
    """The matrix; empty where there is none."""
    plain = [_ANSI.sub("", line) for line in lines(text, 65536)]
    legend = {found[1]: clean(found[2], 40) for line in plain if (found := _LEGEND.fullmatch(line))}
    devices: list[str] = []
    titles: list[str] = []
    out = Topology()
    for line in plain:
        head = _header(line)
        if head is not None and (not devices or line[:1].isspace()):
            devices, titles = head
        elif devices:
            _row(out, line, [legend.get(name, name) for name in devices], titles, legend)
    _derive(out)
    return out


def _header(line: str) -> tuple[list[str], list[str]] | None:
    """The devices, and which columns follow them; None for a line that is no header."""
    words = line.split()
    if not any(_GPU.fullmatch(word) for word in words) or any(_CLASS.fullmatch(word) for word in words):
        return None
    end = next((i for i, word in enumerate(words) if word in _TITLES), len(words))
    titles = [title for title in _TITLES if f"{title} Affinity" in " ".join(words)]
    return [clean(word, 40) for word in words[:end] if word != "GPU"][:512], titles


def _row(out: Topology, line: str, devices: list[str], titles: list[str], legend: dict[str, str]) -> None:
    cells = [cell.strip() for cell in line.split("\t")] if "\t" in line else line.split()
    if not cells:
        return
    name = legend.get(cells[0], clean(cells[0], 40))
    classes = cells[1 : len(devices) + 1]
    if name not in devices or not classes or not all(_CLASS.fullmatch(c) for c in classes if c):
        return
    for other, joined in zip(devices, classes, strict=False):
        if other != name and joined and joined != "X":
            out.pairs.setdefault((name, other), joined)
    gpu = _GPU.fullmatch(name)
    if gpu:
        _place(out, int(gpu[1]), cells[len(devices) + 1 :], titles)


def _place(out: Topology, gpu: int, rest: list[str], titles: list[str]) -> None:
    said = dict(zip(titles, rest, strict=False))
    if _CPUS.fullmatch(said.get("CPU", "")):
        out.cpus.setdefault(gpu, said["CPU"][:400])
    if re.fullmatch(r"\d{1,4}", said.get("NUMA", ""), re.A):
        out.numa.setdefault(gpu, int(said["NUMA"]))


def _derive(out: Topology) -> None:
    """The count of links between GPUs, and the nearest ports, from the GPUs' own rows: a NIC's may say otherwise."""
    near: dict[int, dict[str, list[str]]] = {}
    for (one, other), joined in out.pairs.items():
        a, b, links = _GPU.fullmatch(one), _GPU.fullmatch(other), _NVLINK.fullmatch(joined)
        if a and b and links:
            low, high = sorted((int(a[1]), int(b[1])))
            out.nvlinks.setdefault((low, high), int(links[1]))
        elif a and not b:
            near.setdefault(int(a[1]), {}).setdefault(joined, []).append(other)
    for gpu, by_class in near.items():
        best = next((by_class[joined] for joined in _NEAR if joined in by_class), None)
        if best:
            out.nearest_nic[gpu] = tuple(best)
