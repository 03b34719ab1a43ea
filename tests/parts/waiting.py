"""Wait for what is to happen, not for the clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(happened: Callable[[], object], timeout_s: float = 20.0, what: str = "", look_s: float = 0.02) -> None:
    """Return as soon as `happened()` is true, looked at every `look_s`; fail after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            while not happened():
                await asyncio.sleep(look_s)
    except TimeoutError:
        raise AssertionError(f"did not happen within {timeout_s} s: {what or happened}") from None
