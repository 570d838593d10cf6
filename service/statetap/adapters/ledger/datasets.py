"""Datasets, as far as the ledger knows them: what they are called and how large they are."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select

from statetap.adapters.ledger.cursors import decode_cursor, page
from statetap.adapters.ledger.database import Database, reading, writing
from statetap.adapters.ledger.jobs import FINISHED
from statetap.adapters.ledger.schema import datasets, jobs
from statetap.core.records import DatasetRecord
from statetap.ports import LedgerError, NotFound, Page


class SqlDatasets:
    """The port's methods about datasets."""

    def __init__(self, database: Database) -> None:
        self._db = database

    @writing
    def add_dataset(self, connection: Connection, record: DatasetRecord) -> None:
        if _find(connection, record.id) is not None:
            raise LedgerError(f"there is a dataset {record.id!r} already")
        connection.execute(insert(datasets).values(asdict(record)))

    @reading
    def dataset(self, connection: Connection, dataset: str) -> DatasetRecord:
        row = _find(connection, dataset)
        if row is None:
            raise NotFound(f"there is no dataset {dataset!r}")
        return _record(row)

    @reading
    def datasets(self, connection: Connection, *, limit: int, cursor: str | None) -> Page[DatasetRecord]:
        """Newest first."""
        statement = select(datasets).order_by(datasets.c.number.desc()).limit(limit + 1)
        if cursor is not None:
            statement = statement.where(datasets.c.number < decode_cursor("datasets", cursor))
        rows = connection.execute(statement).all()
        return page("datasets", rows, limit, _record, lambda row: int(row.number))

    @writing
    def delete_dataset(self, connection: Connection, dataset: str) -> None:
        unfinished = select(jobs.c.id).where(jobs.c.dataset == dataset, jobs.c.state.not_in(FINISHED)).order_by(jobs.c.number)
        if connection.execute(delete(datasets).where(datasets.c.id == dataset)).rowcount == 0:
            raise NotFound(f"there is no dataset {dataset!r}")
        if (job := connection.execute(unfinished.limit(1)).scalar()) is not None:
            raise LedgerError(f"dataset {dataset!r} is needed by job {job!r}, which is not finished; cancel the job first")


def _find(connection: Connection, dataset: str) -> Row[Any] | None:
    return connection.execute(select(datasets).where(datasets.c.id == dataset)).one_or_none()


def _record(row: Row[Any]) -> DatasetRecord:
    return DatasetRecord(
        id=row.id,
        name=row.name,
        model=row.model,
        samples=row.samples,
        tokens=row.tokens,
        max_tokens=row.max_tokens,
        sha256=row.sha256,
        tokenizer=row.tokenizer,
        chat_template_sha256=row.chat_template_sha256,
        created_at=row.created_at,
    )
