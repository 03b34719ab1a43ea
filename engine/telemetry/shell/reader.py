"""A node without the Python probe: what a shell reader there prints of nvidia-smi, amd-smi or rocm-smi, to the store.

The reader (probe/rackside_shell.sh) frames lines by section and decides nothing; here the parsers read them. A round of
rows is one tick. Memory is bounded whatever a node prints, and what cannot be read never becomes a number.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from engine.telemetry.keeper import Keeper
from engine.telemetry.reading import FRAME, Hello, ReadingState, Result, Tick
from engine.telemetry.shell.gpus import MOST_GPUS, Gpus
from engine.telemetry.shell.links import Links
from engine.telemetry.shell.loader import AMD_TOOLS, POLL_S, TOOLS
from engine.telemetry.snapshot import NodeState
from engine.telemetry.source import SourceError
from engine.telemetry.store import Store
from engine.telemetry.streams import Reader
from engine.telemetry.text import clean
from engine.telemetry.tools import amd_smi, nvidia_smi, nvlink, rocm_smi
from engine.telemetry.tools.cell import number
from engine.telemetry.tools.nvidia_said import named
from engine.telemetry.tools.report import GpuReport, Report
from engine.telemetry.tools.topology import topology

FIRST_WORD_S = 30.0
LINE_LIMIT = 1 << 16
LONGEST = 4 << 20
"""Of a line that was sent in pieces, and of a section: more is not what any tool prints."""
NOISE_LIMIT = 64 << 20
LETTERS = "AWQSMRFNEPDLT"
"""Sections: about the reader, its refusal, the query, the kernel's counters, AMD's metrics by two tools, AMD's facts,
NVLinks, their errors, processes, details, the list of GPUs, the topology."""
NO_LEASES = "this node is read through {reader}, without python3: limits cannot be leased there"


class Lines:
    """Bytes to the lines of sections: `(letter, text)`, and `("." + letter, status)` where a section ends."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._parts: dict[str, tuple[list[str], int]] = {}
        self.skipped = 0
        self.noise = b""

    def take(self, data: bytes) -> list[tuple[str, str]]:
        self._buffer += data
        *whole, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        found = [framed for line in whole if (framed := self._line(line)) is not None]
        if len(self._buffer) > LINE_LIMIT:
            self._skip(rest)
            self._buffer.clear()
        return found

    def _line(self, line: bytes) -> tuple[str, str] | None:
        start = line.find(FRAME)  # a banner without a line end may stand before the frame
        said = line[start + 1 :].decode("utf-8", "replace") if start >= 0 and len(line) <= LINE_LIMIT else ""
        end = said.startswith(".")
        letter, kind, text = said[end : end + 1], said[end + 1 : end + 2], said[end + 2 :]
        if letter not in LETTERS or not letter or kind not in (" ", "+"):
            self._skip(line)
            return None
        self.skipped = 0
        if end:
            return "." + letter, text
        parts, size = self._parts.pop(letter, ([], 0))
        if size + len(text) <= LONGEST:
            parts.append(text)
        if kind == "+":
            self._parts[letter] = parts, size + len(text) + 1
            return None
        return letter, "".join(parts)

    def _skip(self, line: bytes) -> None:
        if line.strip():
            self.noise = line[:200]
        self.skipped += len(line)


class ShellReader:
    """The state of one node as its lines tell it; `take` feeds the store."""

    def __init__(self, node: str, store: Store, interval_s: float, because: str) -> None:
        self._node, self._store, self._interval_s, self._because = node, store, interval_s, because
        self._lines = Lines()
        self._gpus, self._links = Gpus(), Links()
        self._sections: dict[str, tuple[list[str], int]] = {}
        self._rows: list[GpuReport] = []
        self._lost: list[str] = []
        self._columns: nvidia_smi.Header | None = None
        self._head, self._driver, self._hostname, self._last = "", "", "", ""
        self._refused: set[str] = set()
        self._rounds, self._asks_again, self._anew = 0, False, False
        self._trouble: str | None = None
        self._told: Hello | None = None
        self._tick = 0
        self._apps: tuple[nvidia_smi.App, ...] | None = None
        self.reader = ""
        self.refusal = ""
        self.greeted = False

    @property
    def noise(self) -> bytes:
        return self._lines.noise

    @property
    def skipped(self) -> int:
        return self._lines.skipped

    def boards(self) -> dict[int, str]:
        """The PCI address of each GPU by its index, where it is told."""
        return {slot.index: slot.bus_id for slot in self._gpus.slots if slot.bus_id}

    @property
    def answered(self) -> bool:
        """Whether a tool was heard of at all."""
        return self._tick > 0

    def take(self, data: bytes, now: float) -> None:
        for letter, text in self._lines.take(data):
            self.greeted = True
            if letter == "A":
                self._about(text)
            elif letter == "W":
                self.refusal = clean(text, 300)
            elif letter == "Q":
                self._query_line(text, now)
            elif letter.startswith("."):
                lines, _ = self._sections.pop(letter[1], ([], 0))
                self._ended(letter[1], "\n".join(lines), text, now)
            else:
                lines, size = self._sections.setdefault(letter, ([], 0))
                if size + len(text) <= LONGEST:
                    lines.append(text)
                    self._sections[letter] = lines, size + len(text) + 1

    def _about(self, text: str) -> None:
        key, _, value = text.partition(" ")
        if key == "hostname":
            self._hostname = clean(value, 80)
        elif key == "reader":
            self.reader = value if value in TOOLS else "none"
        elif key == "discover":
            self._anew = True

    # The long-lived query: rows that come for ever.

    def _query_line(self, text: str, now: float) -> None:
        if not text.strip():
            return
        columns = None if text[:1].isdigit() else nvidia_smi.header(text)
        if columns is not None:
            self._columns, self._head = columns, text
            return
        row = nvidia_smi.row(self._columns, text) if self._columns else None
        if row is not None:
            self._row(row, text, now)
        elif gone := nvidia_smi.lost(text):
            self._lost.append(gone) if len(self._lost) < MOST_GPUS else None
            self._whole(now)
        elif field := nvidia_smi.refused(text):
            self._refuse(field, text)
        else:
            self._last = clean(text.strip())
            self._trouble = self._trouble or nvidia_smi.trouble(text)

    def _refuse(self, field: str, text: str) -> None:
        """A driver that does not know a field is asked for the old ones; one that refuses these has a trouble."""
        if field in nvidia_smi.OLD_FIELDS:
            self._trouble = clean(text.strip())
        elif len(self._refused) < 64:
            self._refused.add(clean(field, 80))
            self._asks_again = True

    def _row(self, row: GpuReport, text: str, now: float) -> None:
        place = self._gpus.knows(row)
        if any(_same(row, other) for other in self._rows):
            self._flush(True, now)
        self._rows.append(row)
        if self._anew or not self._driver or place is None:
            self._anew = False
            self._driver = nvidia_smi.query(f"{self._head}\n{text}").driver or self._driver
        if len(self._rows) >= MOST_GPUS:
            self._flush(False, now)
        else:
            self._whole(now)

    def _whole(self, now: float) -> None:
        """A round in which everybody known was told of is over."""
        slots = self._gpus.slots
        seen = {self._gpus.knows(row) for row in self._rows} | {self._gpus.named(name) for name in self._lost}
        if slots and self._rows and seen == set(range(len(slots))):
            self._flush(True, now)

    def _flush(self, complete: bool, now: float) -> None:
        rows, lost = self._rows, named(self._lost)
        self._rows, self._lost, self._trouble = [], [], None
        self._rounds += 1
        self._gpus.take_round(rows, lost, complete)
        self._say(None, now)

    def _query_ended(self, status: str, now: float) -> None:
        """The query ended: with a last round, or with why there is none."""
        if self._rows or self._lost:
            self._flush(status == "0" or bool(self._lost), now)
        elif self._trouble or not (self._rounds or self._asks_again):
            said = f"; it says: {self._last}" if self._last else ""
            self._say(self._trouble or f"nvidia-smi names no GPU (exit status {clean(status, 10)}){said}", now)
        self._rounds, self._asks_again, self._trouble, self._last = 0, False, None, ""

    # Sections that end.

    def _ended(self, letter: str, text: str, status: str, now: float) -> None:
        if letter == "Q":
            self._query_ended(status, now)
        elif letter == "S":
            self._links.take_counters(text, number(status), now)
        elif letter in "MRF":
            self._amd(letter, text, now)
        elif letter == "N":
            self._links.take_nvlinks(self._gpus, nvlink.status(text))
        elif letter == "E":
            self._links.take_errors(self._gpus, nvlink.errors(text))
        elif letter == "P":
            self._apps = nvidia_smi.apps(text)
        elif letter in "DLT":
            self._details(letter, text)
            self._greet(now)

    def _details(self, letter: str, text: str) -> None:
        if letter == "T":
            self._gpus.topology = topology(text)
            return
        whole = nvidia_smi.xml if "<nvidia_smi_log" in text else nvidia_smi.details
        report = nvidia_smi.mig(text) if letter == "L" else whole(text)
        self._driver = report.driver or self._driver
        for gpu in report.gpus:
            slot = self._gpus.find(gpu)
            if slot is None:
                continue
            if letter == "L":
                slot.mig_names = gpu.mig
            else:
                slot.learn(gpu)
                slot.mig_parts, slot.reset_advised = gpu.mig, gpu.needs_reset

    def _amd(self, letter: str, text: str, now: float) -> None:
        parse: Callable[[str], Report] = {"M": amd_smi.metric, "R": rocm_smi.json_, "F": amd_smi.static}[letter]
        report = parse(text)
        self._driver = report.driver or self._driver
        self._store.states[ReadingState.IMPLAUSIBLE] += report.implausible
        if letter == "F":
            # Names and limits only: the round's rows are what they were.
            if not self._gpus.slots:
                self._gpus.take_round(list(report.gpus), [], True)
            for gpu in report.gpus:
                slot = self._gpus.find(gpu)
                if slot is not None:
                    slot.learn(gpu)
        elif report.gpus or report.lost:
            self._gpus.take_round(list(report.gpus), list(report.lost), True)
            self._say(None, now)
        else:
            self._say(report.trouble, now)

    # To the store.

    def _greet(self, now: float) -> None:
        if not self._gpus.slots and self._told is not None:
            return
        because = self._because
        if self._refused:
            because += f"; its driver does not know {', '.join(sorted(self._refused))}: older fields are read"
        slow = self.reader in AMD_TOOLS
        self._store.expect(self._node, max(self._interval_s, POLL_S) if slow else self._interval_s)
        hello = self._gpus.hello(self._hostname, self._driver or None, self.reader, because)
        if hello == self._told:
            return
        if self._told is None or len(self._told.gpus) != len(hello.gpus):
            self._links.tell_all()
        self._told = hello
        self._store.apply(self._node, hello, now)

    def _say(self, trouble: str | None, now: float) -> None:
        """One tick: what was read, or why nothing was."""
        self._greet(now)
        self._tick += 1
        columns = self._gpus.unreadable() if trouble else self._gpus.columns()
        lost = () if trouble else self._gpus.lost()
        # Neither the node's clock nor how long its tool took is known.
        tick = Tick(self._tick, math.nan, columns, trouble=trouble, lost=lost, took_ms=math.nan)
        if self._apps is not None:
            tick = replace(tick, processes=self._gpus.processes(self._apps))
            self._apps = None
        self._store.apply(self._node, self._links.fill(tick, self._gpus, 4 * max(1.0, self._interval_s), now), now)


def _same(one: GpuReport, other: GpuReport) -> bool:
    if one.bus_id and other.bus_id:
        return one.bus_id == other.bus_id
    return one.index is not None and one.index == other.index


class ShellSession:
    """One running shell reader: its output to the store until it ends. Commands go to the `keeper`, if there is one."""

    def __init__(
        self, node: str, reader: Reader, store: Store, interval_s: float, because: str, keeper: Keeper | None = None
    ) -> None:
        self._node, self._reader, self._store, self._keeper = node, reader, store, keeper
        self.state = ShellReader(node, store, interval_s, because)

    @property
    def greeted(self) -> bool:
        return self.state.greeted

    @property
    def noise(self) -> bytes:
        return self.state.noise

    async def run(self) -> None:
        """Feed the store until end of output. SourceError when there is nothing to read, or only garbage."""
        watching = asyncio.create_task(self._watch())
        try:
            async with asyncio.timeout(FIRST_WORD_S) as limit:
                while data := await self._reader.read(1 << 16):
                    self.state.take(data, time.time())
                    if self.state.skipped > NOISE_LIMIT:
                        raise SourceError(
                            f"the node prints garbage: {self.state.skipped >> 20} MiB without a record", slow=True
                        )
                    if self.greeted:
                        limit.reschedule(None)
        except TimeoutError:
            raise SourceError(f"no shell answers there within {FIRST_WORD_S:.0f} s") from None
        finally:
            watching.cancel()
            if self._keeper is not None:
                await self._keeper.close()

    async def _watch(self) -> None:
        """Say so when the tool does not answer even once. It is left alone: none is started beside it."""
        await asyncio.sleep(FIRST_WORD_S)
        if self.state.reader in TOOLS and not self.state.answered:
            reason = f"{self.state.reader} has not answered for {FIRST_WORD_S:.0f} s: it may hang in the driver"
            self._store.set_state(self._node, NodeState.ERROR, reason, time.time())

    async def command(self, command: dict[str, Any], timeout_s: float) -> Result:
        """Limits and leases need a program on the node."""
        if self._keeper is not None and self.state.reader in AMD_TOOLS:
            return await self._keeper.command(command, self.state.boards(), timeout_s)
        reader = self.state.reader if self.state.reader in TOOLS else "a shell"
        return Result(str(command["id"]), "failed", NO_LEASES.format(reader=reader))


def not_there(because: str) -> SourceError:
    """Neither Python nor any tool: all that was looked for."""
    return SourceError(
        f"{because}; nor is there {', '.join(TOOLS[:-1])} or {TOOLS[-1]} (looked in the login's PATH, /usr/bin, "
        "/usr/local/bin, /bin, /usr/sbin, /opt/rocm/bin)",
        slow=True,
    )
