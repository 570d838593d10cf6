"""Jobs: their states, and the lists of them. Their units and samples come in by `planning`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, bindparam, select, update

from statetap.adapters.ledger.codec import decode_spec
from statetap.adapters.ledger.counts import counts_of
from statetap.adapters.ledger.cursors import decode_cursor, page
from statetap.adapters.ledger.database import Database, reading, writing
from statetap.adapters.ledger.schema import jobs
from statetap.core.records import JobRecord, JobState
from statetap.ports import NotFound, Page

FINISHED = (JobState.COMPLETED, JobState.CANCELLED, JobState.FAILED)
# Asked for in nearly every transaction.
_NUMBER = select(jobs.c.number).where(jobs.c.id == bindparam("job"))


class SqlJobs:
    """The port's methods about jobs as a whole."""

    def __init__(self, database: Database) -> None:
        self._db = database

    @reading
    def job(self, connection: Connection, job: str) -> JobRecord:
        return _read(connection, job)

    @reading
    def jobs(self, connection: Connection, *, limit: int, cursor: str | None, states: Sequence[JobState] = ()) -> Page[JobRecord]:
        statement: Select[Any] = select(jobs).order_by(jobs.c.number.desc()).limit(limit + 1)
        if cursor is not None:
            statement = statement.where(jobs.c.number < decode_cursor("jobs", cursor))
        if states:
            statement = statement.where(jobs.c.state.in_(states))
        rows = connection.execute(statement).all()
        return page("jobs", rows, limit, _record, lambda row: int(row.number))

    @writing
    def set_job_state(self, connection: Connection, job: str, state: JobState, reason: str | None, *, at: float) -> JobRecord:
        return move_job(connection, job, state, reason, at=at)


def move_job(connection: Connection, job: str, state: JobState, reason: str | None, *, at: float) -> JobRecord:
    """`started_at` is the first time that it ran, `finished_at` stands while it is finished."""
    before = _read(connection, job)
    started_at = at if state is JobState.RUNNING and before.started_at is None else before.started_at
    connection.execute(
        update(jobs)
        .where(jobs.c.id == job)
        .values(state=state, reason=reason, started_at=started_at, finished_at=at if state in FINISHED else None)
    )
    return _read(connection, job)


def job_number(connection: Connection, job: str) -> int:
    """The number that stands for the job in its units and samples. NotFound: there is no such job."""
    number = connection.execute(_NUMBER, {"job": job}).scalar()
    if number is None:
        raise no_such_job(job)
    return int(number)


def no_such_job(job: str) -> NotFound:
    return NotFound(f"there is no job {job!r}")


def _read(connection: Connection, job: str) -> JobRecord:
    row = connection.execute(select(jobs).where(jobs.c.id == job)).one_or_none()
    if row is None:
        raise no_such_job(job)
    return _record(row)


def _record(row: Row[Any]) -> JobRecord:
    return JobRecord(
        id=row.id,
        name=row.name,
        priority=row.priority,
        state=JobState(row.state),
        reason=row.reason,
        spec=decode_spec(row.spec),
        counts=counts_of(row),
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
    )
