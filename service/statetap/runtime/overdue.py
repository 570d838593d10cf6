"""Tells of captures that take too long after the answer to their request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from statetap.ports import Clock

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class OverdueWatch:
    """`overdue` hears of each attempt, by its rid, that was answered and is not settled within so many seconds.

    One task for all: nearly every capture is complete long before, and a timer each would be for nothing.
    """

    def __init__(self, seconds: float, clock: Clock, spawn: Spawn, overdue: Callable[[str], None]) -> None:
        self._seconds = seconds
        self._clock = clock
        self._spawn = spawn
        self._overdue = overdue
        # In the order in which they become overdue: all have the same time.
        self._at: dict[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def rids(self) -> tuple[str, ...]:
        """Attempts that are answered and not settled."""
        return tuple(self._at)

    def answered(self, rid: str) -> None:
        self._at[rid] = self._clock.monotonic() + self._seconds
        if self._task is None:
            self._task = self._spawn(self._watch())

    def settled(self, rid: str) -> None:
        self._at.pop(rid, None)

    def close(self) -> None:
        """Watch no more. Its task is let go of: by its traceback it would hold all that it was made for."""
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    async def _watch(self) -> None:
        while self._at:
            rid, at = next(iter(self._at.items()))
            await self._clock.sleep(max(0.0, at - self._clock.monotonic()))
            if self._at.pop(rid, None) is not None:
                self._overdue(rid)
        self._task = None
