"""Time, injected so that tests own it."""

from __future__ import annotations

from typing import Protocol


class Clock(Protocol):
    """Time, injected so that tests own it. `now` is seconds since the epoch, `monotonic` only grows."""

    def now(self) -> float: ...
    def monotonic(self) -> float: ...
    async def sleep(self, seconds: float) -> None: ...
