"""The lightest real job: plain processes without PyTorch, a linear model, a store and an all-reduce over sockets.

    python -m engine.job.example.train_light --job light --steps 100

For trying the hook, and for fast tests; the same conditions hold as in train_ddp.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import socket
import socketserver
import threading
import time
from typing import Any

import numpy as np
from rackside_hook import Hook

FEATURES = 8


class Rendezvous(socketserver.ThreadingTCPServer):
    """Rank 0's server: a key-value store, and sums over all ranks."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, ranks: int) -> None:
        super().__init__(("127.0.0.1", 0), _Client)
        self.ranks = ranks
        self.values: dict[str, Any] = {}
        self.lock = threading.Condition()
        self.sums: dict[str, list[np.ndarray[Any, Any]]] = {}

    def answer(self, ask: dict[str, Any]) -> Any:
        with self.lock:
            if ask["op"] == "set":
                self.values[ask["key"]] = ask["value"]
                self.lock.notify_all()
                return None
            if ask["op"] == "get":
                self.lock.wait_for(lambda: ask["key"] in self.values)
                return self.values[ask["key"]]
            if ask["op"] == "add":
                self.values[ask["key"]] = int(self.values.get(ask["key"], 0)) + ask["value"]
                self.lock.notify_all()
                return self.values[ask["key"]]
            parts = self.sums.setdefault(ask["key"], [])
            parts.append(np.array(ask["value"]))
            self.lock.notify_all()
            self.lock.wait_for(lambda: len(self.sums[ask["key"]]) == self.ranks)
            return np.sum(sorted(self.sums[ask["key"]], key=lambda p: tuple(p)), axis=0).tolist()


class _Client(socketserver.StreamRequestHandler):
    server: Rendezvous

    def handle(self) -> None:
        for line in self.rfile:
            self.wfile.write(json.dumps(self.server.answer(json.loads(line))).encode() + b"\n")


class Store:
    """The ranks' side: what a process group's store offers, and an all-reduce."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._connection = socket.create_connection(address)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines = self._connection.makefile("r")
        self._lock = threading.Lock()

    def _ask(self, **ask: Any) -> Any:
        with self._lock:
            self._connection.sendall(json.dumps(ask).encode() + b"\n")
            return json.loads(self._lines.readline())

    def clone(self) -> Store:
        """The same on a connection of its own: a `get` that waits there holds nobody up."""
        return Store(self._address)

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """How long `get` waits for a key; here for ever, so that `timeout` must be long."""

    def set(self, key: str, value: str) -> None:
        self._ask(op="set", key=key, value=value)

    def get(self, key: str) -> str:
        return str(self._ask(op="get", key=key))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(op="add", key=key, value=amount))

    def all_reduce(self, key: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.array(self._ask(op="sum", key=key, value=values.tolist()))


def train(rank: int, address: tuple[str, int], options: argparse.Namespace) -> None:
    """One rank: least squares by gradient descent on samples keyed by step and index."""
    store = Store(address)
    truth, weights = np.arange(1.0, FEATURES + 1), np.zeros(FEATURES)
    with Hook(
        job=options.job,
        microbatch=options.microbatch,
        global_batch=options.global_batch,
        rank=rank,
        world_size=options.ranks,
        store=Store(address),
        directory=options.hook_directory,
        framework="light",
        device=str(rank),
    ) as hook:
        settings, log = hook.step(), []
        while settings.step <= options.steps:
            began = time.perf_counter()
            gradient, loss = np.zeros(FEATURES), 0.0
            for index in settings.samples(rank):
                dice = np.random.default_rng((settings.step, index))
                x = dice.standard_normal(FEATURES)
                error = x @ (weights - truth) + 0.01 * dice.standard_normal()
                gradient += 2 * error * x / options.global_batch
                loss += error**2 / options.global_batch
            time.sleep(options.work_s)
            hook.before_sync()
            weights = weights - 0.05 * store.all_reduce(f"gradient {settings.step}", gradient)
            log.append([settings.step, settings.microbatch, list(settings.microbatches)])
            time.sleep(options.step_s)
            settings = hook.step(loss=loss, tokens=options.global_batch, step_time_s=time.perf_counter() - began)
    if options.save:
        with open(f"{options.save}.{rank}", "w") as file:
            json.dump({"weights": weights.tolist(), "log": log}, file)


def main() -> None:
    """Start the ranks and wait for them."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--job", default="light")
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--microbatch", type=int, default=4)
    options.add_argument("--global-batch", type=int, default=32)
    options.add_argument("--step-s", type=float, default=0.0)
    options.add_argument("--work-s", type=float, default=0.0, help="so long before its gradients")
    options.add_argument("--hook-directory")
    options.add_argument("--save")
    given = options.parse_args()
    context = multiprocessing.get_context("fork")
    with Rendezvous(given.ranks) as server:
        address = server.server_address
        threading.Thread(target=server.serve_forever, daemon=True).start()
        ranks = [context.Process(target=train, args=(r, address, given)) for r in range(given.ranks)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        server.shutdown()


if __name__ == "__main__":
    main()
