"""What a plan puts into the ledger: a job with its units and samples, or more units for its failed samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from sqlalchemy import Connection, bindparam, func, insert, select, update

from statetap.adapters.ledger.bulk import batches, insert_rows
from statetap.adapters.ledger.codec import encode_spec
from statetap.adapters.ledger.counts import COUNTERS, add_counts, counter_of
from statetap.adapters.ledger.database import Database, writing
from statetap.adapters.ledger.jobs import job_number, move_job
from statetap.adapters.ledger.journal import record_key
from statetap.adapters.ledger.schema import datasets, jobs, samples, signed, units
from statetap.core.records import JobRecord, JobState, SampleRecord, SampleStatus, UnitRecord, UnitState
from statetap.ports import IdempotencyKey, LedgerError, NotFound

# A query may carry only so many values: SQLite's least limit is 999.
QUERIED_SAMPLES = 500
_NEEDS_REASON = (SampleStatus.FAILED, SampleStatus.CANCELLED, SampleStatus.SKIPPED)


class SqlPlanning:
    """The port's `add_job` and `append_units`."""

    def __init__(self, database: Database) -> None:
        self._db = database

    @writing
    def add_job(
        self,
        connection: Connection,
        job: JobRecord,
        units: Iterable[UnitRecord],
        samples: Iterable[SampleRecord],
        *,
        key: IdempotencyKey | None = None,
    ) -> None:
        """All of it or nothing.

        Raises:
            LedgerError: the id is taken, or `units` and `samples` disagree.
            NotFound: its dataset is not there.
            IdempotencyConflict: the key stands for another job.
        """
        number = _insert_job(connection, job)
        if key is not None:
            record_key(connection, key, job.id, at=job.created_at)
        intake = _Intake(number)
        _insert_units(connection, intake, units)
        _insert_samples(connection, intake, samples)
        intake.require_whole()
        add_counts(connection, number, intake.counts)

    @writing
    def append_units(
        self,
        connection: Connection,
        job: str,
        units: Iterable[UnitRecord],
        samples: Iterable[SampleRecord],
        *,
        state: JobState,
        at: float,
    ) -> JobRecord:
        """Raises LedgerError if a sample is not a failed one, or the units do not follow those that the job has."""
        number = job_number(connection, job)
        intake = _Intake(number, first_unit=_next_unit(connection, number))
        _insert_units(connection, intake, units)
        _move_samples(connection, intake, samples)
        intake.require_whole()
        add_counts(connection, number, intake.counts)
        return move_job(connection, job, state, None, at=at)


class _Intake:
    """Checks and counts what streams by; `waiting` is how many samples each new unit still waits for."""

    def __init__(self, job_number: int, first_unit: int = 0) -> None:
        self.job_number = job_number
        self.first_unit = first_unit
        self.counts: Counter[str] = Counter()
        self.waiting: dict[int, int] = {}

    def unit_row(self, unit: UnitRecord) -> tuple[Any, ...]:
        if unit.index < self.first_unit:
            raise LedgerError(f"unit {unit.index} cannot be appended: the next of the job is {self.first_unit}")
        self.waiting[unit.index] = len(unit.samples)
        self.counts["units_total"] += 1
        owner, fence, expires_at, committed_at = None, 0, None, None
        state = UnitState.PENDING.value
        return (self.job_number, unit.index, unit.row_start, unit.rows, state, owner, fence, expires_at, committed_at)

    def place(self, sample: SampleRecord, unit: int) -> None:
        """Tick the sample off its unit's list."""
        waiting = self.waiting.get(unit, 0)
        if not waiting:
            raise LedgerError(f"sample {sample.sample} is placed in unit {unit}, which names no more samples")
        self.waiting[unit] = waiting - 1

    def sample_row(self, sample: SampleRecord) -> tuple[Any, ...]:
        status, unit, length = sample.status, sample.unit, sample.length
        if unit is not None:
            self.place(sample, unit)
        elif status is SampleStatus.PENDING:
            raise LedgerError(f"sample {sample.sample} is pending but placed in no unit")
        if sample.reason is None and status in _NEEDS_REASON:
            raise LedgerError(f"sample {sample.sample} is {counter_of(status)} without a reason")
        self.counts[counter_of(status)] += 1
        if status is not SampleStatus.SKIPPED:
            self.counts["tokens_total"] += length
        if status is SampleStatus.STORED:
            self.counts["tokens_stored"] += length
        return (
            self.job_number,
            sample.sample,
            sample.id,
            unit,
            sample.row_start,
            length,
            int(status),
            sample.reason,
            sample.attempts,
            sample.worker,
            sample.next_token,
            signed(sample.digest),
        )

    def require_whole(self) -> None:
        for unit, count in self.waiting.items():
            if count:
                raise LedgerError(f"unit {unit} names {count} samples more than were given")


def _insert_job(connection: Connection, job: JobRecord) -> int:
    if connection.execute(select(jobs.c.number).where(jobs.c.id == job.id)).first() is not None:
        raise LedgerError(f"there is a job {job.id!r} already")
    if connection.execute(select(datasets.c.number).where(datasets.c.id == job.spec.dataset)).first() is None:
        raise NotFound(f"there is no dataset {job.spec.dataset!r}")
    statement = (
        insert(jobs)
        .values(
            id=job.id,
            name=job.name,
            priority=job.priority,
            state=job.state,
            reason=job.reason,
            dataset=job.spec.dataset,
            spec=encode_spec(job.spec),
            created_at=job.created_at,
            started_at=job.started_at,
            finished_at=job.finished_at,
            **dict.fromkeys(COUNTERS, 0),
        )
        .returning(jobs.c.number)
    )
    return int(connection.execute(statement).scalar_one())


def _next_unit(connection: Connection, number: int) -> int:
    last = connection.execute(select(func.max(units.c.unit)).where(units.c.job == number)).scalar()
    return 0 if last is None else int(last) + 1


def _insert_units(connection: Connection, intake: _Intake, new: Iterable[UnitRecord]) -> None:
    insert_rows(connection, units, (intake.unit_row(unit) for unit in new))


def _insert_samples(connection: Connection, intake: _Intake, new: Iterable[SampleRecord]) -> None:
    insert_rows(connection, samples, (intake.sample_row(sample) for sample in new))


def _move_samples(connection: Connection, intake: _Intake, moved: Iterable[SampleRecord]) -> None:
    move = (
        update(samples)
        .where(samples.c.job == intake.job_number, samples.c.sample == bindparam("moved"))
        .values(status=SampleStatus.PENDING, reason=None, worker=None, next_token=-1, digest=0)
    )
    for batch in batches(moved, QUERIED_SAMPLES):
        _require_failed(connection, intake.job_number, batch)
        connection.execute(move, list(_moves(intake, batch)))


def _moves(intake: _Intake, batch: list[SampleRecord]) -> Iterator[dict[str, Any]]:
    for sample in batch:
        if sample.unit is None:
            raise LedgerError(f"sample {sample.sample} cannot be tried again in no unit")
        intake.place(sample, sample.unit)
        intake.counts[counter_of(SampleStatus.FAILED)] -= 1
        intake.counts[counter_of(SampleStatus.PENDING)] += 1
        yield {"moved": sample.sample, "unit": sample.unit, "row_start": sample.row_start}


def _require_failed(connection: Connection, number: int, batch: list[SampleRecord]) -> None:
    wanted = [sample.sample for sample in batch]
    statement = select(samples.c.sample).where(
        samples.c.job == number, samples.c.sample.in_(wanted), samples.c.status == SampleStatus.FAILED
    )
    failed = set(connection.execute(statement).scalars())
    for index in wanted:
        # Removed as they are met: a sample that comes twice is no failed one the second time.
        if index not in failed:
            raise LedgerError(f"sample {index} cannot be tried again: it is not a failed sample of the job")
        failed.remove(index)
