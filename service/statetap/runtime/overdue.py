"""Tells of captures that take too long after the answer to their request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from statetap.ports import Clock

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class OverdueWatch:
    """Attempts of one unit that were answered, each overdue unless it is settled within so many seconds.

    One task for all: nearly every capture is complete long before, and a timer each would be for nothing.
    """

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._seconds = seconds
        self._clock = clock
        # In the order in which they become overdue: all have the same time.
        self._at: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def rids(self) -> tuple[str, ...]:
        """Attempts that are answered and not settled."""
        return tuple(self._at)

    def answered(self, rid: str, spawn: Spawn, overdue: Callable[[str], None]) -> None:
        """From here on the time counts; `overdue` hears of it when it is over, from a task made by `spawn`.

        Only the task keeps them: a run that its own watch held would stay, its dataset open, until garbage is collected.
        """
        self._at[rid] = self._clock.monotonic() + self._seconds
        if self._task is None:
            self._task = spawn(self._watch(overdue))

    def settled(self, rid: str) -> None:
        self._at.pop(rid, None)

    def close(self) -> None:
        """Watch no more. Its task is let go of: by its traceback it would hold all that it was made for."""
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def _watch(self, overdue: Callable[[str], None]) -> None:
        while self._at:
            rid, at = next(iter(self._at.items()))
            await self._clock.sleep(max(0.0, at - self._clock.monotonic()))
            if self._at.pop(rid, None) is not None:
                overdue(rid)
        self._task = None
