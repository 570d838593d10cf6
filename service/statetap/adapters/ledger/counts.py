"""A job's counters: changed by the transaction that changes what they count, never counted afresh."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from typing import Any

from sqlalchemy import Connection, Row, update

from statetap.adapters.ledger.schema import jobs
from statetap.core.records import JobCounts, SampleStatus

_COUNTER_OF = {status: status.name.lower() for status in SampleStatus}
COUNTERS = tuple(counter.name for counter in fields(JobCounts))


def counter_of(status: SampleStatus) -> str:
    """The counter of the samples that have this status."""
    return _COUNTER_OF[status]


def counts_of(row: Row[Any]) -> JobCounts:
    return JobCounts(**{name: row._mapping[name] for name in COUNTERS})


def add_counts(connection: Connection, job_number: int, changes: Counter[str]) -> JobCounts:
    """Add `changes` (which may be negative) to the job's counters and return what they are now."""
    statement = (
        update(jobs)
        .where(jobs.c.number == job_number)
        .values({name: jobs.c[name] + changes[name] for name in COUNTERS})
        .returning(*(jobs.c[name] for name in COUNTERS))
    )
    return counts_of(connection.execute(statement).one())
