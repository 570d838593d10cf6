"""What was said: the append-only event log, and the idempotency keys of submissions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, insert, select

from statetap.adapters.ledger.database import Database, reading, writing
from statetap.adapters.ledger.schema import events, idempotency_keys
from statetap.core.records import EventRecord
from statetap.ports import IdempotencyConflict, IdempotencyKey


class SqlJournal:
    """The port's methods about events and idempotency keys."""

    def __init__(self, database: Database) -> None:
        self._db = database

    @writing
    def append_event(self, connection: Connection, job: str | None, name: str, data: Mapping[str, Any], *, at: float) -> int:
        statement = insert(events).values(job=job, name=name, at=at, data=dict(data)).returning(events.c.id)
        return int(connection.execute(statement).scalar_one())

    @reading
    def events(self, connection: Connection, job: str, *, after: int, limit: int) -> list[EventRecord]:
        """In the order in which they were appended; a job without any, known or not, has an empty list."""
        statement = select(events).where(events.c.job == job, events.c.id > after).order_by(events.c.id).limit(limit)
        rows = connection.execute(statement)
        return [EventRecord(id=row.id, job=row.job, name=row.name, at=row.at, data=row.data) for row in rows]

    @reading
    def idempotent(self, connection: Connection, key: IdempotencyKey) -> str | None:
        return _recorded(connection, key)


def record_key(connection: Connection, key: IdempotencyKey, job: str, *, at: float) -> None:
    """Let `key` stand for `job`. IdempotencyConflict: it stands for another already."""
    if (recorded := _recorded(connection, key)) is not None:
        raise IdempotencyConflict(f"the idempotency key {key.key!r} already stands for job {recorded!r}")
    values = {"key": key.key, "request_hash": key.request_hash, "job": job, "at": at}
    connection.execute(insert(idempotency_keys).values(values))


def _recorded(connection: Connection, key: IdempotencyKey) -> str | None:
    row = connection.execute(select(idempotency_keys).where(idempotency_keys.c.key == key.key)).one_or_none()
    if row is None:
        return None
    if row.request_hash != key.request_hash:
        raise IdempotencyConflict(
            f"the idempotency key {key.key!r} was used for another request; use a new key for a new request"
        )
    return str(row.job)
