"""The hook's socket: who may reach it, and everything that can be said to it."""

from __future__ import annotations

import json
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rackside_hook import Hook

from engine.job import ProtocolError, decode_line
from tests.parts.hook import Line
from tests.parts.waiting import until


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


def test_a_forked_child_leaves_the_socket_alone(folder: Path) -> None:
    with Hook("job", directory=str(folder)):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        assert Line(folder / "job.sock").greet()["job"] == "job"


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
