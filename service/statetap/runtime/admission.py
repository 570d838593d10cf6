"""Takes jobs in: what is asked for is checked against what is there, planned whole and recorded, or refused with the way out."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import replace

from statetap.core.placement import place
from statetap.core.records import JobCounts, JobRecord, JobState, SampleRecord, SampleStatus, UnitRecord
from statetap.ports import Clock, IdempotencyKey, Ledger, NotFound, Store, StoreError, StoreFacts
from statetap.runtime.job_states import JobStates
from statetap.runtime.open_datasets import OpenDatasets
from statetap.runtime.planning import Plan, Workers, plan_job, resolve_capture, unit_records
from statetap.runtime.pool import WorkerPool
from statetap.runtime.preparation import store_plan
from statetap.runtime.views import JobSubmission, RefusalKind, Refused

SAMPLES_PER_READ = 1000


class Admission:
    """`locate` turns a submitted store into its location, or raises Refused; `reserve_bytes` are left free there."""

    def __init__(
        self,
        states: JobStates,
        pool: WorkerPool,
        datasets: OpenDatasets,
        store: Store,
        ledger: Ledger,
        clock: Clock,
        *,
        locate: Callable[[str], str],
        reserve_bytes: int,
        version: str,
    ) -> None:
        self._states = states
        self._pool = pool
        self._datasets = datasets
        self._store = store
        self._ledger = ledger
        self._clock = clock
        self._locate = locate
        self._reserve_bytes = reserve_bytes
        self._version = version

    async def record(self, submission: JobSubmission, key: IdempotencyKey | None) -> tuple[JobRecord, int]:
        """Plan a job and record it under its key; returns it with its store's bytes. Refused: nothing was recorded."""
        try:
            dataset = await self._ledger.dataset(submission.dataset)
        except NotFound as error:
            detail = f"there is no dataset {submission.dataset!r}; POST /v1/datasets takes one"
            raise Refused(RefusalKind.INVALID, detail, field="dataset") from error
        location = self._locate(submission.store)
        fitting = resolve_capture(submission, self._pool.taps())
        workers = Workers(fitting, self._pool.context_length(lambda tap: tap in fitting))
        facts = await self._describe(location)
        opened = await self._datasets.get(dataset.id)
        plan = await asyncio.to_thread(plan_job, submission, dataset, opened, workers, location, facts)
        await self._check_store(location, plan, facts)
        if not submission.ignore_space:
            await self._check_space(location, plan)
        job = JobRecord(
            id=secrets.token_hex(6),
            name=submission.name or f"{dataset.name} to {submission.store}",
            priority=submission.priority,
            state=JobState.PLANNING,
            reason=None,
            spec=plan.spec,
            counts=JobCounts(),
            created_at=self._clock.now(),
        )
        await self._ledger.add_job(job, plan.units(job.id), plan.samples(job.id, opened), key=key)
        return await self._states.reread(job.id), plan.store_bytes

    async def plan_retry(self, job: JobRecord) -> tuple[list[UnitRecord], list[SampleRecord]]:
        """New units, after all others of the store, for the job's failed samples. Refused: none may be tried again."""
        if job.state is not JobState.COMPLETED or not job.counts.failed:
            detail = f"job {job.id} is {job.state}, with {job.counts.failed} failed samples"
            raise Refused(RefusalKind.CONFLICT, f"{detail}; only a completed job's failed samples can be tried again")
        failed = [sample for sample in await self._failed_samples(job.id) if sample.unit is not None]
        if not failed:
            raise Refused(
                RefusalKind.CONFLICT, f"no failed sample of job {job.id} can be tried again: each was refused for what it is"
            )
        facts = await self._describe(job.spec.store)
        if facts is None:
            detail = f"the store of job {job.id} is gone from {job.spec.store}: put it back, or submit the job anew"
            raise Refused(RefusalKind.CONFLICT, detail)
        shard = job.spec.geometry.rows_per_shard
        placement = place(
            [sample.length for sample in failed],
            range(len(failed)),
            job.spec.geometry,
            first_row=-(-facts.rows // shard) * shard,
            first_unit=job.counts.units_total,
        )
        units = [replace(unit, samples=tuple(failed[i].sample for i in unit.samples)) for unit in unit_records(job.id, placement)]
        unit_of = {sample: unit.index for unit in units for sample in unit.samples}
        samples = [
            replace(failed[i], unit=unit_of[failed[i].sample], row_start=row_start, status=SampleStatus.PENDING, reason=None)
            for i, row_start in zip(placement.order, placement.row_starts, strict=True)
        ]
        return units, samples

    async def _failed_samples(self, job: str) -> list[SampleRecord]:
        found: list[SampleRecord] = []
        cursor: str | None = None
        while True:
            page = await self._ledger.samples(job, status=SampleStatus.FAILED, limit=SAMPLES_PER_READ, cursor=cursor)
            found += page.items
            cursor = page.cursor
            if cursor is None:
                return found

    async def _describe(self, location: str) -> StoreFacts | None:
        """What is at a location. Refused while another job is still claiming its rows there."""
        if any(job.spec.store == location and job.state is JobState.PLANNING for job in self._states.active.values()):
            detail = f"another job is being prepared in {location}; submit this one again in a moment"
            raise Refused(RefusalKind.CONFLICT, detail, field="store")
        try:
            return await self._store.describe(location)
        except StoreError as error:
            raise Refused(RefusalKind.CONFLICT, str(error), field="store") from error

    async def _check_store(self, location: str, plan: Plan, facts: StoreFacts | None) -> None:
        dataset = await self._ledger.dataset(plan.spec.dataset)
        rows, samples = (0, 0) if facts is None else (facts.rows, facts.samples)
        wanted = store_plan(plan.spec, dataset, rows=rows, samples=samples, version=self._version)
        try:
            await self._store.check(location, wanted)
        except StoreError as error:
            raise Refused(RefusalKind.CONFLICT, str(error), field="store") from error

    async def _check_space(self, location: str, plan: Plan) -> None:
        free = await self._store.free_bytes(location)
        if free is not None and plan.store_bytes + self._reserve_bytes > free:
            raise Refused(
                RefusalKind.NO_SPACE,
                f"the job needs {plan.store_bytes:,} bytes, {location} has {free:,} free, of which {self._reserve_bytes:,} are "
                "kept in reserve (runtime.disk_reserve_bytes); free some, use another store, or submit with ignore_space",
                field="store",
            )
