"""The hook alone: settings, sockets, and everything a client can do wrong."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
import timeit
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import rackside_hook
from hypothesis import given
from hypothesis import strategies as st
from rackside_hook import Hook, even_split, fitting_microbatches, make_settings, split_for

from engine.job import ProtocolError, decode_line
from engine.sim.job import MemoryStore
from tests.parts.jobs import attached
from tests.parts.waiting import until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "hooks"
    place.mkdir(mode=0o700)
    return place


@pytest.fixture
def hook(folder: Path) -> Iterator[Hook]:
    with Hook("job", microbatch=4, global_batch=32, directory=str(folder), tokens_per_sample=128) as made:
        yield made


def light_store() -> Any:
    """A store of one process, which counts what is asked of it."""
    values: dict[str, Any] = {}

    class Store:
        set, get, asked = values.__setitem__, values.__getitem__, 0

        def add(self, key: str, amount: int) -> int:
            self.asked += 1
            values[key] = values.get(key, 0) + amount
            return int(values[key])

    return Store()


class Line:
    """A raw connection, for saying what a client would not."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(10)
        self.socket.connect(str(path))
        self.lines = self.socket.makefile("rb")

    def say(self, message: Any) -> None:
        self.socket.sendall((message if isinstance(message, bytes) else json.dumps(message).encode()) + b"\n")

    def hear(self) -> dict[str, Any]:
        line = self.lines.readline()
        return json.loads(line) if line else {}

    def greet(self) -> dict[str, Any]:
        self.say({"hello": 1, "operator": "raw"})
        return self.hear()


def test_it_is_one_stdlib_file_for_old_pythons() -> None:
    tree = ast.parse(Path(rackside_hook.__file__).read_text(), feature_version=(3, 8))
    roots = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    assert roots <= set(sys.stdlib_module_names)
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]


@given(st.integers(1, 16), st.integers(1, 8), st.integers(1, 16))
def test_every_sample_has_one_rank(ranks: int, microbatch: int, each: int) -> None:
    total = ranks * each
    settings = make_settings(1, microbatch, even_split(total, ranks))
    taken = [i for rank in range(ranks) for i in settings.samples(rank)]
    assert taken == list(range(total * microbatch))


@given(st.data())
def test_a_change_of_microbatch_keeps_the_global_batch(data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, 6))
    batch = ranks * data.draw(st.sampled_from([4, 8, 12, 24]))
    fits = fitting_microbatches(batch, ranks)
    before = make_settings(0, data.draw(st.sampled_from(fits)), [0] * ranks)
    counts = even_split(batch // before.microbatch, ranks)
    if ranks > 1 and counts[0] > 1:
        counts[0], counts[-1] = counts[0] - 1, counts[-1] + 1
    before = make_settings(0, before.microbatch, counts)
    after = data.draw(st.sampled_from(fits))
    split = split_for(after, before, batch)
    assert sum(split) * after == batch
    if all(c * before.microbatch % after == 0 for c in counts):
        assert [s * after for s in split] == [c * before.microbatch for c in counts], "samples stay with their ranks"


def test_the_socket_is_private(hook: Hook, folder: Path) -> None:
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "job.sock").stat().st_mode) == 0o600
    hook.close()
    assert list(folder.iterdir()) == []


def test_the_directory_is_made_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RACKSIDE_HOOK_DIR", str(tmp_path / "new"))
    with Hook("job"):
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_an_unsafe_directory_is_refused_and_training_goes_on(tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    wide.mkdir()
    wide.chmod(0o777)
    with pytest.warns(RuntimeWarning, match=r"is open to others \(mode 777\)"):
        hook = Hook("job", directory=str(wide))
    assert hook.step().step == 1
    assert list(wide.iterdir()) == []
    if os.getuid() == 0:
        theirs = tmp_path / "theirs"
        theirs.mkdir(mode=0o700)
        os.chown(theirs, 65534, 65534)
        with pytest.warns(RuntimeWarning, match="belongs to another user"):
            Hook("job", directory=str(theirs)).close()


def test_what_a_dead_job_left_is_replaced_and_a_living_one_is_not(folder: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(folder / "job.sock"))
    left.close()
    with Hook("job", directory=str(folder)) as first, Hook("job", directory=str(folder)) as second:
        assert first._server.path == str(folder / "job.sock")
        assert second._server.path == str(folder / f"job-{os.getpid()}.sock")
        assert Line(Path(first._server.path)).greet()["job"] == "job"


def test_a_name_cannot_leave_the_directory(folder: Path) -> None:
    with Hook("../../etc/x y", directory=str(folder)) as hook:
        assert Path(hook._server.path).parent == folder


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            {"microbatch": 5, "global_batch": 32},
            "microbatch 5 does not fit a global batch of 32 on 1 ranks; 1, 2, 4, 8",
        ),
        ({"rank": 2, "world_size": 2}, "rank 2 is not one of the 2 ranks"),
        ({"world_size": 2}, "need the process group's store"),
    ],
)
def test_a_trainer_that_is_wrong_is_told(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Hook("job", **arguments)


def test_where_ranks_must_run_as_many_only_an_even_split_fits(folder: Path) -> None:
    """FSDP: 12 samples in microbatches of 4 would be two on one rank and one on the other."""
    ranks = {"global_batch": 12, "world_size": 2, "store": MemoryStore(), "directory": str(folder)}
    with Hook("even", microbatch=2, rebalance=False, **ranks) as even, Hook("any", microbatch=2, **ranks) as uneven:
        assert (even.fits, uneven.fits) == ([1, 2, 3, 6], [1, 2, 3, 4, 6])
    with Hook("loader", microbatch=2, fits=[1, 2], **ranks) as narrowed:
        assert narrowed.fits == [1, 2]
    with Hook("fixed", microbatch=2, fits=[2], rebalance=False, **ranks) as fixed:
        assert fixed._facts["can"] == ["pause", "resume"]


async def test_further_processes_of_a_rank_follow_it(folder: Path) -> None:
    """Two data-parallel ranks of two processes each, as in tensor parallelism: one serves, all change at one step."""
    store = MemoryStore()
    places = [(0, False), (0, True), (1, False), (1, True)]
    hooks = [
        Hook("job", 4, 16, rank=rank, world_size=2, store=store, directory=str(folder), follows=follows)
        for rank, follows in places
    ]
    assert [hook._server is not None for hook in hooks] == [True, False, False, False]
    settings = [hook.step() for hook in hooks]
    async with attached(folder / "job.sock") as console:
        doing = asyncio.create_task(console.does("m", "microbatch", microbatch=2))
        await until(lambda: hooks[0]._server.commands)
        for _ in range(3):
            settings = [hook.step() for hook in hooks]
            assert len({(s.step, s.microbatch) for s in settings}) == 1
        assert (await doing).step == 3
        paused = asyncio.create_task(console.does("p", "pause", seconds=100))
        await until(lambda: hooks[0]._server.commands)
        for hook in hooks:
            hook.step()
        waiting = asyncio.gather(*(asyncio.to_thread(hook.step) for hook in hooks))
        await until(lambda: hooks[0]._server.paused_until)
        assert (await paused).state == "applied"
        assert (await console.does("r", "resume")).state == "applied"
        settings = await waiting
    assert {(s.step, s.microbatch) for s in settings} == {(6, 2)}
    for hook in hooks:
        hook.close()


async def test_a_command_takes_effect_at_the_step_that_it_names(hook: Hook, folder: Path) -> None:
    async with attached(folder / "job.sock") as console:
        assert console.greeting.settings.microbatches == (8,)
        answer = asyncio.create_task(console.does("a", "microbatch", microbatch=2))
        await until(lambda: hook._server.commands)
        settings = hook.step(loss=2.0, tokens=4096, step_time_s=0.5)
        state = await answer
        assert (state.state, state.step) == ("applied", settings.step)
        assert (settings.microbatch, settings.microbatches) == (2, (16,))
        assert state.before is not None
        assert state.before.microbatch == 4
        hook.step(loss=float("nan"), tokens=4096, step_time_s=0.5)
        await console.reaches(1)
        told = [m for m in console.told if getattr(m, "step_time_s", None)]
        assert told[-1].loss is None, "a loss that is not a number is not sent as one"  # type: ignore[union-attr]


def test_steps_in_quick_succession_are_told_together_and_in_order(hook: Hook, folder: Path) -> None:
    """None is lost, though the last ones find nobody who sends them along: the serving thread does, a second later."""
    line = Line(folder / "job.sock")
    line.greet()
    for _ in range(4):
        hook.step(loss=0.5, tokens=None, step_time_s=1e-7)
    line.say({"id": "c", "do": "microbatch", "microbatch": 2})
    told = [line.hear() for _ in range(3)]
    assert [t["step"] for t in told] == [1, 2, 3]
    assert (told[0]["loss"], told[0]["tokens"], told[0]["step_time_s"]) == (0.5, None, 1e-7)
    assert told[0]["settings"] == {"step": 1, "microbatch": 4, "microbatches": [8]}
    assert line.hear()["event"] == "holder"
    late = Line(folder / "job.sock")
    hook.step()
    assert late.greet()["step"] == 5
    hook.step(loss=1)
    assert late.hear()["step"] == 5, "what was told before it came is not for it"


def test_a_number_that_its_owner_changes_later_is_told_as_it_was(hook: Hook, folder: Path) -> None:
    class Tensor(list[float]):
        def __float__(self) -> float:
            return self[0]

    line, loss = Line(folder / "job.sock"), Tensor([0.5])
    line.greet()
    for _ in range(3):
        hook.step(loss=loss, tokens=Tensor([8.0]))
    loss[0] = 0.0
    assert [(told["loss"], told["tokens"]) for told in (line.hear(), line.hear())] == [(0.5, 8.0)] * 2


def test_ranks_of_one_machine_look_at_the_flag_and_others_at_the_store(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idle, rank 0 and its neighbour ask the store for nothing; all change at the same step, wherever they are."""
    store = light_store()
    with ExitStack() as hooks:
        ranks = [hooks.enter_context(Hook("job", 4, 48, rank, 3, store, str(folder))) for rank in range(3)]
        for number in (1, 2):
            [hook.step() for hook in ranks[:2]]
            with monkeypatch.context() as elsewhere:
                elsewhere.setattr(rackside_hook, "machine", lambda: "another")
                assert ranks[2].step().step == number
        line = Line(folder / "job.sock")
        line.greet()
        before = []
        for hook in ranks:
            asked = store.asked
            [hook.step() for _ in range(5)]
            before.append(store.asked - asked)
        assert before == [1, 0, 5], "rank 0 asked once, to tell its console where the ranks are"
        line.say({"id": "a", "do": "microbatch", "microbatch": 2})
        assert any(line.hear().get("event") == "holder" for _ in range(9))
        seen = []
        while not seen or seen[-1] != [2, 2, 2]:
            seen.append([hook.step().microbatch for hook in ranks])
        assert [4, 4, 4] in seen
        assert all(len(set(each)) == 1 for each in seen), "no step with two settings"


def test_what_is_not_rank_0s_flag_is_not_taken_for_it(tmp_path: Path) -> None:
    flag = rackside_hook.Flag()
    where, path, mark = flag.place
    assert rackside_hook.found_flag(flag.place)[0] == 0
    flag.numbers[0] = 7
    assert rackside_hook.found_flag(flag.place)[0] == 7
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "short").write_bytes(b"")
    others = [[where, path, mark + 1], ["another", path, mark]]
    others += [[where, str(tmp_path / name), mark] for name in ("pipe", "short", "none")]
    assert {rackside_hook.found_flag(other) for other in others} == {rackside_hook.NO_FLAG}
    flag.close()
    assert rackside_hook.found_flag(flag.place) == rackside_hook.NO_FLAG


def test_a_rank_that_ran_ahead_of_rank_0_says_so(folder: Path) -> None:
    """Its GPU had not ended the step: the change comes late, and that must not pass in silence."""
    store = light_store()
    with Hook("job", 4, 32, 0, 2, store, str(folder)) as first, Hook("job", 4, 32, 1, 2, store, str(folder)) as other:
        [other.step() for _ in range(5)]
        first.step()
        line = Line(folder / "job.sock")
        line.greet()
        line.say({"id": "a", "do": "microbatch", "microbatch": 2})
        assert first._server is not None
        while not first._server.commands:
            time.sleep(0.01)
        assert [first.step().microbatch for _ in range(2)] == [4, 2]
        with pytest.warns(RuntimeWarning, match="wait for the GPU once a step"):
            assert other.step().microbatch == 2


async def test_a_microbatch_and_its_split_are_one_change(tmp_path: Path) -> None:
    """An undo puts both back; as two commands it would stay half done where somebody else's came in between."""
    store = light_store()
    with Hook("job", 4, 32, 0, 2, store, str(tmp_path / "hooks")) as hook:
        async with attached(tmp_path / "hooks" / "job.sock") as console:
            answer = asyncio.create_task(console.does("both", "microbatch", microbatch=2, microbatches=[11, 5]))
            while not answer.done():
                hook.step()
                await asyncio.sleep(0.005)
            assert answer.result().state == "applied"
            assert hook.settings[1:3] == (2, (11, 5))


async def test_a_repeated_id_acts_once(hook: Hook, folder: Path) -> None:
    line = Line(folder / "job.sock")
    line.greet()
    for _ in range(2):
        line.say({"id": "same", "do": "microbatch", "microbatch": 2})
    await until(lambda: len(hook._server.commands) == 1)
    hook.step()
    line.say({"id": "other", "do": "microbatch", "microbatch": 8})
    await until(lambda: hook._server.commands)
    hook.step()
    line.say({"id": "same", "do": "microbatch", "microbatch": 2})
    line.say({"ask": "same"})
    line.say({"ask": "never"})
    while (heard := line.hear()).get("state") != "unknown":
        pass
    assert heard["id"] == "never"
    assert hook.step().microbatch == 8


async def test_a_command_sent_again_before_it_is_in_force_is_answered_twice(hook: Hook, folder: Path) -> None:
    async with attached(folder / "job.sock") as console:
        both = [asyncio.create_task(console.does("same", "microbatch", microbatch=2)) for _ in range(2)]
        await until(lambda: hook._server.commands)
        both.append(asyncio.create_task(console.client.ask("same", 30)))
        while not all(answer.done() for answer in both):
            hook.step()
            await asyncio.sleep(0.005)
        assert [(a.result().state, a.result().step) for a in both] == [("applied", both[0].result().step)] * 3


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ({"do": "microbatch", "microbatch": 3}, "Microbatch 3 does not fit the global batch of 32"),
        ({"do": "microbatch", "microbatch": True}, "must be a whole number"),
        ({"do": "microbatch"}, "must be a whole number, not None"),
        ({"do": "rebalance", "microbatches": [7]}, "must add up to 8"),
        ({"do": "rebalance", "microbatches": [4, 4]}, "one number for each of the 1 ranks"),
        ({"do": "rebalance", "microbatches": "all"}, "one number for each of the 1 ranks"),
        ({"do": "microbatch", "microbatch": 2, "microbatches": [8]}, "must add up to 16"),
        ({"do": ["explode"]}, "does not offer ['explode']"),
        ({"do": "explode"}, "does not offer 'explode'"),
    ],
)
async def test_what_does_not_fit_is_rejected_with_a_reason(
    hook: Hook, folder: Path, command: dict[str, Any], says: str
) -> None:
    async with attached(folder / "job.sock") as console:
        answer = asyncio.create_task(console.client.submit({"id": "x", **command}, 10))
        while not answer.done():
            hook.step()
            await asyncio.sleep(0.005)
        assert answer.result().state == "rejected"
        assert says in answer.result().reason
        assert hook.settings.microbatch == 4


@pytest.mark.parametrize(
    ("said", "says"),
    [
        (b"GET / HTTP/1.1", "not a JSON object"),
        (b"[1, 2]", "not a JSON object"),
        (b"\xff\xfe", "not a JSON object"),
        (b'{"hello": 2}', "speaks protocol 1, not 2"),
        (b"[" * 5000, "not a JSON object"),
        (b"x" * 70000, "longer than"),
        (b'"' + b"x" * 70000 + b'"', "longer than"),
    ],
    ids=["http", "list", "not utf-8", "protocol", "deep", "long", "long json"],
)
async def test_garbage_ends_that_client_alone(hook: Hook, folder: Path, said: bytes, says: str) -> None:
    good, bad = Line(folder / "job.sock"), Line(folder / "job.sock")
    good.greet()
    with suppress(OSError):
        bad.say(said)
    with suppress(OSError):
        assert says in bad.hear()["error"]
    hook.step()
    hook.step(loss=1, tokens=1, step_time_s=1)
    assert good.hear()["event"] == "step"


async def test_a_client_that_reads_nothing_is_dropped_and_holds_nothing_up(hook: Hook, folder: Path) -> None:
    silent = Line(folder / "job.sock")
    silent.greet()
    assert hook._server.attached == 1
    for number in range(3000):
        hook._server.state(f"c{number}", {"state": "rejected", "reason": "x" * 1000})
    await until(lambda: hook._server.attached == 0, what="the slow client dropped")
    assert hook.step().step == 1


async def test_a_job_that_ends_in_mid_command(hook: Hook, folder: Path) -> None:
    async with attached(folder / "job.sock") as console:
        answer = asyncio.create_task(console.does("late", "microbatch", microbatch=2))
        await until(lambda: hook._server.commands)
        hook.close()
        state = await answer
        assert state.state == "unknown"
        assert "may or may not have taken effect" in state.reason


def test_a_forked_child_leaves_the_socket_alone(folder: Path) -> None:
    with Hook("job", directory=str(folder)):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        assert Line(folder / "job.sock").greet()["job"] == "job"


def test_a_store_that_fails_stops_nothing(folder: Path) -> None:
    class Broken:
        def set(self, key: str, value: str) -> None:
            raise ConnectionError("gone")

        get = add = set

    with pytest.warns(RuntimeWarning, match="store failed"):
        hook = Hook("job", microbatch=1, global_batch=2, world_size=2, store=Broken(), directory=str(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [hook.step().step for _ in range(3)] == [1, 2, 3], "warned once, not every step"
    hook.close()


def test_a_step_with_nobody_attached_costs_microseconds(hook: Hook) -> None:
    """Not a benchmark: a bound a hundred times above what was measured, to catch I/O on the step's way."""
    assert timeit.timeit(hook.step, number=2000) / 2000 < 100e-6


def test_rackside_hook_prints_the_file(tmp_path: Path) -> None:
    printed = subprocess.run([sys.executable, "-m", "tui.cli", "hook"], capture_output=True, text=True, timeout=30)
    assert printed.stdout == Path(rackside_hook.__file__).read_text()


@given(st.binary(max_size=200))
def test_any_line_from_a_socket_is_a_message_or_a_sentence(line: bytes) -> None:
    with suppress(ProtocolError):
        decode_line(line)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from(["rackside_hook", "job", "id", "state", "event", "step", "settings"]), json_values)
)
def test_any_object_from_a_socket_is_a_message_or_a_sentence(message: dict[str, Any]) -> None:
    with suppress(ProtocolError):
        decode_line(json.dumps(message).encode())


class TestOneOperatorAtATime:
    """Whoever commands the job holds it; another may steal it, with a reason that everybody is told."""

    def test_another_is_refused_and_may_steal(self, hook: Hook, folder: Path) -> None:
        first, second = Line(folder / "job.sock"), Line(folder / "job.sock")
        for line, name in ((first, "ann@desk"), (second, "guard@head")):
            line.say({"hello": 1, "operator": name})
            assert line.hear()["holder"] is None
        first.say({"id": "a", "do": "microbatch", "microbatch": 2})
        assert first.hear()["holder"]["operator"] == "ann@desk"
        assert second.hear()["holder"]["operator"] == "ann@desk"
        hook.step()
        second.say({"id": "b", "do": "microbatch", "microbatch": 8})
        heard = [second.hear() for _ in range(3)]
        refused = next(h for h in heard if h.get("id") == "b")
        assert refused["state"] == "rejected"
        assert refused["reason"].startswith("ann@desk holds this job since ")
        second.say({"id": "c", "do": "microbatch", "microbatch": 8, "steal": "ann is asleep"})
        assert second.hear()["holder"] == {
            "operator": "guard@head",
            "since": pytest.approx(time.time(), abs=30),
            "reason": "ann is asleep",
        }
        hook.step()
        assert hook.settings.microbatch == 8
        first.say({"id": "d", "do": "microbatch", "microbatch": 4})
        assert "guard@head holds" in next(h for h in iter(first.hear, {}) if h.get("id") == "d")["reason"]

    def test_who_is_gone_holds_it_no_longer(self, hook: Hook, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = Line(folder / "job.sock")
        first.say({"hello": 1, "operator": "ann@desk"})
        first.hear()
        first.say({"id": "a", "do": "microbatch", "microbatch": 2})
        assert first.hear()["holder"]["operator"] == "ann@desk"
        monkeypatch.setattr(rackside_hook, "GONE_S", 0.0)
        second = Line(folder / "job.sock")
        second.greet()
        second.say({"id": "b", "do": "microbatch", "microbatch": 8})
        assert "holds" in next(h for h in iter(second.hear, {}) if h.get("id") == "b")["reason"], "still attached"
        first.lines.close()
        first.socket.close()
        server = hook._server
        assert server is not None
        asyncio.run(until(lambda: server.attached == 1))
        second.say({"id": "c", "do": "microbatch", "microbatch": 8})
        assert next(h for h in iter(second.hear, {}) if "holder" in h)["holder"]["operator"] == "raw"


class TestPause:
    """All ranks wait at one boundary; it ends by itself, or when somebody resumes the job."""

    def test_it_ends_by_itself_and_tells(self, hook: Hook, folder: Path) -> None:
        line = Line(folder / "job.sock")
        assert line.greet()["max_pause_s"] == rackside_hook.PAUSE_S
        line.say({"id": "p", "do": "pause", "seconds": 0.2})
        line.hear()
        began = time.monotonic()
        hook.step()
        assert time.monotonic() - began >= 0.2
        told = [line.hear() for _ in range(4)]
        assert [t["until"] is None for t in told if t.get("event") == "pause"] == [False, True]
        assert [t["state"] for t in told if t.get("id") == "p"] == ["scheduled", "applied"]
        assert hook.step().step == 2

    def test_resume_ends_it(self, hook: Hook, folder: Path) -> None:
        line = Line(folder / "job.sock")
        line.greet()
        line.say({"id": "r0", "do": "resume"})
        assert line.hear()["reason"] == "The job is not paused."
        line.say({"id": "p", "do": "pause", "seconds": 60})
        line.say({"id": "r", "do": "resume"})
        line.hear()
        hook.step()  # would take a minute
        assert next(h for h in iter(line.hear, {}) if h.get("id") == "r")["state"] == "applied"

    def test_a_resume_that_comes_as_a_pause_ends_spares_the_next(
        self, hook: Hook, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The pause ends between the look at it and the noting of who resumes it: the one waits for the other."""
        server, held = hook._server, rackside_hook.Server._held
        ended: list[threading.Thread] = []

        def ends_meanwhile(self: Any, client: Any, message: dict[str, Any]) -> str:
            refusal: str = held(self, client, message)
            if message["do"] == "resume":
                ended.append(threading.Thread(target=server.resumed, args=(1, ["p"])))
                ended[0].start()
                ended[0].join(0.2)
            return refusal

        monkeypatch.setattr(rackside_hook.Server, "_held", ends_meanwhile)
        line = Line(folder / "job.sock")
        line.greet()
        line.say({"id": "p", "do": "pause", "seconds": 60})
        line.say({"id": "r", "do": "resume"})
        assert next(h for h in iter(line.hear, {}) if h.get("id") == "r")["state"] in ("accepted", "applied")
        ended[0].join()
        assert not server.resuming, "nobody is left who would end the next pause"

    def test_a_length_that_is_refused_leaves_nothing_to_resume(self, hook: Hook, folder: Path) -> None:
        line = Line(folder / "job.sock")
        line.greet()
        line.say({"id": "p", "do": "pause", "seconds": 1e6})
        line.hear()
        hook.step()
        told = next(h for h in iter(line.hear, {}) if h.get("id") == "p" and h["state"] == "rejected")
        assert told["reason"] == "A pause of this job is at most 300 s, and longer than 0."
        line.say({"id": "r", "do": "resume"})
        assert next(h for h in iter(line.hear, {}) if h.get("id") == "r")["reason"] == "The job is not paused."
