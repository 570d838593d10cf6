"""A job's course after it was taken in: made ready, committed unit by unit, brought to its end. What happens by itself.

What was decided is in the ledger before anything follows from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from statetap.core.job import CancelAsked, PauseAsked, ResumeAsked, UnitsSettled
from statetap.core.records import JobRecord, JobState, UnitState
from statetap.ports import Datasets, Store, StoreError
from statetap.runtime.dispatcher import Dispatcher
from statetap.runtime.job_preparation import JobPreparation
from statetap.runtime.job_states import UNFINISHED_STATES, JobStates
from statetap.runtime.open_datasets import OpenDatasets
from statetap.runtime.pool import WorkerPool
from statetap.runtime.projection import Projector
from statetap.runtime.run_ports import Ending, RunPorts
from statetap.runtime.tally import CommitReport
from statetap.runtime.views import JobView
from statetap.telemetry import events

JOBS_PER_READ = 1000


class JobCourse:
    """Moves jobs along. It owns the dispatcher, and hears from it what became of each unit."""

    def __init__(
        self, owner: str, states: JobStates, pool: WorkerPool, datasets: Datasets, store: Store, ports: RunPorts, *, version: str
    ) -> None:
        self.datasets = OpenDatasets(datasets)
        self.projector = Projector(
            ports.ledger, store, ports.clock, ports.settings.projection_seconds, ports.log, on_flushed=self._end_if_over
        )
        self.dispatcher = Dispatcher(
            owner,
            states.active,
            pool,
            self.datasets,
            ports,
            on_ending=self._on_ending,
            norms_of=states.norms,
            on_attempt=states.attempted,
            on_strike=self._on_strike,
        )
        self._states = states
        self._pool = pool
        self._store = store
        self._ports = ports
        self._ledger = ports.ledger
        self._log = ports.log
        self.preparation = JobPreparation(
            states,
            self.datasets,
            store,
            self.projector,
            ports,
            version=version,
            on_ready=self._on_ready,
            on_over=self._let_go,
        )
        self._ending = asyncio.Lock()

    async def recover(self) -> None:
        """Take up every job that is not over, where it was."""
        cursor: str | None = None
        while True:
            page = await self._ledger.jobs(limit=JOBS_PER_READ, cursor=cursor, states=UNFINISHED_STATES)
            for job in page.items:
                self._states.active[job.id] = job
                (await self._states.tally(job.id)).began(self._ports.clock.monotonic())
                if job.state is JobState.PLANNING:
                    self.preparation.begin(job.id)
                else:
                    self.projector.mark(job)
                    await self._end_if_over(job.id)
            cursor = page.cursor
            if cursor is None:
                return

    async def stop(self, drain_seconds: float) -> None:
        """Stop preparing (it begins again at the next start), then the dispatcher, then write what the projection lacks."""
        await self.preparation.close()
        await self.dispatcher.stop(drain_seconds)
        for job in list(self._states.active):
            await self.projector.try_flush(job)

    # --- on its way -------------------------------------------------------------------------------------------------------

    async def _on_ready(self, job: str) -> None:
        await self.went_on(job)
        await self._end_if_over(job)

    async def tend(self) -> None:
        """See to it, now and then, that every job moves that can: whatever an error broke off is taken up again."""
        while True:
            await self._ports.clock.sleep(self._ports.settings.progress_seconds)
            for job in list(self._states.active.values()):
                try:
                    if job.state is JobState.PLANNING:
                        self.preparation.begin(job.id)
                    else:
                        await self._end_if_over(job.id)
                except Exception:  # noqa: BLE001 - the next one must still be looked after
                    self._log.exception(events.DISPATCH_FAILED)
            self._pool.changed.set()

    async def went_on(self, job: str) -> None:
        """The job runs (again): rates are measured from here, and workers may look for its units."""
        (await self._states.tally(job)).began(self._ports.clock.monotonic())
        self._pool.changed.set()

    async def pause(self, job: str, reason: str) -> None:
        """Lease no further unit of a job. Who pauses it last says why it waits."""
        before = await self._states.current(job)
        record = await self._states.move(job, PauseAsked(), reason)
        if (record.state, record.reason) != (before.state, before.reason):
            # For what was leased ahead of it.
            self._pool.changed.set()
            await self._states.append_event(job, events.JOB_PAUSED, reason=reason)
            self._log.warning(events.JOB_PAUSED, job=job, reason=reason)

    async def resume(self, job: str) -> None:
        before = await self._states.current(job)
        record = await self._states.move(job, ResumeAsked())
        if record.state is not before.state:
            await self._states.append_event(job, events.JOB_RESUMED)
            self._log.info(events.JOB_RESUMED, job=job)
            await self.went_on(job)

    # --- unit by unit -----------------------------------------------------------------------------------------------------

    async def _on_ending(self, ending: Ending) -> None:
        job, unit = ending.unit
        if ending.counts is not None and ending.report is not None:
            await self._count_commit(job, unit, ending.report)
            record = self._states.active[job]
            newest = max(record.counts, ending.counts, key=lambda counts: counts.units_committed)
            record = self._states.active[job] = replace(record, counts=newest)
            self.projector.mark(record, [verdict.sample for verdict in ending.verdicts])
        elif job in self._states.active:
            # Whether it was recorded after all is for the ledger to say, and the store must say the same.
            record = await self._states.reread(job)
            self.projector.mark(record, [sample.sample for sample in await self._ledger.unit_samples(job, unit)])
        await self._end_if_over(job)

    async def _count_commit(self, job: str, unit: int, report: CommitReport) -> None:
        (await self._states.tally(job)).committed(report, self._ports.clock.monotonic())
        metrics = self._ports.metrics
        metrics.units_committed_total.inc()
        metrics.tokens_stored_total.inc(report.tokens)
        metrics.bytes_stored_total.inc(report.nbytes)
        metrics.samples_total.labels(outcome="stored").inc(report.stored)
        metrics.samples_total.labels(outcome="failed").inc(report.failed)
        self._states.wake(job)
        self._log.info(events.UNIT_COMMITTED, job=job, **report.as_line(unit))

    async def _on_strike(self, job: str, reason: str) -> None:
        """A unit came back too often: somebody has to look at it."""
        if job in self._states.active and self._states.active[job].state is JobState.RUNNING:
            await self.pause(job, reason)

    # --- the end ------------------------------------------------------------------------------------------------------------

    async def cancel(self, job: str) -> None:
        """Move a job to its end without what is left of it. Refused: it is over otherwise."""
        await self.preparation.stop(job)
        async with self._ending:
            if (await self._states.current(job)).state is not JobState.CANCELLED:
                await self._states.move(job, CancelAsked())
        await self._end_if_over(job)

    async def _end_if_over(self, job: str) -> None:
        """End a job of which nothing is left to do. Several may find that at once; one of them ends it."""
        async with self._ending:
            record = self._states.active.get(job)
            if record is None:
                return
            if record.state is JobState.CANCELLING:
                await self._finish_cancelling(job)
            elif record.state is not JobState.PLANNING and self._all_committed(record):
                await self._settle(job)

    def _all_committed(self, job: JobRecord) -> bool:
        """Whether every unit is, and has been heard of: the ledger counts a commit before its run has ended."""
        return job.counts.units_committed == job.counts.units_total and not self.dispatcher.open_runs(job.id)

    async def _settle(self, job: str) -> None:
        """Every unit is committed: bring the store's projection up to date, then say that the job is over."""
        if not await self.projector.try_flush(job):
            return
        record = await self._states.move(job, UnitsSettled())
        self._let_go(job)
        counts = record.counts
        await self._states.append_event(
            job, events.JOB_COMPLETED, stored=counts.stored, failed=counts.failed, skipped=counts.skipped
        )
        seconds = round((record.finished_at or 0.0) - record.created_at, 3)
        self._log.info(
            events.JOB_COMPLETED, job=job, stored=counts.stored, failed=counts.failed, skipped=counts.skipped, seconds=seconds
        )

    async def _finish_cancelling(self, job: str) -> None:
        """Cancel what is not leased, give back what is, and end the job once nothing is left."""
        await self._ledger.cancel_pending(job, at=self._ports.clock.now())
        for run in self.dispatcher.open_runs(job):
            await run.give_up("the job is cancelled")
        self._pool.forget_job(job)
        if any(run.recorded for run in self.dispatcher.open_runs(job)) or await self._ledger.units(job, UnitState.LEASED):
            # The last run to end brings the job here again.
            return
        record = await self._states.reread(job)
        if await self._has_room(record):
            self.projector.mark(record)
            if not await self.projector.try_flush(job):
                return
        await self._states.move(job, UnitsSettled())
        self._let_go(job)
        await self._states.append_event(job, events.JOB_CANCELLED)
        self._log.info(events.JOB_CANCELLED, job=job)

    async def _has_room(self, job: JobRecord) -> bool:
        """Whether the store was made ready for the job before it was cancelled, as far as it can be told."""
        try:
            facts = await self._store.describe(job.spec.store)
        except StoreError:
            return True
        return facts is not None and facts.samples >= job.spec.first_sample + job.counts.samples

    def _let_go(self, job: str) -> None:
        """Hold nothing more for a job that is over."""
        self.projector.forget(job)
        self.dispatcher.forget(job)
        self.datasets.keep_only({job.spec.dataset for job in self._states.active.values()})

    async def report_progress(self) -> None:
        """One line for each running job, at a fixed interval."""
        while True:
            await self._ports.clock.sleep(self._ports.settings.progress_seconds)
            for job in [job.id for job in self._states.active.values() if job.state is JobState.RUNNING]:
                try:
                    self._log.info(events.JOB_PROGRESS, **_progress(await self._states.view(job)))
                except Exception:  # noqa: BLE001 - the next line must still come
                    self._log.exception(events.DISPATCH_FAILED)


def _progress(view: JobView) -> Mapping[str, Any]:
    counts = view.record.counts
    return {
        "job": view.record.id,
        "done": counts.samples - counts.pending,
        "total": counts.samples,
        "failed": counts.failed,
        "tokens_per_second": round(view.tokens_per_second, 1),
        "bytes_per_second": round(view.bytes_per_second),
        "eta_seconds": None if view.eta_seconds is None else round(view.eta_seconds),
    }
