"""One alarm for a hot rack, not 64: what is amiss at many places at once is told once, at the place that they share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.act.alarm import Raised

MANY = 4
"""More alarms of one kind in a node, in a rack or at the site than this become one."""
WORDS = {
    "heat": "GPUs are hot",
    "slow": "GPUs are slowed by their own hardware",
    "coming": "forecasts of a slowdown",
    "odd": "GPUs are hotter than they should be",
    "sensor": "temperature readings are not believed",
    "node": "nodes do not answer",
    "link": "links are not well",
    "links": "nodes have links near their peak",
    "limit": "nodes lost limits that were set here",
}


@dataclass(frozen=True, slots=True)
class _Counted:
    """An alarm, how many it stands for, and on how many nodes."""

    raised: Raised
    count: int
    nodes: frozenset[str]


def grouped(raised: Sequence[Raised], rack_of: Mapping[str, str], standing: Collection[str]) -> list[Raised]:
    """The same, with groups in place of their members; a group whose key is in `standing` lasts until its last member
    is gone, so that it does not fall apart and come together again around `MANY`."""
    placeless = [r for r in raised if not r.node]
    counted = [_Counted(r, 1, frozenset({r.node})) for r in raised if r.node]
    counted = _at(counted, lambda r: (f"{r.kind}:{r.node}:*", r.node), standing)
    counted = _at(
        counted, lambda r: (f"{r.kind}:rack:{rack_of.get(r.node, '')}:*", f"rack {rack_of.get(r.node, '')}"), standing
    )
    counted = _at(counted, lambda r: (f"{r.kind}:*", "the site"), standing)
    return [*placeless, *(c.raised for c in counted)]


def _at(
    counted: Sequence[_Counted], place_of: Callable[[Raised], tuple[str, str]], standing: Collection[str]
) -> list[_Counted]:
    """One level: what shares a place is one when it is many, or was one before."""
    places: dict[tuple[str, str], list[_Counted]] = {}
    for one in counted:
        places.setdefault(place_of(one.raised), []).append(one)
    out: list[_Counted] = []
    for (key, place), members in places.items():
        out += [_group(key, place, members)] if len(members) > MANY or key in standing else members
    return out


def _group(key: str, place: str, members: Sequence[_Counted]) -> _Counted:
    first = min(members, key=lambda m: m.raised.priority).raised
    count, nodes = sum(m.count for m in members), frozenset().union(*(m.nodes for m in members))
    where = f" on {len(nodes)} nodes" if 1 < len(nodes) < count else ""
    text = f"{place}: {count} {WORDS.get(first.kind, 'alarms of one kind')}{where}; the first: {_one(first.text)}"
    return _Counted(replace(first, key=key, text=text), count, nodes)


def _one(text: str) -> str:
    """A group's example is its own first one, not a list of lists."""
    return text.rpartition("; the first: ")[2]
