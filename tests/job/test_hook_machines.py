"""Ranks on several machines: who does not see rank 0's memory is told that a command comes, before it is written."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import rackside_hook
from rackside_hook import Hook, Settings

from tests.parts.hook import Line

Key = Callable[[str], None]


class Store:
    """A process group's store as PyTorch's: `get` waits for its key, and a clone's wait holds nobody up.

    `before_get` is called by clones with the key that they are about to wait for; it may wait, or raise."""

    def __init__(self, before_get: Key | None = None, shared: Store | None = None) -> None:
        self._before_get = before_get
        self._shared = shared or self
        if shared is None:
            self.values: dict[str, Any] = {}
            self.changed = threading.Condition()
        self.asked = 0

    def clone(self) -> Store:
        return Store(self._before_get, self._shared)

    def set_timeout(self, timeout: timedelta) -> None:
        assert self._shared is not self, "the job's own timeout is not to be touched"

    def set(self, key: str, value: str) -> None:
        with self._shared.changed:
            self._shared.values[key] = value
            self._shared.changed.notify_all()

    def get(self, key: str) -> str:
        if self._shared is not self and self._before_get is not None:
            self._before_get(key)
        with self._shared.changed:
            assert self._shared.changed.wait_for(lambda: key in self._shared.values, 60)
            return str(self._shared.values[key])

    def add(self, key: str, amount: int) -> int:
        with self._shared.changed:
            self.asked += 1
            self._shared.values[key] = int(self._shared.values.get(key, 0)) + amount
            self._shared.changed.notify_all()
            return int(self._shared.values[key])


class OlderStore(Store):
    clone = None  # type: ignore[assignment]


class Job:
    """Hooks of one job, each on the machine that is named; `step` lets all begin a step, in any order."""

    def __init__(self, folder: Path, machines: str, store: Store, patch: pytest.MonkeyPatch) -> None:
        self._here = ""
        patch.setattr(rackside_hook, "machine", lambda: self._here)
        self.store, self._machines, self._random = store, machines, random.Random(0)
        self.hooks: list[Hook] = []
        for rank, self._here in enumerate(machines):
            self.hooks.append(Hook("job", 4, 16 * len(machines), rank, len(machines), store, str(folder)))
        self.line = Line(folder / "job.sock")
        self.line.greet()

    def step(self) -> Settings:
        """No rank begins a step before rank 0 has given its gradients of the last, and that is all that ties them."""
        self.hooks[0].before_sync()
        for rank in self._random.sample(range(len(self.hooks)), len(self.hooks)):
            self._here = self._machines[rank]
            self.hooks[rank].step()
        found = {hook.settings for hook in self.hooks}
        assert len(found) == 1, f"a step with {len(found)} settings: {found}"
        return found.pop()

    def settle(self, asking: int = 0) -> None:
        """Step until only so many ranks ask the store in each step."""
        until = time.monotonic() + 20
        while self.asked(5) != 5 * asking:
            assert time.monotonic() < until

    def asked(self, steps: int) -> int:
        """How often the ranks asked the store in so many steps."""
        before = self.store.asked
        for _ in range(steps):
            self.step()
        return self.store.asked - before

    def told(self, command: str) -> dict[str, Any]:
        """Step until the hook has said how a command ended."""
        self.line.socket.settimeout(0.001)
        for _ in range(20_000):
            self.step()
            try:
                message = self.line.hear()
            except TimeoutError:
                self.line.lines = self.line.socket.makefile("rb")
                continue
            if message.get("id") == command and message["state"] in ("applied", "rejected"):
                return message
        raise AssertionError(f"the hook never told of {command}")

    def close(self) -> None:
        self.line.socket.close()
        for hook in self.hooks:
            hook.close()


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("rackside-")}


@pytest.fixture
def make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Job]]:
    with ExitStack() as jobs:

        def made(machines: str, store: Store | None = None) -> Job:
            job = Job(folder, machines, store or Store(), monkeypatch)
            jobs.callback(job.close)
            return job

        yield made
    assert threads() == set(), "closed hooks leave no thread"


def test_all_machines_change_at_the_same_step_and_ask_for_nothing_meanwhile(make: Callable[..., Job]) -> None:
    job = make("aabbbc")
    job.settle()
    assert {"rackside-watch", "rackside-herald"} <= threads()
    dice, wanted = random.Random(1), 4
    for number in range(60):
        wanted = dice.choice([m for m in (1, 2, 4, 8, 16) if m != wanted])
        job.line.say({"id": str(number), "do": "microbatch", "microbatch": wanted})
        time.sleep(dice.uniform(0, 0.002))  # anywhere between the boundaries
        for _ in range(dice.randrange(3)):
            job.step()
        assert job.told(str(number))["state"] == "applied"
        assert job.step().microbatch == wanted
    job.settle()


def test_commands_while_the_ranks_still_find_each_other(make: Callable[..., Job]) -> None:
    """The first were on their way before any machine listened."""
    job = make("abc")
    for number in range(30):
        job.line.say({"id": str(number), "do": "microbatch", "microbatch": (2, 4)[number % 2]})
        job.step()
    assert job.told("29")["state"] == "applied"
    assert job.step().microbatch == 4
    assert job.hooks[0]._written == 30


def test_a_machine_that_does_not_answer_changes_nothing_and_its_answer_is_not_missed(
    make: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    goes_on.set()
    job = make("aabc", Store(before_get=lambda key: None if "word/1/" not in key else (goes_on.wait(60), None)[1]))
    job.settle()
    goes_on.clear()
    job.line.say({"id": "heard", "do": "microbatch", "microbatch": 2})  # it waits in its `get` for this one already
    assert job.told("heard")["state"] == "applied"
    monkeypatch.setattr(rackside_hook, "HEARD_S", 0.3)
    job.line.say({"id": "lost", "do": "pause", "seconds": 100})
    lost = job.told("lost")
    assert lost["state"] == "rejected"
    assert lost["reason"].startswith("Of 2 other machines 1 have answered")
    job.line.say({"id": "none", "do": "resume"})
    none = job.told("none")
    assert none["reason"] == "The job is not paused.", "a refused pause is over"
    assert job.step().microbatch == 2
    goes_on.set()
    monkeypatch.setattr(rackside_hook, "HEARD_S", 30)
    for number, wanted in enumerate((4, 8, 1)):
        job.line.say({"id": str(number), "do": "microbatch", "microbatch": wanted})
        assert job.told(str(number))["state"] == "applied"
        assert job.step().microbatch == wanted


def test_a_machine_whose_connection_broke_looks_in_each_step(make: Callable[..., Job]) -> None:
    broken = False

    def before_get(key: str) -> None:
        if broken and "word/2/" in key:
            raise ConnectionError("gone")

    job = make("aabc", Store(before_get))
    job.settle()
    broken = True
    for number, wanted in enumerate((2, 4, 8)):
        job.line.say({"id": str(number), "do": "microbatch", "microbatch": wanted})
        assert job.told(str(number))["state"] == "applied"
        assert job.step().microbatch == wanted
    job.settle(asking=1)


def test_without_a_second_connection_ranks_of_other_machines_ask_in_each_step(make: Callable[..., Job]) -> None:
    job = make("aabc", OlderStore())
    job.settle(asking=2)
    assert "rackside-watch" not in threads()
    job.line.say({"id": "m", "do": "microbatch", "microbatch": 2})
    assert job.told("m")["state"] == "applied"
    assert job.step().microbatch == 2


def test_a_rank_that_ends_first_holds_no_command_up(make: Callable[..., Job]) -> None:
    job = make("abc")
    job.settle()
    job.hooks.pop(1).close()
    job.line.say({"id": "m", "do": "microbatch", "microbatch": 2})
    assert job.told("m")["state"] == "applied"
    assert job.step().microbatch == 2


def test_a_second_job_of_the_name_on_the_same_store_begins_afresh(make: Callable[..., Job]) -> None:
    """A trainer that is started twice in one process: nothing of the first run is taken for its own."""
    store = Store()
    first = make("ab", store)
    first.settle()
    first.line.say({"id": "m", "do": "microbatch", "microbatch": 2})
    assert first.told("m")["state"] == "applied"
    first.close()
    second = make("ab", store)
    second.settle()
    assert second.step().microbatch == 4
    second.line.say({"id": "n", "do": "microbatch", "microbatch": 8})
    assert second.told("n")["state"] == "applied"
    assert second.step().microbatch == 8
