"""A ledger in memory: the same rules as the SQL one, said as plainly as they can be. Counts are counted afresh every time.

It outlives `close`, as a file would, so that a test can stop a service and start it again on the same ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from statetap.adapters.ledger.cursors import decode_cursor, page
from statetap.core.capture import reason_kind
from statetap.core.records import (
    DatasetRecord,
    EventRecord,
    JobCounts,
    JobRecord,
    JobState,
    SampleRecord,
    SampleStatus,
    SampleVerdict,
    ShardObject,
    UnitLease,
    UnitRecord,
    UnitState,
    WorkerRecord,
)
from statetap.ports import (
    CommitEvent,
    IdempotencyConflict,
    IdempotencyKey,
    LeaseLost,
    LedgerError,
    NextUnit,
    NotFound,
    Page,
    SampleColumns,
)

T = TypeVar("T")

FINISHED = (JobState.COMPLETED, JobState.CANCELLED, JobState.FAILED)
UNSTORED = (SampleStatus.FAILED, SampleStatus.CANCELLED, SampleStatus.SKIPPED)


@dataclass
class FakeUnit:
    record: UnitRecord
    owner: str | None = None
    fence: int = 0
    expires_at: float = 0.0

    @property
    def state(self) -> UnitState:
        return self.record.state

    def end(self, state: UnitState) -> None:
        self.record = replace(self.record, state=state)
        self.owner = None

    def is_held_by(self, lease: UnitLease) -> bool:
        return self.state is UnitState.LEASED and (self.owner, self.fence) == (lease.owner, lease.fence)

    def is_leasable(self, now: float) -> bool:
        return self.state is UnitState.PENDING or (self.state is UnitState.LEASED and self.expires_at <= now)


class FakeJob:
    def __init__(self, record: JobRecord) -> None:
        self.record = record
        self.units: dict[int, FakeUnit] = {}
        self.samples: dict[int, SampleRecord] = {}
        self.objects: dict[str, tuple[int, ShardObject]] = {}
        self.bytes_stored = 0

    def counts(self) -> JobCounts:
        by_status = Counter(s.status for s in self.samples.values())
        return JobCounts(
            **{status.name.lower(): by_status[status] for status in SampleStatus},
            tokens_total=sum(s.length for s in self.samples.values() if s.status is not SampleStatus.SKIPPED),
            tokens_stored=sum(s.length for s in self.samples.values() if s.status is SampleStatus.STORED),
            bytes_stored=self.bytes_stored,
            units_total=len(self.units),
            units_committed=sum(u.state is UnitState.COMMITTED for u in self.units.values()),
        )

    def view(self) -> JobRecord:
        return replace(self.record, counts=self.counts())

    def members(self, unit: int) -> list[SampleRecord]:
        return sorted((s for s in self.samples.values() if s.unit == unit), key=lambda s: s.row_start)

    def unit_view(self, unit: FakeUnit) -> UnitRecord:
        return replace(unit.record, samples=tuple(s.sample for s in self.members(unit.record.index)))

    def cancel(self, unit: FakeUnit) -> None:
        unit.end(UnitState.CANCELLED)
        for s in self.members(unit.record.index):
            if s.status is SampleStatus.PENDING:
                self.samples[s.sample] = replace(s, status=SampleStatus.CANCELLED, reason="the job was cancelled")

    def release(self, unit: FakeUnit) -> None:
        if self.record.state in (JobState.CANCELLING, JobState.CANCELLED):
            self.cancel(unit)
        else:
            unit.end(UnitState.PENDING)


class FakeLedger:
    """`ports.Ledger`; `jobs_by_id` is open to tests that want to see more than the port shows."""

    def __init__(self) -> None:
        self.datasets_by_id: dict[str, DatasetRecord] = {}
        self.dataset_numbers: dict[str, int] = {}
        self.jobs_by_id: dict[str, FakeJob] = {}
        self.keys: dict[str, tuple[str, str]] = {}
        self.workers_by_name: dict[str, WorkerRecord] = {}
        self.log: list[EventRecord] = []

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    # --- datasets

    async def add_dataset(self, record: DatasetRecord) -> None:
        if record.id in self.datasets_by_id:
            raise LedgerError(f"there is a dataset {record.id!r} already")
        self.datasets_by_id[record.id] = record
        self.dataset_numbers[record.id] = max(self.dataset_numbers.values(), default=0) + 1

    async def dataset(self, dataset: str) -> DatasetRecord:
        return _get(self.datasets_by_id, dataset, "dataset")

    async def datasets(self, *, limit: int, cursor: str | None) -> Page[DatasetRecord]:
        return _newest_first("datasets", [(self.dataset_numbers[d.id], d) for d in self.datasets_by_id.values()], limit, cursor)

    async def delete_dataset(self, dataset: str) -> None:
        _get(self.datasets_by_id, dataset, "dataset")
        if any(j.record.spec.dataset == dataset and j.record.state not in FINISHED for j in self.jobs_by_id.values()):
            raise LedgerError(f"dataset {dataset!r} is needed by a job that is not finished")
        del self.datasets_by_id[dataset]

    # --- jobs

    async def add_job(
        self, job: JobRecord, units: Iterable[UnitRecord], samples: Iterable[SampleRecord], *, key: IdempotencyKey | None = None
    ) -> None:
        if job.id in self.jobs_by_id:
            raise LedgerError(f"there is a job {job.id!r} already")
        _get(self.datasets_by_id, job.spec.dataset, "dataset")
        if key is not None and await self.idempotent(key) is not None:
            raise IdempotencyConflict(f"the idempotency key {key.key!r} stands for another job")
        new = FakeJob(job)
        new.units = {u.index: FakeUnit(replace(u, state=UnitState.PENDING)) for u in units}
        for s in samples:
            if s.status is SampleStatus.PENDING and s.unit is None:
                raise LedgerError(f"sample {s.sample} is pending but placed in no unit")
            if s.status in UNSTORED and s.reason is None:
                raise LedgerError(f"sample {s.sample} ended without a reason")
            if s.sample in new.samples:
                raise LedgerError(f"sample {s.sample} comes twice")
            new.samples[s.sample] = s
        _require_whole([u.record for u in new.units.values()], new.samples.values())
        self.jobs_by_id[job.id] = new
        if key is not None:
            self.keys[key.key] = (key.request_hash, job.id)

    async def append_units(
        self, job: str, units: Iterable[UnitRecord], samples: Iterable[SampleRecord], *, state: JobState, at: float
    ) -> JobRecord:
        this, new, moved = self._job(job), list(units), list(samples)
        for unit in new:
            if unit.index <= max(this.units, default=-1):
                raise LedgerError(f"unit {unit.index} is not after those of the job")
        if len({s.sample for s in moved}) < len(moved):
            raise LedgerError("a sample comes twice")
        for s in moved:
            if s.unit is None or s.sample not in this.samples or this.samples[s.sample].status is not SampleStatus.FAILED:
                raise LedgerError(f"sample {s.sample} cannot be tried again")
        _require_whole(new, moved)
        this.units.update({u.index: FakeUnit(replace(u, state=UnitState.PENDING)) for u in new})
        for s in moved:
            this.samples[s.sample] = replace(
                this.samples[s.sample],
                unit=s.unit,
                row_start=s.row_start,
                status=SampleStatus.PENDING,
                reason=None,
                worker=None,
                next_token=-1,
                digest=0,
            )
        return await self.set_job_state(job, state, None, at=at)

    async def job(self, job: str) -> JobRecord:
        return self._job(job).view()

    async def jobs(self, *, limit: int, cursor: str | None, states: Sequence[JobState] = ()) -> Page[JobRecord]:
        views = [(number, job.view()) for number, job in enumerate(self.jobs_by_id.values(), start=1)]
        return _newest_first("jobs", [v for v in views if not states or v[1].state in states], limit, cursor)

    async def set_job_state(self, job: str, state: JobState, reason: str | None, *, at: float) -> JobRecord:
        this = self._job(job)
        started = this.record.started_at
        this.record = replace(
            this.record,
            state=state,
            reason=reason,
            started_at=at if state is JobState.RUNNING and started is None else started,
            finished_at=at if state in FINISHED else None,
        )
        return this.view()

    # --- units

    async def peek_unit(self, job: str, *, now: float) -> NextUnit | None:
        this = self._job(job)
        leasable = (index for index, unit in sorted(this.units.items()) if unit.is_leasable(now))
        return next((NextUnit(index, this.members(index)) for index in leasable), None)

    async def lease_unit(self, job: str, owner: str, *, now: float, ttl_seconds: float) -> UnitLease | None:
        this = self._job(job)
        for _, unit in sorted(this.units.items()):
            if unit.is_leasable(now):
                unit.record = replace(unit.record, state=UnitState.LEASED)
                unit.owner, unit.fence, unit.expires_at = owner, unit.fence + 1, now + ttl_seconds
                return UnitLease(unit=this.unit_view(unit), owner=owner, fence=unit.fence, expires_at=unit.expires_at)
        return None

    async def renew_leases(self, owner: str, *, now: float, ttl_seconds: float) -> None:
        for job in self.jobs_by_id.values():
            for unit in job.units.values():
                if unit.owner == owner:
                    unit.expires_at = now + ttl_seconds

    async def take_over(self, owner: str) -> list[tuple[str, int]]:
        taken = []
        for name, job in self.jobs_by_id.items():
            for index, unit in sorted(job.units.items()):
                if unit.owner is not None and unit.owner != owner:
                    job.release(unit)
                    taken.append((name, index))
        return taken

    async def give_back(self, lease: UnitLease) -> None:
        job = self.jobs_by_id.get(lease.unit.job)
        if job is not None and lease.unit.index in job.units and job.units[lease.unit.index].is_held_by(lease):
            job.release(job.units[lease.unit.index])

    async def commit_unit(
        self,
        lease: UnitLease,
        verdicts: Sequence[SampleVerdict],
        objects: Sequence[ShardObject],
        *,
        bytes_stored: int,
        at: float,
        event: CommitEvent | None = None,
    ) -> JobCounts:
        job = self.jobs_by_id.get(lease.unit.job)
        unit = job.units.get(lease.unit.index) if job else None
        if job is None or unit is None or not unit.is_held_by(lease):
            raise LeaseLost(f"unit {lease.unit.index} is not leased to {lease.owner!r} under fence {lease.fence}")
        members = {s.sample: s for s in job.members(lease.unit.index)}
        judged = {v.sample: v for v in verdicts}
        pending = {s.sample for s in members.values() if s.status is SampleStatus.PENDING}
        if len(judged) < len(verdicts) or not judged.keys() <= members.keys() or not pending <= judged.keys():
            raise LedgerError(f"the verdicts are not those of unit {lease.unit.index}")
        for v in verdicts:
            if v.status not in (SampleStatus.STORED, SampleStatus.FAILED) or (v.status is SampleStatus.FAILED and not v.reason):
                raise LedgerError(f"sample {v.sample} cannot end so")
        if len({o.key for o in objects} | job.objects.keys()) < len(objects) + len(job.objects):
            raise LedgerError("an object is recorded twice")
        for v in verdicts:
            job.samples[v.sample] = replace(
                members[v.sample],
                status=v.status,
                reason=v.reason,
                attempts=v.attempts,
                worker=v.worker,
                next_token=v.next_token,
                digest=v.digest,
            )
        job.objects.update({o.key: (lease.unit.index, o) for o in objects})
        job.bytes_stored += bytes_stored
        unit.end(UnitState.COMMITTED)
        if event is not None:
            await self.append_event(lease.unit.job, event.name, event.data, at=at)
        return job.counts()

    async def cancel_pending(self, job: str, *, at: float) -> JobCounts:
        this = self._job(job)
        for unit in this.units.values():
            if unit.is_leasable(at):
                this.cancel(unit)
        return this.counts()

    async def units(self, job: str, state: UnitState | None = None) -> list[UnitRecord]:
        this = self._job(job)
        return [this.unit_view(u) for _, u in sorted(this.units.items()) if state is None or u.state is state]

    # --- samples

    async def unit_samples(self, job: str, unit: int) -> list[SampleRecord]:
        return self._job(job).members(unit)

    async def samples(self, job: str, *, status: SampleStatus | None, limit: int, cursor: str | None) -> Page[SampleRecord]:
        after = -1 if cursor is None else decode_cursor("samples", cursor)
        chosen = [s for i, s in sorted(self._job(job).samples.items()) if i > after and status in (None, s.status)]
        return page("samples", chosen, limit, lambda s: s, lambda s: s.sample)

    async def sample_columns(self, job: str, first: int, count: int) -> SampleColumns:
        chosen = [s for i, s in sorted(self._job(job).samples.items()) if first <= i < first + count]
        return SampleColumns(
            first=first,
            ids=[s.id for s in chosen],
            row_start=np.array([s.row_start for s in chosen], np.int64),
            length=np.array([s.length for s in chosen], np.int32),
            status=np.array([s.status for s in chosen], np.uint8),
            next_token=np.array([s.next_token for s in chosen], np.int32),
            digest=np.array([s.digest for s in chosen], np.uint64),
        )

    async def failures(self, job: str) -> dict[str, int]:
        unhappy = (s for s in self._job(job).samples.values() if s.status in (SampleStatus.FAILED, SampleStatus.SKIPPED))
        return dict(Counter(reason_kind(s.reason) for s in unhappy if s.reason is not None))

    # --- keys, workers, events

    async def idempotent(self, key: IdempotencyKey) -> str | None:
        recorded_hash, job = self.keys.get(key.key, (key.request_hash, None))
        if recorded_hash != key.request_hash:
            raise IdempotencyConflict(f"the idempotency key {key.key!r} was used for another request")
        return job

    async def add_worker(self, worker: WorkerRecord) -> None:
        self.workers_by_name[worker.name] = worker

    async def delete_worker(self, name: str) -> None:
        _get(self.workers_by_name, name, "worker")
        del self.workers_by_name[name]

    async def workers(self) -> list[WorkerRecord]:
        return [w for _, w in sorted(self.workers_by_name.items())]

    async def append_event(self, job: str | None, name: str, data: Mapping[str, Any], *, at: float) -> int:
        self.log.append(EventRecord(id=len(self.log) + 1, job=job, name=name, at=at, data=dict(data)))
        return len(self.log)

    async def events(self, job: str, *, after: int, limit: int) -> list[EventRecord]:
        return [e for e in self.log if e.job == job and e.id > after][:limit]

    def _job(self, job: str) -> FakeJob:
        return _get(self.jobs_by_id, job, "job")


def _get(table: dict[str, T], key: str, kind: str) -> T:
    if key not in table:
        raise NotFound(f"there is no {kind} {key!r}")
    return table[key]


def _require_whole(units: list[UnitRecord], samples: Iterable[SampleRecord]) -> None:
    placed = Counter(s.unit for s in samples if s.unit is not None)
    if placed != Counter({u.index: len(u.samples) for u in units}):
        raise LedgerError("the units and the samples do not agree")


def _newest_first(listing: str, numbered: list[tuple[int, T]], limit: int, cursor: str | None) -> Page[T]:
    before = None if cursor is None else decode_cursor(listing, cursor)
    rows = [row for row in sorted(numbered, key=lambda row: -row[0]) if before is None or row[0] < before]
    return page(listing, rows, limit, lambda row: row[1], lambda row: row[0])
