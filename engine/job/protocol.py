"""The hook's wire protocol as values: JSON lines over a Unix socket, the client speaks first.

-> {"hello": 1, "operator": "ann@desk"}
<- greeting: who the job is, its settings, what it can do, where its ranks run
-> {"id": "…", "do": "microbatch", "microbatch": 4}  or  {"id": "…", "do": "rebalance", "microbatches": [9, 7]}
   or both at once: "microbatch" with "microbatches"
-> {"id": "…", "do": "pause", "seconds": 60}  or  {"id": "…", "do": "resume"}
   with "steal": "a reason" when another operator holds the job; who commands it holds it
<- {"id": "…", "state": "scheduled", "step": 120}, then at that step "applied" or "rejected" with its reason
-> {"ask": "…"}  <- the last state of that command, or "unknown"
<- {"event": "step", …} after every step, {"event": "ranks", …} once known, {"event": "pause", …} when one begins and
   ends, {"event": "holder", …} when another operator takes the job, {"event": "closing"}
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

PROTOCOL = 1
LINE_LIMIT = 1 << 20
"""Longest line taken from a hook: 8,192 ranks with their places fit several times over."""


class ProtocolError(Exception):
    """What came is not this protocol. The text is a sentence."""


class Settings(msgspec.Struct, frozen=True):
    step: int
    microbatch: int
    microbatches: tuple[int, ...]


class Rank(msgspec.Struct, frozen=True):
    rank: int
    host: str = ""
    pid: int = 0
    device: str | None = None


class Holder(msgspec.Struct, frozen=True):
    """Who may command the job now, since which unix second, and why it was taken from somebody else."""

    operator: str
    since: float
    reason: str = ""


class Greeting(msgspec.Struct, frozen=True):
    rackside_hook: int
    job: str
    step: int
    settings: Settings
    world_size: int
    global_batch: int
    pid: int = 0
    host: str = ""
    framework: str = ""
    tokens_per_sample: int | None = None
    plan: dict[str, Any] | None = None
    can: tuple[str, ...] = ()
    ranks: tuple[Rank, ...] | None = None
    max_pause_s: float = 0.0
    holder: Holder | None = None
    paused_until: float | None = None


class CommandState(msgspec.Struct, frozen=True):
    """Where a command stands. "unknown": the hook never heard of it, or the line broke while it was in flight."""

    id: str
    state: Literal["accepted", "scheduled", "applied", "rejected", "unknown"]
    step: int | None = None
    reason: str = ""
    before: Settings | None = None
    settings: Settings | None = None
    operator: str = ""

    @property
    def ended(self) -> bool:
        return self.state in ("applied", "rejected", "unknown")


class StepEvent(msgspec.Struct, frozen=True):
    step: int
    time: float
    settings: Settings
    loss: float | None = None
    tokens: float | None = None
    step_time_s: float | None = None


class RanksEvent(msgspec.Struct, frozen=True):
    ranks: tuple[Rank, ...]


class PauseEvent(msgspec.Struct, frozen=True):
    """The job waits from this step on until that unix second at most; or, with None, goes on."""

    step: int
    until: float | None


class HolderEvent(msgspec.Struct, frozen=True):
    holder: Holder


class Closing(msgspec.Struct, frozen=True):
    """The job ends of its own accord."""


Message = Greeting | CommandState | StepEvent | RanksEvent | PauseEvent | HolderEvent | Closing

_EVENTS: dict[str, type] = {
    "step": StepEvent,
    "ranks": RanksEvent,
    "pause": PauseEvent,
    "holder": HolderEvent,
    "closing": Closing,
}


def decode_line(line: bytes) -> Message:
    """One line from a hook. ProtocolError, with a sentence, for anything else."""
    try:
        data = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        raise ProtocolError("the job's socket sent a line that is not JSON") from None
    if not isinstance(data, dict):
        raise ProtocolError("the job's socket sent JSON that is not an object")
    if "error" in data:
        raise ProtocolError(str(data["error"])[:300])
    kind: Any = _EVENTS.get(str(data.get("event")))
    if kind is None:
        kind = Greeting if "rackside_hook" in data else CommandState
    try:
        found: Message = msgspec.convert(data, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"the job's socket sent a message that rackside does not understand: {error}") from None
    if isinstance(found, Greeting) and found.rackside_hook != PROTOCOL:
        raise ProtocolError(f"the job's hook speaks protocol {found.rackside_hook}; this console speaks {PROTOCOL}")
    return found
