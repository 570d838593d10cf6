"""Strict mode at one worker: sends the fences that the gate asks for, and waits for their dumps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

import numpy as np

from statetap.core.dumps import DumpFacts
from statetap.core.strict import StrictGate, fence_tokens
from statetap.ports import GenerateSample


class FenceFailed(Exception):
    """The fence's dump did not appear: the worker's dumps cannot be told apart now."""


class Fencing:
    """One worker's gate, and the fence that is under way. A lifecycle closes `quiet_period_seconds` after its dumps came."""

    def __init__(self, worker: str, gate: StrictGate, vocab_size: int, quiet_period_seconds: float) -> None:
        self.gate = gate
        self.quiet_period_seconds = quiet_period_seconds
        self._worker = worker
        self._vocab_size = vocab_size
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
            await asyncio.wait_for(self._appeared.wait(), timeout_seconds)
        except TimeoutError as error:
            raise FenceFailed(f"no dump of {length} rows appeared within {timeout_seconds:g} s of a fence request") from error
        finally:
            if not self._appeared.is_set():
                self.gate.fence_failed()
