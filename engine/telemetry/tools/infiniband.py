"""InfiniBand ports: /sys/class/infiniband as `grep -r` prints it, and ibstat."""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.telemetry.reading import LinkFacts
from engine.telemetry.text import clean
from engine.telemetry.tools.cell import label, lines

_SYSFS = re.compile(r"(?:.*/)?([^/\s]{1,64})/ports/(\d{1,4})/([\w/]{1,80}):(.*)", re.A)
_RATE = re.compile(r"([\d.]{1,10})\s*(?:Gb/sec.*)?", re.I | re.A)
_WORD_BYTES = 4.0
# The specification's counters stop at their ceiling: 8 or 16 bits for errors, 32 for data on old firmware.
_CEILING = {"link_downed": 255, "link_error_recovery": 255, "symbol_error": 65535, "port_rcv_errors": 65535}
_OLD_DATA = 2**32 - 1
_ERRORS = ("symbol_error", "link_downed", "port_rcv_errors")
_DIED = re.compile(r"ibpanic|ibwarn|failed|error|not found|no such", re.I)
MOST = 1024


@dataclass(frozen=True)
class Port:
    """A port. `rx_bytes` and `tx_bytes` count up; `errors` are symbol errors, lost links and bad packets together, at
    least that many where a counter of `saturated` stands at its ceiling; None is not known."""

    link: LinkFacts
    layer: str | None = None
    physical: str | None = None
    rx_bytes: float | None = None
    tx_bytes: float | None = None
    errors: float | None = None
    saturated: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ibstat:
    """What ibstat printed before it ended; `trouble` where it ended badly."""

    ports: tuple[Port, ...] = ()
    trouble: str | None = None


def ports(text: str) -> tuple[Port, ...]:
    """`grep -r . /sys/class/infiniband/*/ports/*`: lines `path:value`, in any order."""
    said: dict[tuple[str, int], dict[str, str]] = {}
    for line in lines(text):
        found = _SYSFS.fullmatch(line.strip())
        if found and (len(said) < MOST or (found[1], int(found[2])) in said):
            said.setdefault((found[1], int(found[2])), {})[found[3]] = found[4].strip()
    return tuple(_port(device, port, values) for (device, port), values in sorted(said.items(), key=_natural))


def ibstat(text: str) -> Ibstat:
    """`ibstat`. It stops at the first device that it cannot open: what came before stands."""
    found: dict[tuple[str, int], dict[str, str]] = {}
    device, port, trouble = "", None, None
    for line in lines(text):
        adapter = re.match(r"\s*CA '([^']{1,64})'", line)
        number = re.match(r"\s*Port (\d{1,4}):\s*$", line, re.A)
        key, colon, value = line.partition(":")
        if adapter:
            device, port = adapter[1], None
        elif number and device and len(found) < MOST:
            port = int(number[1])
            found.setdefault((device, port), {})
        elif not line.startswith((" ", "\t")) and _DIED.search(line):
            trouble = trouble or clean(line.strip())
        elif colon and port is not None:
            found[device, port].setdefault(key.strip().lower().replace(" ", "_"), value.strip())
    return Ibstat(tuple(_port(device, port, values) for (device, port), values in found.items()), trouble)


def _natural(item: tuple[tuple[str, int], object]) -> tuple[list[tuple[int, str]], int]:
    (device, port), _ = item
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d{1,9})", device)], port


def _port(device: str, port: int, said: dict[str, str]) -> Port:
    rate = _RATE.fullmatch(said.get("rate", ""))
    physical = said.get("phys_state", said.get("physical_state", ""))
    name = clean(device if port == 1 else f"{device}/{port}", 40)
    gb_s = _positive(rate[1]) if rate else None
    at_ceiling = tuple(n for n, top in _CEILING.items() if (_count(said, n) or 0) >= top)
    known = [count for count in (_count(said, n) for n in _ERRORS) if count is not None]
    return Port(
        LinkFacts(-1, "nic", name, _state(said.get("state"), physical), None if gb_s is None else gb_s / 8),
        label(said.get("link_layer")),
        label(physical),
        _bytes(said, "port_rcv_data"),
        _bytes(said, "port_xmit_data"),
        sum(known) if known else None,
        at_ceiling,
    )


def _state(said: str | None, physical: str) -> str:
    state = (said or "").lower().partition(":")
    word = (state[2] or state[0]).strip()
    if not word:
        return "unknown"
    linked = not physical or "linkup" in physical.lower().replace(" ", "")
    return "active" if word == "active" and linked else "inactive"


def _positive(text: str) -> float | None:
    try:
        return float(text) or None
    except ValueError:
        return None


def _count(said: dict[str, str], name: str) -> float | None:
    text = said.get(f"counters/{name}", "")
    return float(text) if re.fullmatch(r"\d{1,20}", text, re.A) else None


def _bytes(said: dict[str, str], name: str) -> float | None:
    words = _count(said, name)
    return None if words is None or words == _OLD_DATA else words * _WORD_BYTES
