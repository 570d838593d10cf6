"""What people do with jobs: submit them, look at them, pause, resume, cancel, and try failed samples again."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from structlog.typing import FilteringBoundLogger

from statetap.core.records import JobState
from statetap.ports import IdempotencyKey, Ledger, Page
from statetap.runtime.admission import Admission
from statetap.runtime.job_course import JobCourse
from statetap.runtime.job_states import JobStates
from statetap.runtime.pool import WorkerPool
from statetap.runtime.views import JobSubmission, JobView, Refused
from statetap.telemetry import events

PAUSED_BY_HAND = "asked for"
NO_WORKER = "waiting: no worker that is up serves this model with this capture; GET /v1/workers says why"


class JobDesk:
    """Implements `views.Jobs`."""

    def __init__(
        self,
        states: JobStates,
        admission: Admission,
        course: JobCourse,
        pool: WorkerPool,
        ledger: Ledger,
        log: FilteringBoundLogger,
    ) -> None:
        self._states = states
        self._admission = admission
        self._course = course
        self._pool = pool
        self._ledger = ledger
        self._log = log
        self._lock = asyncio.Lock()

    async def submit(self, submission: JobSubmission, *, idempotency_key: str | None, request_hash: str) -> tuple[JobView, bool]:
        async with self._lock:
            key = None if idempotency_key is None else IdempotencyKey(idempotency_key, request_hash)
            if key is not None and (known := await self._ledger.idempotent(key)):
                return await self.view(known), False
            try:
                job, store_bytes = await self._admission.record(submission, key)
            except Refused as refused:
                self._log.info(
                    events.JOB_REFUSED,
                    dataset=submission.dataset,
                    store=submission.store,
                    field=refused.field,
                    reason=refused.detail,
                )
                raise
        samples, tokens, units = job.counts.samples, job.counts.tokens_total, job.counts.units_total
        await self._states.append_event(
            job.id, events.JOB_SUBMITTED, samples=samples, tokens=tokens, units=units, bytes=store_bytes
        )
        self._log.info(
            events.JOB_SUBMITTED,
            job=job.id,
            dataset=job.spec.dataset,
            store=job.spec.store,
            samples=samples,
            tokens=tokens,
            units=units,
            bytes=store_bytes,
        )
        self._course.preparation.begin(job.id)
        return await self.view(job.id), True

    async def view(self, job: str) -> JobView:
        """The job now; of a running job that no worker can serve, the reason says so."""
        view = await self._states.view(job)
        record = view.record
        if record.state is JobState.RUNNING and next(self._pool.serving(record.spec), None) is None:
            return replace(view, record=replace(record, reason=NO_WORKER), eta_seconds=None)
        return view

    async def list(self, *, limit: int, cursor: str | None) -> Page[JobView]:
        page = await self._ledger.jobs(limit=limit, cursor=cursor)
        return Page([replace(await self.view(job.id), norms=()) for job in page.items], page.cursor)

    async def pause(self, job: str) -> JobView:
        await self._course.pause(job, PAUSED_BY_HAND)
        return await self.view(job)

    async def resume(self, job: str) -> JobView:
        await self._course.resume(job)
        return await self.view(job)

    async def cancel(self, job: str) -> JobView:
        await self._course.cancel(job)
        return await self.view(job)

    async def retry(self, job: str) -> JobView:
        """Failed samples again, in new units after all others of the store."""
        async with self._lock:
            units, samples = await self._admission.plan_retry(await self._states.current(job))
            await self._states.retry(job, units, samples)
        await self._states.append_event(job, events.JOB_RETRIED, samples=len(samples), units=len(units))
        self._log.info(events.JOB_RETRIED, job=job, samples=len(samples), units=len(units))
        self._course.preparation.begin(job)
        return await self.view(job)

    async def wait_for_event(self, job: str, after: int, *, timeout_seconds: float) -> None:
        await self._states.wait_for_event(job, after, timeout_seconds=timeout_seconds)
