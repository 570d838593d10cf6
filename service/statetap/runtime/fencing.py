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
    """One worker's gate, the fence that is under way, and lifecycles that are closed while their captures are still looked at.

    A lifecycle closes `quiet_period_seconds` after its dumps came.
    """

    def __init__(self, worker: str, gate: StrictGate, vocab_size: int, quiet_period_seconds: float, clock: Clock) -> None:
        self.gate = gate
        self.quiet_period_seconds = quiet_period_seconds
        self._worker = worker
        self._vocab_size = vocab_size
        self._clock = clock
        self._fences = 0
        self._appeared = asyncio.Event()
        self._unsettled: list[tuple[int, asyncio.Future[bool]]] = []

    def follow(self, length: int, accepted: asyncio.Future[bool]) -> None:
        """The lifecycle of a request of this length has ended; `accepted` says, now or later, whether with a good capture."""
        self._unsettled.append((length, accepted))

    def take_outcomes(self) -> None:
        """Doubt what has failed since: nothing may be sent before a fence."""
        for length, accepted in self._unsettled:
            if accepted.done() and not accepted.result():
                self.gate.doubt(length)
        self._unsettled = [(length, accepted) for length, accepted in self._unsettled if not accepted.done()]

    async def stands(self) -> bool:
        """Whether no lifecycle since the last fence has failed, once all that have ended are settled.

        If one has, what the request after it brought may be its late dumps.
        """
        if self._unsettled:
            await asyncio.wait([accepted for _, accepted in self._unsettled])
            self.take_outcomes()
        return self.gate.is_fenced

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
