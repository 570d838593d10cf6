"""A job's course after it was taken in: made ready, committed unit by unit, brought to its end. What happens by itself.

What was decided is in the ledger before anything follows from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from statetap.core.job import PauseAsked, PlanFailed, Planned, UnitsSettled
from statetap.core.records import JobCounts, JobRecord, JobState, UnitState
from statetap.ports import Datasets, Store
from statetap.runtime.dispatcher import Dispatcher
from statetap.runtime.job_states import UNFINISHED_STATES, JobStates
from statetap.runtime.open_datasets import OpenDatasets
from statetap.runtime.pool import WorkerPool
from statetap.runtime.preparation import prepare
from statetap.runtime.projection import Projector
from statetap.runtime.unit_run import Ending, RunPorts
from statetap.runtime.views import JobView
from statetap.telemetry import events

JOBS_PER_READ = 1000


class JobCourse:
    """Moves jobs along. It owns the dispatcher, and hears from it what became of each unit."""

    def __init__(
        self, owner: str, states: JobStates, pool: WorkerPool, datasets: Datasets, store: Store, ports: RunPorts, *, version: str
    ) -> None:
        self.datasets = OpenDatasets(datasets)
        self.projector = Projector(ports.ledger, store, ports.clock, ports.settings.projection_seconds, ports.log)
        self.dispatcher = Dispatcher(
            owner,
            states.active,
            pool,
            self.datasets,
            ports,
            on_ending=self._on_ending,
            on_attempt=states.attempted,
            on_strike=self._on_strike,
        )
        self._states = states
        self._pool = pool
        self._store = store
        self._version = version
        self._ports = ports
        self._ledger = ports.ledger
        self._log = ports.log
        self._preparing: dict[str, asyncio.Task[None]] = {}

    async def recover(self) -> None:
        """Take up every job that is not over, where it was."""
        cursor: str | None = None
        while True:
            page = await self._ledger.jobs(limit=JOBS_PER_READ, cursor=cursor, states=UNFINISHED_STATES)
            for job in page.items:
                self._states.active[job.id] = job
                self.projector.mark(job)
                (await self._states.tally(job.id)).began(self._ports.clock.monotonic())
                if job.state is JobState.PLANNING:
                    self.begin_preparing(job.id)
                elif job.state is JobState.CANCELLING:
                    await self.finish_cancelling(job.id)
                else:
                    await self._settle_if_over(job.id)
            cursor = page.cursor
            if cursor is None:
                return

    async def stop(self, drain_seconds: float) -> None:
        """Stop preparing (it begins again at the next start), then the dispatcher, then write what the projection lacks."""
        for job in list(self._preparing):
            await self.stop_preparing(job)
        await self.dispatcher.stop(drain_seconds)
        for job in list(self._states.active):
            await self.projector.flush(job)

    # --- getting ready ----------------------------------------------------------------------------------------------------

    def begin_preparing(self, job: str) -> None:
        task = self._preparing[job] = asyncio.create_task(self._prepare(job), name=f"prepare {job}")
        task.add_done_callback(lambda _: self._preparing.pop(job, None))

    async def stop_preparing(self, job: str) -> None:
        if (task := self._preparing.get(job)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _prepare(self, job: str) -> None:
        """Make the store ready, then let the job run; what goes wrong here fails the job, with the reason."""
        record = self._states.active[job]
        try:
            dataset = await self._ledger.dataset(record.spec.dataset)
            tokens = await self.datasets.get(dataset.id)
            before = await prepare(record, dataset, tokens, self._ledger, self._store, self._version)
            self.projector.mark(record)
            await self.projector.flush(job)
        except Exception as error:  # noqa: BLE001 - whatever it was, the job says so
            self._log.exception(events.JOB_FAILED, job=job, reason=str(error))
            await self._states.move(job, PlanFailed(str(error)), str(error))
            await self._states.append_event(job, events.JOB_FAILED, reason=str(error))
            return
        if before is None:
            self._log.info(events.STORE_CREATED, job=job, store=record.spec.store)
        else:
            self._log.info(events.STORE_GROWN, job=job, store=record.spec.store)
        await self._states.move(job, Planned())
        await self._states.append_event(job, events.JOB_STARTED)
        self._log.info(events.JOB_STARTED, job=job)
        await self.went_on(job)
        await self._settle_if_over(job)

    async def went_on(self, job: str) -> None:
        """The job runs (again): rates are measured from here, and workers may look for its units."""
        (await self._states.tally(job)).began(self._ports.clock.monotonic())
        self._pool.changed.set()

    # --- unit by unit -----------------------------------------------------------------------------------------------------

    async def _on_ending(self, ending: Ending) -> None:
        job, unit = ending.unit
        if ending.counts is not None:
            before = self._states.active[job]
            record = self._states.active[job] = replace(before, counts=ending.counts)
            await self._record_commit(record, before.counts, unit, ending)
            self.projector.mark(record, [verdict.sample for verdict in ending.verdicts])
        if job not in self._states.active:
            return
        if self._states.active[job].state is JobState.CANCELLING:
            await self.finish_cancelling(job)
        else:
            await self._settle_if_over(job)

    async def _record_commit(self, job: JobRecord, before: JobCounts, unit: int, ending: Ending) -> None:
        stored, failed = job.counts.stored - before.stored, job.counts.failed - before.failed
        tokens, nbytes = job.counts.tokens_stored - before.tokens_stored, job.counts.bytes_stored - before.bytes_stored
        tally = await self._states.tally(job.id)
        workers = tally.committed(ending.verdicts, tokens, nbytes, self._ports.clock.monotonic())
        metrics = self._ports.metrics
        metrics.units_committed_total.inc()
        metrics.tokens_stored_total.inc(tokens)
        metrics.bytes_stored_total.inc(nbytes)
        metrics.samples_total.labels(outcome="stored").inc(stored)
        metrics.samples_total.labels(outcome="failed").inc(failed)
        await self._states.append_event(
            job.id, events.UNIT_COMMITTED, unit=unit, stored=stored, failed=failed, tokens=tokens, bytes=nbytes, workers=workers
        )
        self._log.info(
            events.UNIT_COMMITTED,
            job=job.id,
            unit=unit,
            stored=stored,
            failed=failed,
            tokens=tokens,
            bytes=nbytes,
            workers=workers,
        )

    async def _on_strike(self, job: str, reason: str) -> None:
        """A unit came back too often: somebody has to look at it."""
        if job in self._states.active and self._states.active[job].state is JobState.RUNNING:
            await self._states.move(job, PauseAsked(reason), reason)
            await self._states.append_event(job, events.JOB_PAUSED, reason=reason)
            self._log.warning(events.JOB_PAUSED, job=job, reason=reason)

    # --- the end ------------------------------------------------------------------------------------------------------------

    async def _settle_if_over(self, job: str) -> None:
        """Every unit is committed: bring the store's projection up to date, then say that the job is over."""
        record = self._states.active[job]
        if record.state not in (JobState.RUNNING, JobState.PAUSED) or record.counts.units_committed < record.counts.units_total:
            return
        await self.projector.flush(job)
        record = await self._states.move(job, UnitsSettled())
        self._close_datasets()
        counts = record.counts
        await self._states.append_event(
            job, events.JOB_COMPLETED, stored=counts.stored, failed=counts.failed, skipped=counts.skipped
        )
        seconds = round((record.finished_at or 0.0) - record.created_at, 3)
        self._log.info(
            events.JOB_COMPLETED, job=job, stored=counts.stored, failed=counts.failed, skipped=counts.skipped, seconds=seconds
        )

    async def finish_cancelling(self, job: str) -> None:
        """Cancel what is not leased, give back what is, and end the job once nothing is left."""
        await self._ledger.cancel_pending(job, at=self._ports.clock.now())
        for run in self.dispatcher.open_runs(job):
            await run.abandon("the job is cancelled", give_back=True)
        self._pool.forget_job(job)
        if await self._ledger.units(job, UnitState.LEASED):
            return
        self.projector.mark(await self._states.reread(job))
        await self.projector.flush(job)
        await self._states.move(job, UnitsSettled())
        self._close_datasets()
        await self._states.append_event(job, events.JOB_CANCELLED)
        self._log.info(events.JOB_CANCELLED, job=job)

    def _close_datasets(self) -> None:
        self.datasets.keep_only({job.spec.dataset for job in self._states.active.values()})

    async def report_progress(self) -> None:
        """One line for each running job, at a fixed interval."""
        while True:
            await self._ports.clock.sleep(self._ports.settings.progress_seconds)
            for job in [job.id for job in self._states.active.values() if job.state is JobState.RUNNING]:
                self._log.info(events.JOB_PROGRESS, **_progress(await self._states.view(job)))


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
