"""A job's counters: changed by the transaction that changes what they count, never counted afresh."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import Any

from sqlalchemy import Connection, Row, bindparam, update

from statetap.adapters.ledger.schema import jobs
from statetap.core.records import JobCounts, SampleStatus

_COUNTER_OF = {status: status.name.lower() for status in SampleStatus}
COUNTERS = tuple(counter.name for counter in fields(JobCounts))
# Made once: SQLAlchemy takes longer to put a statement together than SQLite to run it.
_ADD = (
    update(jobs)
    .where(jobs.c.number == bindparam("job_number"))
    .values({name: jobs.c[name] + bindparam(f"{name}_added") for name in COUNTERS})
    .returning(*(jobs.c[name] for name in COUNTERS))
)


def counter_of(status: SampleStatus) -> str:
    """The counter of the samples that have this status."""
    return _COUNTER_OF[status]


def counts_of(row: Row[Any]) -> JobCounts:
    return JobCounts(**{name: row._mapping[name] for name in COUNTERS})


def add_counts(connection: Connection, job_number: int, changes: Counter[str]) -> JobCounts:
    """Add `changes` (which may be negative) to the job's counters and return what they are now."""
    added = {f"{name}_added": changes[name] for name in COUNTERS}
    return counts_of(connection.execute(_ADD, {"job_number": job_number, **added}).one())
