"""Units: leased, renewed, given back, taken over, cancelled. `commits` ends them well.

A unit's fence grows with every lease and is never reset. What is written under a lease counts only while the unit is leased
to that owner under that fence, which every transaction checks for itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from sqlalchemy import ColumnElement, Connection, Double, Row, and_, bindparam, func, or_, select, update

from statetap.adapters.ledger.bulk import BATCH_ROWS
from statetap.adapters.ledger.counts import add_counts, counter_of
from statetap.adapters.ledger.database import Database, reading, writing
from statetap.adapters.ledger.jobs import job_number, no_such_job
from statetap.adapters.ledger.samples import samples_of_unit
from statetap.adapters.ledger.schema import jobs, samples, units
from statetap.core.records import JobCounts, JobState, SampleStatus, UnitLease, UnitRecord, UnitState
from statetap.ports import NextUnit

CANCELLED_REASON = "the job was cancelled"
_CANCELLED_JOBS = (JobState.CANCELLING, JobState.CANCELLED)
_HELD: list[ColumnElement[Any]] = [units.c.job, units.c.unit, jobs.c.id, jobs.c.state.label("job_state")]
_FREE = {"owner": None, "expires_at": None}

# The statements of every lease and every commit, made once: to put one together takes longer than to run it.
_THIS = and_(units.c.job == bindparam("job_number"), units.c.unit == bindparam("index"))
_MEMBERS = (
    select(samples.c.sample)
    .where(samples.c.job == bindparam("job_number"), samples.c.unit == bindparam("index"))
    .order_by(samples.c.row_start)
)
_LOWEST = select(func.min(units.c.unit)).where(units.c.job == jobs.c.number)
# Two questions, because each is one look into the index on (job, state, unit); as one they would read every pending unit.
_NEXT = select(
    jobs.c.number,
    _LOWEST.where(units.c.state == UnitState.PENDING).scalar_subquery().label("pending"),
    _LOWEST.where(units.c.state == UnitState.LEASED, units.c.expires_at <= bindparam("now")).scalar_subquery().label("expired"),
).where(jobs.c.id == bindparam("job_id"))
_LEASE = (
    update(units)
    .where(_THIS)
    .values(
        state=UnitState.LEASED, owner=bindparam("leased_to"), fence=units.c.fence + 1, expires_at=bindparam("until", type_=Double)
    )
    .returning(units)
)
_HELD_BY = (
    select(*_HELD)
    .join(jobs, jobs.c.number == units.c.job)
    .where(
        jobs.c.id == bindparam("job_id"),
        units.c.unit == bindparam("index"),
        units.c.state == UnitState.LEASED,
        units.c.owner == bindparam("leased_to"),
        units.c.fence == bindparam("lease_fence"),
    )
)


class SqlUnits:
    """The port's methods about units and their leases."""

    def __init__(self, database: Database) -> None:
        self._db = database

    @reading
    def peek_unit(self, connection: Connection, job: str, *, now: float) -> NextUnit | None:
        """The lowest of the job's units that are pending, or leased and expired."""
        number, index = _next_leasable(connection, job, now)
        return None if index is None else NextUnit(index, samples_of_unit(connection, job, number, index))

    @writing
    def lease_unit(self, connection: Connection, job: str, owner: str, *, now: float, ttl_seconds: float) -> UnitLease | None:
        """The unit that `peek_unit` shows."""
        number, index = _next_leasable(connection, job, now)
        if index is None:
            return None
        named = {"job_number": number, "index": index, "leased_to": owner, "until": now + ttl_seconds}
        row = connection.execute(_LEASE, named).one()
        members = _members(connection, number, index)
        return UnitLease(unit=_record(job, row, members), owner=owner, fence=row.fence, expires_at=row.expires_at)

    @writing
    def renew_leases(self, connection: Connection, owner: str, *, now: float, ttl_seconds: float) -> None:
        connection.execute(update(units).where(units.c.owner == owner).values(expires_at=now + ttl_seconds))

    @writing
    def take_over(self, connection: Connection, owner: str) -> list[tuple[str, int]]:
        """They are as if given back: what their owners did does not count, even if they still live."""
        statement = (
            select(*_HELD)
            .join(jobs, jobs.c.number == units.c.job)
            .where(units.c.owner.is_not(None), units.c.owner != owner)
            .order_by(units.c.job, units.c.unit)
        )
        taken = connection.execute(statement).all()
        for row in taken:
            _release(connection, row)
        return [(row.id, row.unit) for row in taken]

    @writing
    def give_back(self, connection: Connection, lease: UnitLease) -> None:
        """Of a job that is being cancelled, or is: the unit and its pending samples are cancelled instead."""
        row = held_unit(connection, lease)
        if row is not None:
            _release(connection, row)

    @writing
    def cancel_pending(self, connection: Connection, job: str, *, at: float) -> JobCounts:
        """A lease that has expired at `at` is no lease."""
        number = job_number(connection, job)
        # A pending sample has a unit that is pending or leased. Asked this way round, samples are met in the order in which
        # they are stored: five times as fast for a million of them in a permutation.
        held = select(units.c.unit).where(units.c.job == number, units.c.state == UnitState.LEASED, units.c.expires_at > at)
        return _cancel(connection, number, _leasable(at), samples.c.unit.not_in(held))

    @reading
    def units(self, connection: Connection, job: str, state: UnitState | None = None) -> list[UnitRecord]:
        """In index order. Reads every sample of what it returns: for a start, not for a progress line."""
        chosen = select(units).order_by(units.c.unit)
        members: dict[int, list[int]] = defaultdict(list)
        number = job_number(connection, job)
        placed = select(samples.c.unit, samples.c.sample).where(samples.c.job == number, samples.c.unit.is_not(None))
        if state is not None:
            chosen = chosen.where(units.c.state == state)
            of_state = select(units.c.unit).where(units.c.job == number, units.c.state == state)
            placed = placed.where(samples.c.unit.in_(of_state))
        rows = connection.execute(chosen.where(units.c.job == number)).all()
        in_order = placed.order_by(samples.c.unit, samples.c.row_start).execution_options(yield_per=BATCH_ROWS)
        for unit, sample in connection.execute(in_order):
            members[unit].append(sample)
        return [_record(job, row, tuple(members[row.unit])) for row in rows]


def held_unit(connection: Connection, lease: UnitLease) -> Row[Any] | None:
    """The lease's unit as `_HELD`, None if the lease is not the one that counts."""
    named = {"job_id": lease.unit.job, "index": lease.unit.index, "leased_to": lease.owner, "lease_fence": lease.fence}
    return connection.execute(_HELD_BY, named).one_or_none()


def _expired(now: float) -> ColumnElement[bool]:
    return and_(units.c.state == UnitState.LEASED, units.c.expires_at <= now)


def _leasable(now: float) -> ColumnElement[bool]:
    return or_(units.c.state == UnitState.PENDING, _expired(now))


def _next_leasable(connection: Connection, job: str, now: float) -> tuple[int, int | None]:
    """The job's number, and the lowest of its units that may be leased. NotFound: there is no such job."""
    row = connection.execute(_NEXT, {"job_id": job, "now": now}).one_or_none()
    if row is None:
        raise no_such_job(job)
    return row.number, min((index for index in (row.pending, row.expired) if index is not None), default=None)


def _members(connection: Connection, number: int, index: int) -> tuple[int, ...]:
    """The samples of a unit, in placement order."""
    return tuple(connection.execute(_MEMBERS, {"job_number": number, "index": index}).scalars())


def _release(connection: Connection, row: Row[Any]) -> None:
    """End the lease of the unit `row` (as `_HELD`) without a result."""
    this = units.c.unit == row.unit
    if row.job_state in _CANCELLED_JOBS:
        _cancel(connection, row.job, this, samples.c.unit == row.unit)
    else:
        connection.execute(update(units).where(units.c.job == row.job, this).values(state=UnitState.PENDING, **_FREE))


def _cancel(connection: Connection, number: int, which: ColumnElement[bool], theirs: ColumnElement[bool]) -> JobCounts:
    """Cancel the job's units `which` and their pending samples, which `theirs` tells from those of other units."""
    cancelled = connection.execute(
        update(samples)
        .where(samples.c.job == number, samples.c.status == SampleStatus.PENDING, theirs)
        .values(status=SampleStatus.CANCELLED, reason=CANCELLED_REASON)
    )
    chosen = and_(units.c.job == number, which)
    connection.execute(update(units).where(chosen).values(state=UnitState.CANCELLED, **_FREE))
    changes = Counter({counter_of(SampleStatus.CANCELLED): cancelled.rowcount})
    changes[counter_of(SampleStatus.PENDING)] = -cancelled.rowcount
    return add_counts(connection, number, changes)


def _record(job: str, row: Row[Any], members: tuple[int, ...]) -> UnitRecord:
    return UnitRecord(
        job=job, index=row.unit, row_start=row.row_start, rows=row.rows, samples=members, state=UnitState(row.state)
    )
