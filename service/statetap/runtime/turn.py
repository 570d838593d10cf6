"""A turn: one worker lent to one unit's run, until no sample waits for it any more.

By tokens the next request leaves as soon as the answer to the last one is in, while its capture is still being collected; by
count the next request waits until the lifecycle before it is closed, and a fence stands wherever two might be confused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from statetap.core import unit_messages as msg
from statetap.core.capture import Refusal, RefusalReason
from statetap.core.spec import Identity
from statetap.ports import GenerateSample, InferenceError, RecordedAnswer, RequestRefused
from statetap.runtime.driver import WorkerDriver
from statetap.runtime.fencing import FenceFailed, Fencing
from statetap.runtime.unit_run import UnitRun
from statetap.telemetry import events

PERMANENT_REFUSALS = frozenset({400, 413, 422})


class Turn:
    """`elsewhere` says whether a worker that is not among the given ones could take a sample of this unit."""

    def __init__(self, run: UnitRun, driver: WorkerDriver, elsewhere: Callable[[Sequence[str]], bool]) -> None:
        self._run = run
        self._driver = driver
        self._elsewhere = elsewhere

    async def take(self) -> None:
        """Ask the worker for every sample that waits, until none does or the worker is not free any more."""
        run, driver = self._run, self._driver
        while driver.free and run.waiting_for(driver.name, self._elsewhere):
            await driver.pace()
            samples = run.waiting_for(driver.name, self._elsewhere)
            if not driver.free or not samples:
                # What was so before the wait need not be so after it.
                return
            if driver.fencing is None:
                await self._send(samples[0], run.assign(samples[0], driver.name, Identity.TOKENS, None))
            elif not await self._go_on_strictly(driver.fencing, samples):
                return

    async def _go_on_strictly(self, fencing: Fencing, samples: Sequence[int]) -> bool:
        """Ask for one of the samples, or send the fence that must come first. False: the worker is to be left alone for now."""
        lengths = [self._run.length(sample) for sample in samples]
        length = fencing.gate.choose(lengths)
        if length is not None:
            await self._ask_strictly(fencing, samples[lengths.index(length)])
            return True
        try:
            await self._driver.fence(fencing, lengths)
        except (FenceFailed, InferenceError) as error:
            self._run.log.warning(events.REQUEST_FAILED, worker=self._driver.name, reason=f"fence: {error}")
            await self._driver.rest()
            return False
        return True

    async def _ask_strictly(self, fencing: Fencing, sample: int) -> None:
        run, driver, gate = self._run, self._driver, fencing.gate
        length = run.length(sample)
        rid = run.assign(sample, driver.name, Identity.COUNT, gate.chunk)
        outcome = run.await_attempt(rid, lambda: driver.look_again(fencing.quiet_period_seconds))
        driver.begin_lifecycle(rid)
        gate.sent(length)
        captured = False
        try:
            await self._send(sample, rid)
            captured = await outcome
        finally:
            driver.end_lifecycle()
            if not captured:
                gate.doubt(length)

    async def _send(self, sample: int, rid: str) -> None:
        """Send one request and post what came of it."""
        run, driver = self._run, self._driver
        if (stranger := run.outside_vocabulary(sample)) is not None:
            # One such id kills an SGLang server.
            self._fail(rid, RefusalReason.OUTSIDE_VOCABULARY, f"the model has no token id {stranger}", msg.Fault.SAMPLE)
            return
        try:
            answer = await driver.ask(GenerateSample(rid, run.tokens(sample), rid))
        except asyncio.CancelledError:
            self._fail(rid, RefusalReason.REQUEST_FAILED, f"worker {driver.name} was taken away", msg.Fault.NOBODY)
            raise
        except InferenceError as error:
            run.log.warning(events.REQUEST_FAILED, worker=driver.name, rid=rid, reason=str(error))
            permanent = isinstance(error, RequestRefused) and error.status in PERMANENT_REFUSALS
            fault = msg.Fault.SAMPLE if permanent else msg.Fault.ATTEMPT
            self._fail(rid, RefusalReason.REQUEST_FAILED, f"worker {driver.name}: {error}", fault)
            return
        run.take_answer(RecordedAnswer(rid, sample, driver.name, answer.next_token), answer)

    def _fail(self, rid: str, reason: RefusalReason, detail: str, fault: msg.Fault) -> None:
        self._run.post(msg.RequestFailed(rid, str(Refusal(reason, detail)), fault))
