"""Where every job stands: in the ledger first, here for those that are not over, and told to whoever waits for news."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from statetap.core.job import JobEvent, JobMachine, RetryAsked
from statetap.core.machine import IllegalTransition
from statetap.core.norms import JobNorms
from statetap.core.records import JobRecord, JobState, SampleRecord, UnitRecord
from statetap.ports import Clock, Ledger
from statetap.runtime.tally import JobTally
from statetap.runtime.views import JobView, RefusalKind, Refused
from statetap.runtime.waiting import wait_or_sleep

EVENTS_PER_READ = 1000
# Of jobs that are over, the tallies that stay at hand: as many as a page of jobs has. The others are replayed when asked for.
TALLIES_KEPT = 1000
FINAL_STATES = (JobState.COMPLETED, JobState.CANCELLED, JobState.FAILED)
UNFINISHED_STATES = (JobState.PLANNING, JobState.RUNNING, JobState.PAUSED, JobState.CANCELLING)


class JobStates:
    """`active` holds the jobs that are not over, as last recorded."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self.active: dict[str, JobRecord] = {}
        self._ledger = ledger
        self._clock = clock
        self._tallies: dict[str, JobTally] = {}
        # Each lives for as long as somebody waits for it.
        self._news: WeakValueDictionary[str, asyncio.Event] = WeakValueDictionary()

    async def current(self, job: str) -> JobRecord:
        return self.active.get(job) or await self._ledger.job(job)

    async def reread(self, job: str) -> JobRecord:
        """Take a job's record from the ledger, after something there changed."""
        record = self.active[job] = await self._ledger.job(job)
        return record

    async def move(self, job: str, event: JobEvent, reason: str | None = None) -> JobRecord:
        """Move a job, in the ledger first. Refused: its state does not allow it.

        What is so already stays as it is, unless there is another reason for it.
        """
        record = await self.current(job)
        state = _after(record, event)
        if state is record.state and reason in (None, record.reason):
            return record
        record = await self._ledger.set_job_state(job, state, reason, at=self._clock.now())
        if state in FINAL_STATES:
            self.active.pop(job, None)
        else:
            self.active[job] = record
        return record

    async def explain(self, job: str, reason: str) -> bool:
        """Say why a job does not move; whether that is news."""
        record = await self.current(job)
        if record.reason == reason:
            return False
        self.active[job] = await self._ledger.set_job_state(job, record.state, reason, at=self._clock.now())
        return True

    async def retry(self, job: str, units: Sequence[UnitRecord], samples: Sequence[SampleRecord]) -> JobRecord:
        """Move a job that was over back to planning, with new units for `samples`: at once, so that no kill loses the retry."""
        state = _after(await self.current(job), RetryAsked())
        record = self.active[job] = await self._ledger.append_units(job, units, samples, state=state, at=self._clock.now())
        return record

    async def append_event(self, job: str, name: str, **data: Any) -> None:
        """Append to the job's event log and wake whoever waits for it."""
        await self._ledger.append_event(job, name, data, at=self._clock.now())
        self.wake(job)

    def wake(self, job: str) -> None:
        """Its event log has grown."""
        if (waiting := self._news.pop(job, None)) is not None:
            waiting.set()

    async def wait_for_event(self, job: str, after: int, *, timeout_seconds: float) -> None:
        """Return when the job has an event newer than `after`, or after the time-out."""
        news = self._news.setdefault(job, asyncio.Event())
        if not await self._ledger.events(job, after=after, limit=1):
            await wait_or_sleep(news, self._clock, timeout_seconds)

    async def tally(self, job: str) -> JobTally:
        """The job's tally, replayed from its recorded events if this service has not seen it yet."""
        if job not in self._tallies:
            tally = JobTally()
            after = 0
            while recorded := await self._ledger.events(job, after=after, limit=EVENTS_PER_READ):
                for event in recorded:
                    tally.replay(event.data)
                after = recorded[-1].id
            tally = self._tallies.setdefault(job, tally)
            over = [job for job in self._tallies if job not in self.active]
            for dropped in over[:-TALLIES_KEPT]:
                del self._tallies[dropped]
            return tally
        return self._tallies[job]

    async def norms(self, job: str) -> JobNorms:
        """What the job has seen of its captures' norms."""
        return (await self.tally(job)).norms

    def attempted(self, job: str, worker: str, what: str) -> None:
        """A worker made an attempt for a job (`attempts`), or lost one (`lost`)."""
        if (tally := self._tallies.get(job)) is not None:
            tally.attempted(worker, what)

    async def view(self, job: str) -> JobView:
        record = await self.current(job)
        tally = await self.tally(job)
        over = record.state in FINAL_STATES
        tokens_rate, bytes_rate = (0.0, 0.0) if over else tally.rates(self._clock.monotonic())
        left = record.counts.tokens_total - record.counts.tokens_stored
        return JobView(
            record=record,
            bytes_total=record.counts.tokens_total * record.spec.capture.row_bytes(record.spec.model),
            tokens_per_second=tokens_rate,
            bytes_per_second=bytes_rate,
            eta_seconds=left / tokens_rate if tokens_rate else None,
            failures=await self._ledger.failures(job),
            workers=dict(tally.workers),
            norms=tuple(tally.norms.stored.rows()),
        )


def _after(record: JobRecord, event: JobEvent) -> JobState:
    """The state that `event` brings a job to. Refused: its state does not allow it."""
    try:
        return JobMachine(record.id, record.state).handle(event)
    except IllegalTransition as error:
        what = type(event).__name__.removesuffix("Asked").lower()
        raise Refused(RefusalKind.CONFLICT, f"job {record.id} is {record.state}: cannot {what} it") from error
