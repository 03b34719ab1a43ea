"""What the hook costs a job, measured from inside: ranks as processes of their own that step as a trainer does.

A rank waits for three quarters of a step, as for its GPU, and sweeps four megabytes of memory for the rest, so that the
hook's code and data are no warmer than beside a real forward pass. Then it calls `step` with a loss, tokens and a time.
The clock runs around that call alone. The thread that serves consoles is charged with all its processor time, as if it
never found an idle core. Other work on the machine only ever adds: a figure is the mean over the quietest of ten
stretches of the run, and the 99th percentile over all of it stands beside it.
"""

from __future__ import annotations

import collections
import importlib.util
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import rackside_hook
from rackside_hook import Hook

SWEPT = 1 << 19
WARM_STEPS, STRETCHES = 20, 10
START_S = 120.0
_spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Cost:
    """By step, of the rank that it costs most: microseconds inside `step`, and of the serving thread's processor."""

    call_us: npt.NDArray[np.float64]
    thread_us: npt.NDArray[np.float64]

    @property
    def us(self) -> npt.NDArray[np.float64]:
        return self.call_us + self.thread_us

    @property
    def mean_us(self) -> float:
        """Of the quietest stretch."""
        return float(min(part.mean() for part in np.array_split(self.us, STRETCHES)))

    @property
    def p99_us(self) -> float:
        return float(np.quantile(self.us, 0.99))


def cost(ranks: int, step_s: float, seconds: float, attached: bool, apart: bool = False) -> Cost:
    """Let `ranks` processes step for `seconds`, with a client that listens or with none; `apart` as on machines of
    their own, though over loopback."""
    with tempfile.TemporaryDirectory(prefix="rackside-") as folder, ExitStack() as rest:
        store = rest.enter_context(_store(ranks))
        start = _spawn.Barrier(ranks + attached)
        pipes = []
        for rank in range(ranks):
            ours, theirs = _spawn.Pipe(duplex=False)
            pipes.append(ours)
            given = (rank, ranks, store, folder, step_s, seconds, apart, start, theirs)
            rest.enter_context(_process(_rank, *given))
        if attached:
            rest.enter_context(_process(_listener, f"{folder}/bench.sock", start))
        found = [_received(pipe) for pipe in pipes]
    dearest = max(found, key=lambda each: float(np.median(each[0] + each[1])))
    return Cost(*dearest)


def _rank(
    rank: int,
    ranks: int,
    store: Any,
    folder: str,
    step_s: float,
    seconds: float,
    apart: bool,
    start: Any,
    result: Connection,
) -> None:
    swept = np.zeros(SWEPT)
    if apart:
        rackside_hook.machine = lambda: str(rank)
    hook = Hook("bench", 4, 8 * ranks, rank, ranks, _joined(store), folder, tokens_per_sample=4096)
    call: list[float] = []
    thread: list[float] = []
    start.wait(START_S)
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until or len(call) < WARM_STEPS + STRETCHES:
        others = time.process_time() - time.thread_time()
        time.sleep(0.75 * step_s)
        while time.perf_counter() - began < step_s:
            swept += 1.0
        before = time.perf_counter()
        hook.step(loss=1.0 / (1 + len(call)), tokens=32768, step_time_s=before - began)
        call.append((time.perf_counter() - before) * 1e6)
        thread.append((time.process_time() - time.thread_time() - others) * 1e6)
    hook.close()
    result.send((np.array(call[WARM_STEPS:]), np.array(thread[WARM_STEPS:])))


def _listener(path: str, start: Any) -> None:
    """A console that reads everything."""
    _appears(path)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(b'{"hello": 1, "operator": "bench"}\n')
        connection.recv(1 << 16)
        start.wait(START_S)
        while connection.recv(1 << 16):
            pass


@contextmanager
def commanded(folder: str, ranks: int, step_s: float, apart: bool = False) -> Iterator[Commanded]:
    """A job `bench` whose hook listens in `folder`, and which notes when commands come and when they are in force.

    Its ranks meet at a barrier in each step, as real ones do when they synchronise gradients.
    """
    with ExitStack() as rest:
        store = rest.enter_context(_store(ranks))
        meeting, pipes = _spawn.Barrier(ranks), []
        for rank in range(ranks):
            ours, theirs = _spawn.Pipe(duplex=False)
            pipes.append(ours)
            rest.enter_context(_process(_obedient, rank, ranks, store, folder, step_s, apart, meeting, theirs))
        _appears(f"{folder}/bench.sock")
        yield Commanded(meeting, pipes)


@dataclass
class Commanded:
    """A running job. `end` gives what it noted, on the clock that all processes of this machine share."""

    _meeting: Any
    _pipes: list[Any]

    def end(self) -> tuple[dict[str, float], dict[int, tuple[float, float]]]:
        """When each command had come, by id; when the last rank called `step` for each step, and when it was in force
        on the last."""
        self._meeting.abort()
        found = [_received(pipe) for pipe in self._pipes]
        came: dict[str, float] = found[0][0]
        common = set.intersection(*(set(steps) for _, steps in found))
        return came, {
            number: (max(steps[number][0] for _, steps in found), max(steps[number][1] for _, steps in found))
            for number in common
        }


class _Arrivals(collections.deque[dict[str, Any]]):
    """The hook's queue of commands, with the moment at which each one came."""

    def __init__(self) -> None:
        super().__init__()
        self.came: dict[str, float] = {}

    def append(self, command: dict[str, Any]) -> None:
        self.came.setdefault(command["id"], time.monotonic())
        super().append(command)


def _obedient(
    rank: int, ranks: int, store: Any, folder: str, step_s: float, apart: bool, meeting: Any, result: Connection
) -> None:
    swept, arrivals, steps = np.zeros(SWEPT), _Arrivals(), {}
    if apart:
        rackside_hook.machine = lambda: str(rank)
    hook = Hook("bench", 4, 8 * ranks, rank, ranks, _joined(store), folder, tokens_per_sample=4096)
    if hook._server is not None:
        hook._server.commands = arrivals
    settings = hook.step()
    try:
        while True:
            began = time.perf_counter()
            time.sleep(0.75 * step_s)
            while time.perf_counter() - began < step_s:
                swept += 1.0
            hook.before_sync()
            meeting.wait(START_S)
            called = time.monotonic()
            settings = hook.step(loss=1.0, tokens=32768, step_time_s=time.perf_counter() - began)
            steps[settings.step] = (called, time.monotonic())
    except threading.BrokenBarrierError:
        hook.close()
    result.send((arrivals.came, steps))


# The store of the process group, and processes.


def store_kind() -> str:
    """Whose store the ranks share."""
    return "torch TCPStore" if importlib.util.find_spec("torch") else "light"


@contextmanager
def _store(ranks: int) -> Iterator[Any]:
    """Where the ranks find their store; None for one rank alone, which needs none."""
    if ranks == 1:
        yield None
    elif store_kind() == "light":
        from engine.job.example.train_light import Rendezvous

        with Rendezvous(ranks) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield server.server_address
            server.shutdown()
    else:
        from torch.distributed import TCPStore

        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        yield server.port


def _joined(store: Any) -> Any:
    if store is None:
        return None
    if isinstance(store, int):
        from torch.distributed import PrefixStore, TCPStore

        return PrefixStore("hook", TCPStore("127.0.0.1", store, is_master=False))
    from engine.job.example.train_light import Store

    return Store(store)


@contextmanager
def _process(does: Any, *given: Any) -> Iterator[None]:
    process = _spawn.Process(target=does, args=given, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.join(0 if does is _obedient else 10)
        process.kill()
        process.join()


def _received(pipe: Any) -> Any:
    if not pipe.poll(START_S * 2):
        raise TimeoutError("a rank of the bench's job did not answer")
    return pipe.recv()


def _appears(path: str) -> None:
    until = time.monotonic() + START_S
    while not Path(path).exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path} did not appear within {START_S:.0f} s")
        time.sleep(0.02)
