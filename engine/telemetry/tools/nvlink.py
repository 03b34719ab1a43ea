"""nvidia-smi nvlink: the state of each GPU's links with --status, their error counters with -e."""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.telemetry.reading import LinkFacts
from engine.telemetry.text import clean
from engine.telemetry.tools.cell import lines, number
from engine.telemetry.tools.nvidia_said import gpu_line

MOST = 64
"""Links of one GPU that are taken; no GPU has more."""

_LINK = re.compile(r"\s*Link\s+(\d{1,3})\s*:\s*(.*?)\s*", re.I | re.A)
_RATE = re.compile(r"([\d.]{1,12})\s*GB/s", re.I | re.A)
# What is printed in place of links: the state, how to know it, and what to tell.
_INSTEAD = (
    ("all inactive", re.compile(r"all links are in-?active", re.I), "all its NVLinks are inactive"),
    ("hidden by MIG", re.compile(r"\bmig\b", re.I), "NVLinks cannot be read in MIG mode"),
    ("none", re.compile(r"(?:not|n't) (?:have|support|have or support) .*nvlink", re.I), "it has no NVLink"),
)
_COUNTED = re.compile(r"(?:replay|recovery|crc) errors?\s*:\s*(.*)", re.I)


@dataclass(frozen=True)
class GpuLinks:
    """One GPU's links. `state`: "links" where they are listed; "all inactive", which is a fault; "hidden by MIG", of
    which nothing is known; "none" where it has no NVLink; "unknown" where nothing that is understood is said."""

    links: tuple[LinkFacts, ...] = ()
    state: str = "unknown"
    note: str | None = None


def status(text: str) -> dict[int, GpuLinks]:
    """`nvidia-smi nvlink --status`, by GPU. A link with a rate is active, also one slow enough to be degraded."""
    return {gpu: _links(gpu, said) for gpu, said in _sections(text).items()}


def errors(text: str) -> dict[int, dict[int, float | None]]:
    """`nvidia-smi nvlink -e`: replays, recoveries and CRC errors of each link since the driver started, summed."""
    return {gpu: _counts(said) for gpu, said in _sections(text).items()}


def _sections(text: str) -> dict[int, list[str]]:
    """The lines below each GPU's. What comes before the first belongs to none."""
    found: dict[int, list[str]] = {}
    below: list[str] = []
    for line in lines(text):
        gpu = gpu_line(line)
        if gpu is not None:
            below = found.setdefault(gpu[0], [])
        elif line.strip():
            below.append(line)
    return found


def _links(gpu: int, said: list[str]) -> GpuLinks:
    links: dict[int, LinkFacts] = {}
    for line in said:
        found = _LINK.fullmatch(line)
        if found and len(links) < MOST:
            links[int(found[1])] = _link(gpu, int(found[1]), found[2])
    if links:
        return GpuLinks(tuple(link for _, link in sorted(links.items())), "links")
    for line in said:
        for state, pattern, note in _INSTEAD:
            if pattern.search(line):
                return GpuLinks((), state, note)
    return GpuLinks((), "unknown", clean(said[0].strip()) if said else None)


def _link(gpu: int, link: int, said: str) -> LinkFacts:
    rate = _RATE.fullmatch(said)
    gb_s = number(rate[1]) if rate else None
    if gb_s is not None:
        return LinkFacts(gpu, "nvlink", f"NVLink {link}", "active" if gb_s > 0 else "unknown", gb_s or None)
    return LinkFacts(gpu, "nvlink", f"NVLink {link}", "inactive" if "inactive" in said.lower() else "unknown")


def _counts(said: list[str]) -> dict[int, float | None]:
    found: dict[int, float | None] = {}
    for line in said:
        link = _LINK.fullmatch(line)
        counted = _COUNTED.fullmatch(link[2]) if link else None
        if link is None or counted is None or len(found) >= MOST:
            continue
        count, before = number(counted[1]), found.setdefault(int(link[1]), None)
        if count is not None:
            found[int(link[1])] = count + (before or 0.0)
    return found
