"""Strict mode at one worker: sends the fences that the gate asks for, and waits for their dumps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

import numpy as np

from statetap.core.dumps import DumpFacts
from statetap.core.strict import StrictGate, fence_tokens
from statetap.ports import Clock, GenerateSample
from statetap.runtime.waiting import wait_or_sleep


class FenceFailed(Exception):
    """The fence's dump did not appear: the worker's dumps cannot be told apart now."""


class Fencing:
    """One worker's gate, and the fence that is under way. A lifecycle closes `quiet_period_seconds` after its dumps came."""

    def __init__(self, worker: str, gate: StrictGate, vocab_size: int, quiet_period_seconds: float, clock: Clock) -> None:
        self.gate = gate
        self.quiet_period_seconds = quiet_period_seconds
        self._worker = worker
        self._vocab_size = vocab_size
        self._clock = clock
        self._fences = 0
        self._appeared = asyncio.Event()

    def saw_stray(self, dump: DumpFacts) -> None:
        """A dump outside every lifecycle; the fence's own is among them."""
        if self.gate.appeared(dump.rows):
            self._appeared.set()

    async def fence(
        self, send: Callable[[GenerateSample], Awaitable[object]], pending: Collection[int], *, timeout_seconds: float
    ) -> None:
        """Send a fence and wait for its dump.

        Raises:
            FenceFailed: it did not appear in time, or the chunk size leaves no length for it.
            InferenceError: the worker did not answer it.
        """
        try:
            length = self.gate.begin_fence(pending)
        except ValueError as error:
            raise FenceFailed(str(error)) from error
        self._fences += 1
        self._appeared.clear()
        rid = f"st-fence-{self._worker}-{self._fences}"
        tokens = np.asarray(fence_tokens(length, self._vocab_size), dtype=np.int32)
        try:
            await send(GenerateSample(rid, tokens, rid))
            await wait_or_sleep(self._appeared, self._clock, timeout_seconds)
        finally:
            held = self.gate.awaited is None
            if not held:
                self.gate.fence_failed()
        if not held:
            raise FenceFailed(f"no dump of {length} rows appeared within {timeout_seconds:g} s of a fence request")
