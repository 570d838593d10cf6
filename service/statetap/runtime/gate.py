"""Strict mode at one worker: what must be true before the next request may leave (the rules are in `core.strict`).

A fence is a request of a length of its own: once its dump has appeared, so has every dump of the requests before it. It is
needed before the first sample, after any failed attempt, and between two samples of equal length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np

from statetap.core.dumps import DumpFacts
from statetap.core.strict import fence_length, fence_tokens
from statetap.ports import GenerateSample


class FenceFailed(Exception):
    """The fence's dump did not appear: the worker's dumps cannot be told apart now."""


class StrictGate:
    """Keeps one worker's lifecycles apart. `chunk` is its declared chunk size in tokens, None if it never splits a prompt."""

    def __init__(self, chunk: int | None, vocab_size: int, quiet_period_seconds: float) -> None:
        self.chunk = chunk
        self.quiet_period_seconds = quiet_period_seconds
        self._vocab_size = vocab_size
        self._previous: int | None = None
        self._unaccounted: set[int] = set()
        self._fenced = False
        self._fences = 0
        self._awaited: tuple[int, asyncio.Event] | None = None

    def doubt(self, length: int) -> None:
        """An attempt of this length failed: its dumps may still come."""
        self._unaccounted.add(length)
        self._fenced = False

    def restart(self) -> None:
        """The worker is new, or was away: nothing is known of what it still publishes."""
        self._fenced = False

    def may_send(self, length: int) -> bool:
        return self._fenced and length != self._previous

    def sent(self, length: int) -> None:
        self._previous = length

    def saw_stray(self, dump: DumpFacts) -> None:
        """A dump outside every lifecycle; the fence's own is among them."""
        if self._awaited is not None and dump.rows == self._awaited[0]:
            self._awaited[1].set()

    async def fence(
        self, worker: str, send: Callable[[GenerateSample], Awaitable[object]], *, next_lengths: set[int], timeout_seconds: float
    ) -> None:
        """Send a fence and wait for its dump.

        Raises:
            FenceFailed: it did not appear in time.
            InferenceError: the worker did not answer it.
        """
        avoid = self._unaccounted | next_lengths | ({self._previous} if self._previous is not None else set())
        length = fence_length(avoid, self.chunk)
        self._fences += 1
        rid = f"st-fence-{worker}-{self._fences}"
        appeared = asyncio.Event()
        self._awaited = (length, appeared)
        self._unaccounted.add(length)
        try:
            await send(GenerateSample(rid, np.asarray(fence_tokens(length, self._vocab_size), dtype=np.int32), rid))
            await asyncio.wait_for(appeared.wait(), timeout_seconds)
        except TimeoutError as error:
            raise FenceFailed(f"no dump of {length} rows appeared within {timeout_seconds:g} s of a fence request") from error
        finally:
            self._awaited = None
        self._unaccounted.clear()
        self._previous = length
        self._fenced = True
