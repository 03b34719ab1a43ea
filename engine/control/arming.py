"""Read-only until armed, and armed for a stated time only."""

from __future__ import annotations

from collections.abc import Callable

ARMED_S = 300.0


class Arming:
    """`clock` is monotonic seconds. A fixed read-only console cannot be armed; `why` is the sentence that says so."""

    def __init__(
        self,
        clock: Callable[[], float],
        fixed_read_only: bool,
        why: str = "This console was started with --read-only; start another without it to act.",
    ) -> None:
        self._clock, self.fixed_read_only, self.why = clock, fixed_read_only, why
        self._until = 0.0

    @property
    def left_s(self) -> float:
        """Seconds for which actions may still be confirmed; 0 when not armed."""
        return max(0.0, self._until - self._clock())

    def arm(self, seconds: float = ARMED_S) -> str:
        """Arm; returns why not, or an empty string."""
        if self.fixed_read_only:
            return self.why
        self._until = self._clock() + seconds
        return ""

    def disarm(self) -> None:
        self._until = 0.0
