"""`rackside bench tui`: what the console costs, and how soon it answers a key, in a real terminal (a pty).

A child process runs the console on a cluster whose readings are fed from within, once a second. Every few seconds a
signal has its screen hear nothing of its engine, or hear of it again: the difference in processor time, in one process
and by turns (the middle one of all), is the screen's, the encoding for the terminal counted. The parent is the
terminal: it counts bytes, sends keys at random moments and waits until what they drew is there and it is quiet, so that
a refresh that comes between counts against the key.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import random
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from argparse import Namespace
from pathlib import Path
from statistics import median
from typing import Any

from engine.telemetry.reading import Result
from engine.telemetry.source import SourceError
from engine.telemetry.store import Store
from engine.telemetry.streams import Reader, Writer
from tui.output import progress

PER_NODE, NODES_A_RACK, PARTS = 8, 4, 50
WARM_S, TURN_S, QUIET_S, LONGEST_S = 6.0, 2.0, 0.015, 3.0
KEYS = (b"l", b"h", b"j", b"k")


class Feed:
    """Stands for every node at once: busy readings, new ones each second, and eight links a node."""

    name = "n0000"

    def __init__(self, names: list[str]) -> None:
        self._names = names

    async def run(self, store: Store) -> None:
        from engine.sim.many import columns, hello
        from engine.telemetry.reading import FRAME, decode
        from engine.telemetry.snapshot import NodeState

        chance, now = random.Random(1), time.time()
        for number, name in enumerate(self._names):
            store.apply(name, decode(hello(number).strip().removeprefix(FRAME)), now)  # type: ignore[arg-type]
            store.set_state(name, NodeState.LIVE, "", now)
        tick, due, walk = 0, time.monotonic(), [columns(chance) for _ in self._names]
        while True:
            tick += 1
            for part in range(PARTS):  # real nodes do not all tell at once
                due += 1.0 / PARTS
                self._tick(store, walk, tick, chance, range(part, len(self._names), PARTS))
                await asyncio.sleep(max(0.0, due - time.monotonic()))

    def _tick(
        self, store: Store, walk: list[dict[str, list[float]]], tick: int, chance: random.Random, of: range
    ) -> None:
        """A steady run: a third of the temperatures move by a degree, all power and rates by some per cent."""
        from engine.telemetry.reading import Tick

        ports = [{"gpu": -1, "kind": "nic", "name": f"mlx5_{k}", "gb_s": 50.0} for k in range(PER_NODE)]
        links = tuple(_link(port) for port in ports) if tick == 1 else None
        for number in of:
            name = self._names[number]
            values: Any = walk[number]
            moves = chance.choices((-1, 0, 0, 0, 0, 1), k=PER_NODE)
            values["temperature_c"] = [
                min(80, max(55, t + d)) for t, d in zip(values["temperature_c"], moves, strict=True)
            ]
            values["power_w"] = [600.0 + 20.0 * chance.random() for _ in range(PER_NODE)]
            rates: list[float | None] = [30_000.0 + 2000.0 * chance.random() for _ in range(PER_NODE)]
            record = Tick(tick, time.time(), values, links=links, rx_mb_s=rates, tx_mb_s=rates)
            store.apply(name, record, time.time())

    async def command(self, command: dict[str, Any], timeout_s: float) -> Result:
        return Result(str(command["id"]), "failed", "these nodes are imitated: nothing is commanded here")

    async def open_job_socket(self, path: str) -> tuple[Reader, Writer]:
        raise SourceError("these nodes are imitated: no job runs here")


def _link(port: dict[str, Any]) -> Any:
    from msgspec import convert

    from engine.telemetry.reading import LinkFacts

    return convert(port, LinkFacts)


def child(gpus: int) -> None:
    """The console."""
    from engine.act.audit import Audit
    from engine.control.control import Control
    from engine.profile import catalog
    from tui.start import show

    with tempfile.TemporaryDirectory(prefix="rackside-bench") as folder:
        lines = ["name: bench", "nodes:"]
        names = [f"n{i:04d}" for i in range(gpus // PER_NODE)]
        for i, name in enumerate(names):
            lines.append(
                f"- {{name: {name}, type: hgx-h100, rack: r{i // NODES_A_RACK:03d}, u: {i % NODES_A_RACK * 10 + 1}}}"
            )
        path = Path(folder) / "bench.yaml"
        path.write_text("\n".join(lines))
        feed: Any = Feed(names)
        audit = Audit(Path(folder) / "audit.jsonl")
        policy = catalog.thermal_policy("margin")
        control = Control(catalog.cluster(str(path)), {feed.name: feed}, policy, audit, "bench", read_only=True)
        _by_turns(control)
        os.environ["XDG_STATE_HOME"] = folder  # the look of a first start, and no trace of this one
        show(control, Namespace(ascii=False, keys=None, theme=None, reduced_motion=False))


def _by_turns(control: Any) -> None:
    """At each signal the control says nothing any more, or speaks again."""
    says, silent = control._tell, [False]
    control._tell = lambda event: None if silent[0] else says(event)
    signal.signal(signal.SIGUSR1, lambda *_: silent.append(not silent.pop()))


def measure(gpus: int, seconds: float, width: int = 200, height: int = 60, keys: int = 200) -> dict[str, Any]:
    """Run the child and watch it."""
    terminal = Terminal(_words(gpus), width, height)
    try:
        first_paint_s = terminal.until_painted()
        terminal.drain(WARM_S)
        seen, blind, received = [], [], 0
        for _ in range(max(2, round(seconds / TURN_S))):
            progress("the screen, and the engine without it")
            before = terminal.received
            seen.append(terminal.busy(TURN_S))
            received += terminal.received - before
            os.kill(terminal.pid, signal.SIGUSR1)
            blind.append(terminal.busy(TURN_S))
            os.kill(terminal.pid, signal.SIGUSR1)
        refresh_s = median(with_it - without for with_it, without in zip(seen, blind, strict=True))
        bytes_per_s = received / (TURN_S * len(seen))
        progress("keys")
        times = sorted(terminal.key(KEYS[i % len(KEYS)]) for i in range(keys))
    finally:
        terminal.close()
        progress()
    return {
        "gpus": gpus,
        "terminal": [width, height],
        "first_paint_s": first_paint_s,
        "refresh_ms": 1000 * refresh_s,
        "engine_ms": 1000 * median(blind),
        "key_to_paint_ms": {"p50": 1000 * times[len(times) // 2], "p99": 1000 * times[int(len(times) * 0.99)]},
        "bytes_per_s": bytes_per_s,
    }


def text(found: dict[str, Any]) -> str:
    """To read."""
    keys = found["key_to_paint_ms"]
    return "\n".join(
        [
            f"{found['gpus']:,} GPUs at 1 Hz on {found['terminal'][0]}x{found['terminal'][1]}",
            f"first paint    {found['first_paint_s']:.2f} s after the command",
            f"refresh        {found['refresh_ms']:.1f} ms of processor time; the engine {found['engine_ms']:.1f} ms",
            f"key to paint   {keys['p50']:.0f} ms median, {keys['p99']:.0f} ms 99th percentile",
            f"to the screen  {found['bytes_per_s'] / 1000:.1f} kB/s",
        ]
    )


class Terminal:
    """A pty with a program in it."""

    def __init__(self, words: list[str], width: int, height: int) -> None:
        self.began, self.received = time.monotonic(), 0
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor", "LC_ALL": "C.UTF-8"}
            os.execv(words[0], words)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def until_painted(self) -> float:
        """Seconds from the command to the first line of the console."""
        seen = b""
        while b"READ-ONLY" not in seen:
            seen += self._read(30.0)
            if not seen:
                raise RuntimeError("the console did not come up")
        return time.monotonic() - self.began

    def drain(self, seconds: float) -> None:
        """Read for so long."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._read(left)

    def busy(self, seconds: float) -> float:
        """Read for so long: the processor seconds that it takes the program, a second."""
        began, cpu = time.monotonic(), _cpu(self.pid)
        self.drain(seconds)
        return (_cpu(self.pid) - cpu) / (time.monotonic() - began)

    def key(self, key: bytes) -> float:
        """Seconds from a key, at a random moment, to the last of what it drew."""
        self.drain(random.uniform(0.05, 0.35))
        sent = time.monotonic()
        os.write(self._fd, key)
        last = sent
        while data := self._read(LONGEST_S if last == sent else QUIET_S):
            last = time.monotonic() if data else last
        return last - sent if last > sent else LONGEST_S

    def _read(self, wait_s: float) -> bytes:
        ready, _, _ = select.select([self._fd], [], [], max(0.0, wait_s))
        try:
            data = os.read(self._fd, 1 << 16) if ready else b""
        except OSError:
            raise RuntimeError("the console ended by itself") from None
        self.received += len(data)
        return data

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._fd)


def _words(gpus: int) -> list[str]:
    return [sys.executable, "-m", "tui.tui_bench", str(gpus)]


def _cpu(pid: int) -> float:
    """Processor seconds of a process's threads so far, exactly: /proc/PID/stat counts by the hundredth."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


if __name__ == "__main__":
    import gc

    from tui.cli import LOADING

    gc.set_threshold(LOADING)  # as the command does
    child(int(sys.argv[1]))
