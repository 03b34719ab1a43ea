"""The links of a node that is read through its tools: NVLinks as they are printed, PCIe ports, network ports."""

from __future__ import annotations

import re
from typing import NamedTuple

from msgspec.structs import replace

from engine.telemetry.reading import LinkFacts, Tick
from engine.telemetry.shell.gpus import Gpus, Slot
from engine.telemetry.tools.cell import lines, number
from engine.telemetry.tools.infiniband import Port, ports
from engine.telemetry.tools.nvlink import GpuLinks

MOST_PORTS = 256
# Payload of a PCIe lane in one direction, GB/s, by generation.
_LANE_GB_S = {1.0: 0.25, 2.0: 0.5, 3.0: 0.985, 4.0: 1.969, 5.0: 3.938, 6.0: 7.563}
_NET = re.compile(r"/sys/class/net/([^/:\s]{1,40})/([\w/]{1,40}):(.*)", re.A)
_HOOK = re.compile(r"hook:(/\S{1,190}\.sock)")
_NOTED = ("all inactive", "hidden by MIG")


class _Row(NamedTuple):
    link: LinkFacts
    rx: float | None = None
    tx: float | None = None
    errors: float | None = None


class Links:
    """What is known of the links, and the rates of network ports from what they counted."""

    def __init__(self) -> None:
        self.load: float | None = None
        self.hooks: tuple[str, ...] = ()
        self._nvlinks: dict[int, tuple[LinkFacts, ...]] = {}
        self._errors: dict[tuple[int, str], float | None] = {}
        self._ports: tuple[Port, ...] = ()
        self._counted: dict[tuple[str, str], tuple[float, float]] = {}
        self._rates: dict[tuple[str, str], float | None] = {}
        self._counted_at = 0.0
        self._told: tuple[LinkFacts, ...] | None = None
        self._errors_told: list[float | None] | None = None

    def tell_all(self) -> None:
        """Everything is to be told anew: the store forgot it."""
        self._told = None

    def take_nvlinks(self, gpus: Gpus, said: dict[int, GpuLinks]) -> None:
        """`nvidia-smi nvlink -s`. Inactive, not to be read in MIG mode, and not there are different things."""
        slots = gpus.by_index()
        for place, slot in enumerate(gpus.slots):
            if slot.lost and place in self._nvlinks:
                self._nvlinks[place] = _all(self._nvlinks[place], "unknown")
        for index, links in said.items():
            if index in slots:
                self._nvlinks[slots[index]] = self._of_gpu(slots[index], links)
                gpus.slots[slots[index]].links_note = links.note if links.state in _NOTED else None

    def _of_gpu(self, place: int, said: GpuLinks) -> tuple[LinkFacts, ...]:
        if said.state == "links":
            return tuple(LinkFacts(place, f.kind, f.name, f.state, f.gb_s) for f in said.links)
        if said.state == "none":
            return ()
        state = "inactive" if said.state == "all inactive" else "unknown"
        known = self._nvlinks.get(place, ())
        if not known and said.state == "unknown":
            return ()
        return _all(known or (LinkFacts(place, "nvlink", "NVLinks"),), state)

    def take_errors(self, gpus: Gpus, said: dict[int, dict[int, float | None]]) -> None:
        """`nvidia-smi nvlink -e`."""
        slots = gpus.by_index()
        self._errors = {
            (slots[index], f"NVLink {link}"): count
            for index, counts in said.items()
            if index in slots
            for link, count in counts.items()
        }

    def take_counters(self, text: str, uptime: float | None, now: float) -> None:
        """The kernel's files: what ports counted, by the node's own clock where it tells it."""
        self._ports = (*ports(text)[:MOST_PORTS], *_ethernet(text))
        at = now if uptime is None else uptime
        for port in self._ports:
            for way, count in (("rx", port.rx_bytes), ("tx", port.tx_bytes)):
                self._rates[port.link.name, way] = self._rate((port.link.name, way), count, at)
        self._counted_at = now
        load = re.search(r"^/proc/loadavg:([\d.]{1,12}) ", text, re.M | re.A)
        self.load = number(load[1]) if load else None
        self.hooks = tuple(dict.fromkeys(found[1] for line in lines(text) if (found := _HOOK.fullmatch(line))))

    def _rate(self, key: tuple[str, str], count: float | None, at: float) -> float | None:
        """MB/s since the last look; None where the counter is new, began anew, or is not known."""
        before = self._counted.pop(key, None)
        if count is None:
            return None
        self._counted[key] = at, count
        if before is None or at <= before[0] or count < before[1]:
            return None
        return (count - before[1]) / (at - before[0]) / 1e6

    def fill(self, tick: Tick, gpus: Gpus, fresh_s: float, now: float) -> Tick:
        """The tick with its links: facts and errors where they changed, rates unless they are old."""
        current = now - self._counted_at <= fresh_s
        rows = [_Row(fact, errors=self._errors.get((fact.gpu, fact.name))) for fact in self._of_gpus(gpus)]
        for port in self._ports:
            rx, tx = (self._rates.get((port.link.name, way)) if current else None for way in ("rx", "tx"))
            rows.append(_Row(port.link, rx, tx, port.errors))
        facts, errors = tuple(row.link for row in rows), [row.errors for row in rows]
        changed = facts != self._told
        tell_errors = errors != self._errors_told if not changed else any(e is not None for e in errors)
        self._told, self._errors_told = facts, errors
        return replace(
            tick,
            links=facts if changed else None,
            rx_mb_s=[row.rx for row in rows],
            tx_mb_s=[row.tx for row in rows],
            link_errors=errors if tell_errors else None,
            load=self.load if current else None,
            hooks=self.hooks,
        )

    def _of_gpus(self, gpus: Gpus) -> list[LinkFacts]:
        found: list[LinkFacts] = []
        for place, slot in enumerate(gpus.slots):
            found += self._nvlinks.get(place, ())
            pcie = _pcie(place, slot)
            found += [pcie] if pcie else []
        return found


def _all(links: tuple[LinkFacts, ...], state: str) -> tuple[LinkFacts, ...]:
    return tuple(LinkFacts(f.gpu, f.kind, f.name, state) for f in links)


def _pcie(place: int, slot: Slot) -> LinkFacts | None:
    """The width tells a bad seat; the generation drops by itself when the port is idle, so the best one counts."""
    generation = slot.pcie_gen_max or slot.now.pcie_gen
    lane = _LANE_GB_S.get(generation) if generation else None
    width, best = slot.now.pcie_width, slot.pcie_width_max or slot.now.pcie_width
    if slot.lost or lane is None or best is None or not 0 < best <= 32 or (width is not None and not 0 < width <= 32):
        return None
    return LinkFacts(place, "pcie", "PCIe", "active", lane * (width or best), lane * best)


def _ethernet(text: str) -> tuple[Port, ...]:
    """Network ports that are not InfiniBand's, from the lines `path:value`."""
    said: dict[str, dict[str, str]] = {}
    for line in lines(text):
        found = _NET.fullmatch(line.strip())
        if found and (found[1] in said or len(said) < MOST_PORTS):
            said.setdefault(found[1], {})[found[2]] = found[3].strip()
    return tuple(_port(name, values) for name, values in said.items())


def _port(name: str, said: dict[str, str]) -> Port:
    speed = _count(said, "speed")
    up = said.get("operstate")
    state = "unknown" if up is None else "active" if up == "up" else "inactive"
    link = LinkFacts(-1, "nic", name, state, speed / 8000 if speed else None)
    return Port(link, rx_bytes=_count(said, "statistics/rx_bytes"), tx_bytes=_count(said, "statistics/tx_bytes"))


def _count(said: dict[str, str], name: str) -> float | None:
    text = said.get(name, "")
    return float(text) if re.fullmatch(r"\d{1,20}", text, re.A) else None
