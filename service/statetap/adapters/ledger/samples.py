"""Samples, read: by unit, by status, by dataset index, and their failures by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from sqlalchemy import BigInteger, Connection, Select, bindparam, func, select, type_coerce

from statetap.adapters.ledger.cursors import decode_cursor, page
from statetap.adapters.ledger.database import Database, reading
from statetap.adapters.ledger.jobs import job_number
from statetap.adapters.ledger.schema import samples
from statetap.core.capture import reason_kind
from statetap.core.records import SampleRecord, SampleStatus
from statetap.ports import Page, SampleColumns

_STATUS = {status.value: status for status in SampleStatus}
_OF_JOB = samples.c.job == bindparam("job_number")
# Made once: SQLAlchemy takes longer to put a statement together than SQLite to run it.
_OF_UNIT = select(samples).where(_OF_JOB, samples.c.unit == bindparam("unit")).order_by(samples.c.row_start)
# In the order of `SampleColumns`. A digest as SQL has it: its bits are turned into a uint64 in one go.
_COLUMNS = (
    select(
        samples.c.id,
        samples.c.row_start,
        samples.c.length,
        samples.c.status,
        samples.c.next_token,
        type_coerce(samples.c.digest, BigInteger),
    )
    .where(_OF_JOB, samples.c.sample.between(bindparam("first"), bindparam("last")))
    .order_by(samples.c.sample)
)


class SqlSamples:
    """The port's methods that read samples. An unknown job is NotFound."""

    def __init__(self, database: Database) -> None:
        self._db = database

    @reading
    def unit_samples(self, connection: Connection, job: str, unit: int) -> list[SampleRecord]:
        return samples_of_unit(connection, job, job_number(connection, job), unit)

    @reading
    def samples(
        self, connection: Connection, job: str, *, status: SampleStatus | None, limit: int, cursor: str | None
    ) -> Page[SampleRecord]:
        """In dataset order."""
        statement = select(samples).order_by(samples.c.sample).limit(limit + 1)
        if status is not None:
            statement = statement.where(samples.c.status == status)
        if cursor is not None:
            statement = statement.where(samples.c.sample > decode_cursor("samples", cursor))
        records = _records(connection, job, statement)
        return page("samples", records, limit, lambda record: record, lambda record: record.sample)

    @reading
    def sample_columns(self, connection: Connection, job: str, first: int, count: int) -> SampleColumns:
        named = {"job_number": job_number(connection, job), "first": first, "last": first + count - 1}
        # All at once, turned on its side: no object for any of a million rows.
        ids, *numbers = list(zip(*connection.execute(_COLUMNS, named).all(), strict=True)) or ((),) * 6
        row_start, length, status, next_token, digest = numbers
        return SampleColumns(
            first=first,
            ids=ids,
            row_start=np.array(row_start, np.int64),
            length=np.array(length, np.int32),
            status=np.array(status, np.uint8),
            next_token=np.array(next_token, np.int32),
            digest=np.array(digest, np.int64).view(np.uint64),
        )

    @reading
    def failures(self, connection: Connection, job: str) -> dict[str, int]:
        # That the reason is there is said aloud so that the index on reasons, which holds no other rows, answers alone.
        statement = (
            select(samples.c.reason, func.count())
            .where(samples.c.status.in_((SampleStatus.FAILED, SampleStatus.SKIPPED)), samples.c.reason.is_not(None))
            .group_by(samples.c.reason)
        )
        rows = connection.execute(statement.where(samples.c.job == job_number(connection, job)))
        kinds: Counter[str] = Counter()
        for reason, count in rows:
            kinds[reason_kind(reason)] += count
        return dict(kinds)


def samples_of_unit(connection: Connection, job: str, number: int, unit: int) -> list[SampleRecord]:
    """Of the job with that number, in placement order."""
    return [_record(job, row) for row in connection.execute(_OF_UNIT, {"job_number": number, "unit": unit})]


def _records(connection: Connection, job: str, statement: Select[Any]) -> list[SampleRecord]:
    """The samples that a statement chooses from all of them, in one job."""
    rows = connection.execute(statement.where(_OF_JOB), {"job_number": job_number(connection, job)})
    return [_record(job, row) for row in rows]


def _record(job: str, row: Sequence[Any]) -> SampleRecord:
    # Taken apart by place, in the table's order: looking a million rows up by name takes longer than reading them.
    _, sample, id_, unit, row_start, length, status, reason, attempts, worker, next_token, digest = row
    return SampleRecord(
        job=job,
        sample=sample,
        id=id_,
        unit=unit,
        row_start=row_start,
        length=length,
        status=_STATUS[status],
        reason=reason,
        attempts=attempts,
        worker=worker,
        next_token=next_token,
        digest=digest,
    )
