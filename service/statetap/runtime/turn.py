"""A turn: one worker lent to one unit's run, until no sample waits for it any more.

By tokens a request carries as many samples as the worker's tuner says. The next one is made ready while it is in flight, and
leaves as soon as the response is in: what was answered is taken only then, and captures are still being collected. Where
anything failed, that comes first. By count a request carries one sample, the next one waits until the lifecycle before it is
closed, and a fence stands wherever two might be confused. It does not wait until the values are looked at: if those are refused,
so is what the next request brought.

What befalls a request of several samples says nothing of any of them: each goes again, alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice, takewhile, tee

from statetap.core import unit_messages as msg
from statetap.core.capture import Refusal, RefusalReason
from statetap.core.spec import Identity
from statetap.core.strict import StrictGate
from statetap.ports import GenerateAnswer, GenerateSample, InferenceError, RecordedAnswer, RequestRefused
from statetap.runtime.driver import WorkerDriver
from statetap.runtime.fencing import FenceFailed, Fencing
from statetap.runtime.unit_run import UnitRun
from statetap.telemetry import events

# Of the request's body: what stands before a worker may have a limit of its own.
TOO_LARGE = 413
PERMANENT_REFUSALS = frozenset({400, TOO_LARGE, 422})


class Turn:
    """`elsewhere` says whether a worker that is not among the given ones could take a sample of this unit."""

    def __init__(self, run: UnitRun, driver: WorkerDriver, elsewhere: Callable[[Sequence[str]], bool]) -> None:
        self._run = run
        self._driver = driver
        self._elsewhere = elsewhere
        self._failure: Exception | None = None

    async def take(self) -> None:
        """Ask the worker for every sample that waits, until none does or the worker is not free any more."""
        driver = self._driver
        driver.meter.tuner.paused()
        try:
            while driver.free and (samples := self._next()):
                if driver.paced:
                    await driver.pace()
                    # What was so before the wait need not be so after it.
                    samples = self._next() if driver.free else []
                    if not samples:
                        return
                if driver.fencing is None:
                    await self._ask(samples)
                elif not await self._go_on_strictly(driver.fencing):
                    return
        finally:
            self._run.take_answers()

    def _next(self) -> list[int]:
        """The first sample that waits for this worker and those that may go with it, in placement order; empty: none waits."""
        run, driver = self._run, self._driver
        samples = run.waiting_for(driver.name, self._elsewhere)
        first = next(samples, None)
        if first is None:
            return []
        if driver.fencing is not None or driver.machine.on_probation or run.was_lost(first):
            return [first]
        fresh, measured = tee(takewhile(lambda sample: not run.was_lost(sample), chain([first], samples)))
        return list(islice(fresh, driver.meter.tuner.take(run.samples.lengths[sample] for sample in measured)))

    async def _ask(self, samples: Sequence[int]) -> None:
        """Send one request. If all of it is answered, the answers are in the run's hand until the next one has left."""
        run, driver = self._run, self._driver
        rids = [
            run.assign(sample, driver.name, Identity.TOKENS, None, in_company=number > 0) for number, sample in enumerate(samples)
        ]
        # In the loop's next turn: first this request goes out.
        meanwhile = asyncio.get_running_loop().call_soon(self._meanwhile, self._next)
        try:
            answers = await self._request(dict(zip(rids, samples, strict=True)))
        finally:
            meanwhile.cancel()
            if self._failure is not None:
                raise self._failure
            run.take_answers()
        run.in_hand.extend(answers)
        if driver.paced or len(answers) < len(samples):
            run.take_answers()

    def _meanwhile(self, following: Callable[[], list[int]]) -> None:
        """Take the answers of the last request, then make ready what will probably be asked for next.

        If that comes otherwise, it is made anew.
        """
        run, driver = self._run, self._driver
        try:
            run.take_answers()
            if samples := following():
                for sample in samples:
                    # What it finds it keeps, so that it takes no time when the sample is asked for.
                    run.samples.outside(run.spec.model.vocab_size, sample)
                names = [(run.next_rid(sample), sample) for sample in samples]
                driver.prepare([GenerateSample(rid, run.samples.tokens(sample), rid) for rid, sample in names])
        except Exception as error:  # noqa: BLE001 - the turn raises it, when its request is over
            self._failure = error

    async def _go_on_strictly(self, fencing: Fencing) -> bool:
        """Ask for a sample that waits, or send the fence that must come first. False: the worker is to be left alone for now."""
        fencing.take_outcomes()
        if samples := self._next_strictly(fencing.gate):
            await self._ask_strictly(fencing, samples[0])
            return True
        waiting = self._run.waiting_for(self._driver.name, self._elsewhere)
        try:
            await self._driver.fence(fencing, [self._run.samples.lengths[sample] for sample in waiting])
        except (FenceFailed, InferenceError) as error:
            self._run.log.warning(events.REQUEST_FAILED, worker=self._driver.name, reason=f"fence: {error}")
            await self._driver.rest()
            return False
        return True

    def _next_strictly(self, gate: StrictGate) -> list[int]:
        """The first sample that waits for this worker and may be sent now; empty: none may."""
        lengths = self._run.samples.lengths
        waiting = self._run.waiting_for(self._driver.name, self._elsewhere)
        return list(islice((sample for sample in waiting if gate.may_send(lengths[sample])), 1))

    async def _ask_strictly(self, fencing: Fencing, sample: int) -> None:
        """Ask for a sample, until its dumps are chosen or it has failed."""
        run, driver, gate = self._run, self._driver, fencing.gate
        length = run.samples.lengths[sample]
        rid = run.assign(sample, driver.name, Identity.COUNT, gate.chunk)
        lifecycle = run.begin_lifecycle(rid)
        driver.begin_lifecycle(rid)
        gate.sent(length)
        meanwhile = asyncio.get_running_loop().call_soon(self._meanwhile, partial(self._next_strictly, gate))
        try:
            await self._send({rid: sample})
            if await lifecycle.complete:
                await driver.look_again(fencing.quiet_period_seconds)
                if await fencing.stands():
                    run.post(msg.LifecycleClosed(rid))
                else:
                    self._fail(rid, RefusalReason.AMBIGUOUS, "the capture before it was refused, unfenced", msg.Fault.NOBODY)
                await lifecycle.chosen
        finally:
            meanwhile.cancel()
            driver.end_lifecycle()
            fencing.follow(length, lifecycle.accepted)
        if self._failure is not None:
            raise self._failure

    async def _send(self, asked: dict[str, int]) -> None:
        """Send one request, of these attempts (rid to sample), and post what came of each."""
        self._run.in_hand.extend(await self._request(asked))
        self._run.take_answers()

    async def _request(self, asked: dict[str, int]) -> list[tuple[RecordedAnswer, GenerateAnswer]]:
        """Send one request, of these attempts (rid to sample). What failed of it is posted, what was answered is returned."""
        run, driver = self._run, self._driver
        for rid, sample in list(asked.items()):
            if (stranger := run.samples.outside(run.spec.model.vocab_size, sample)) is not None:
                # One such id kills an SGLang server.
                del asked[rid]
                self._fail(rid, RefusalReason.OUTSIDE_VOCABULARY, f"the model has no token id {stranger}", msg.Fault.SAMPLE)
        if not asked:
            return []
        try:
            outcomes = await driver.ask_together(
                [GenerateSample(rid, run.samples.tokens(sample), rid) for rid, sample in asked.items()]
            )
        except asyncio.CancelledError:
            for rid in asked:
                self._fail(rid, RefusalReason.REQUEST_FAILED, f"worker {driver.name} was taken away", msg.Fault.NOBODY)
            raise
        except InferenceError as error:
            self._fail_together(list(asked), error)
            return []
        answers = []
        for (rid, sample), outcome in zip(asked.items(), outcomes, strict=True):
            if isinstance(outcome, RequestRefused):
                self._refused(rid, outcome, msg.Fault.SAMPLE if _is_permanent(outcome) else msg.Fault.ATTEMPT)
            else:
                answers.append((RecordedAnswer(rid, sample, driver.name, outcome.next_token), outcome))
        return answers

    def _fail_together(self, rids: Sequence[str], error: InferenceError) -> None:
        """The whole request failed."""
        permanent, several = _is_permanent(error), len(rids) > 1
        if not permanent or (isinstance(error, RequestRefused) and error.status == TOO_LARGE):
            self._driver.meter.lost(rids[0])
        if several:
            # What is refused for good is the fault of one of them, and the others need not be lucky with it.
            fault = msg.Fault.NOBODY if permanent else msg.Fault.COMPANY
        else:
            fault = msg.Fault.SAMPLE if permanent else msg.Fault.ATTEMPT
        for rid in rids:
            self._refused(rid, error, fault)

    def _refused(self, rid: str, error: InferenceError, fault: msg.Fault) -> None:
        self._run.log.warning(events.REQUEST_FAILED, worker=self._driver.name, rid=rid, reason=str(error))
        self._fail(rid, RefusalReason.REQUEST_FAILED, f"worker {self._driver.name}: {error}", fault)

    def _fail(self, rid: str, reason: RefusalReason, detail: str, fault: msg.Fault) -> None:
        self._run.post(msg.RequestFailed(rid, str(Refusal(reason, detail)), fault))


def _is_permanent(error: InferenceError) -> bool:
    return isinstance(error, RequestRefused) and error.status in PERMANENT_REFUSALS
