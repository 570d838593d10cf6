"""`HandClock`: time that passes only when a test says so, and wakes who has slept long enough."""

from __future__ import annotations

import asyncio

START = 1_760_000_000.0


class HandClock:
    """Implements `Clock`. Nothing sleeps for real: a sleeper waits until `advance` has moved past its time."""

    def __init__(self, now: float = START) -> None:
        self._start = self._now = now
        self._sleepers: dict[asyncio.Future[None], float] = {}

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now - self._start

    async def sleep(self, seconds: float) -> None:
        waking: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers[waking] = self._now + seconds
        try:
            await waking
        finally:
            self._sleepers.pop(waking, None)

    @property
    def next_waking(self) -> float | None:
        """Seconds until the first sleeper is due, None if nobody sleeps."""
        return min(self._sleepers.values()) - self._now if self._sleepers else None

    def advance(self, seconds: float) -> None:
        """Let time pass and wake whoever is due, the longest due first. What they do then happens after this returns."""
        self._now += seconds
        for waking, until in sorted(self._sleepers.items(), key=lambda sleeper: sleeper[1]):
            if until <= self._now and not waking.done():
                waking.set_result(None)


async def settle(turns: int = 60) -> None:
    """Give every task its turns: what could go on without the clock has gone on when this returns."""
    for _ in range(turns):
        await asyncio.sleep(0)
