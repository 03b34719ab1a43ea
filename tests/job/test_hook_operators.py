"""Who commands a job through its hook, and how long it waits for them."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import rackside_hook
from rackside_hook import Hook

from tests.parts.hook import Line
from tests.parts.waiting import until


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
