"""The rest that a worker is given after its publisher lost a capture.

Most are lost for lack of room: to ask again at once would lose the next one as well. Dumps that are released meanwhile make room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from statetap.ports import Clock

LONGEST_PAUSE_SECONDS = 30.0
# Losses for want of room may go on for as long as it is missing: each has its pause, even where retries have no back-off.
SHORTEST_PAUSE_SECONDS = 0.125
# Twice as long so often reaches the longest from the shortest.
MOST_DOUBLINGS = 10


class LossPause:
    """One worker's. The first pause lasts `first_seconds`, the next twice as long, until a dump comes through again.

    None is shorter than the shortest or longer than the longest. `over` is called at the end of each.
    """

    def __init__(self, first_seconds: float, clock: Clock, over: Callable[[], None]) -> None:
        self._first_seconds = max(first_seconds, SHORTEST_PAUSE_SECONDS)
        self._clock = clock
        self._over = over
        self._losses = 0
        self._until = 0.0
        self._waking: asyncio.Task[None] | None = None

    @property
    def is_on(self) -> bool:
        return self._clock.monotonic() < self._until

    def lost(self) -> float:
        """A capture was lost. What was asked for before a pause and is lost during it does not prolong it. Seconds to its end."""
        if not self.is_on:
            seconds = min(self._first_seconds * 2**self._losses, LONGEST_PAUSE_SECONDS)
            self._losses = min(self._losses + 1, MOST_DOUBLINGS)
            self._until = self._clock.monotonic() + seconds
            self._waking = asyncio.create_task(self._wake(seconds), name="pause after a lost capture")
        return self._until - self._clock.monotonic()

    def published(self) -> None:
        """A dump came through: there is room."""
        self._losses = 0

    async def close(self) -> None:
        if self._waking is not None:
            self._waking.cancel()
            await asyncio.gather(self._waking, return_exceptions=True)

    async def _wake(self, seconds: float) -> None:
        await self._clock.sleep(seconds)
        self._over()
