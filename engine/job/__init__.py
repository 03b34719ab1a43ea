"""Running jobs: the hook they carry, its wire protocol, and the console's side of it."""

from engine.job.client import JobClient
from engine.job.protocol import CommandState, Greeting, ProtocolError, RanksEvent, StepEvent, decode_line
from engine.job.status import JobStatus, RankPlace

__all__ = [
    "CommandState",
    "Greeting",
    "JobClient",
    "JobStatus",
    "ProtocolError",
    "RankPlace",
    "RanksEvent",
    "StepEvent",
    "decode_line",
]
