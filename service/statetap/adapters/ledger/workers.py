"""The registered workers."""

from __future__ import annotations

from sqlalchemy import Connection, delete, insert, select, update

from statetap.adapters.ledger.database import Database, reading, writing
from statetap.adapters.ledger.schema import workers
from statetap.core.records import WorkerRecord
from statetap.ports import NotFound


class SqlWorkers:
    """The port's methods about workers."""

    def __init__(self, database: Database) -> None:
        self._db = database

    @writing
    def add_worker(self, connection: Connection, worker: WorkerRecord) -> None:
        values = {
            "url": worker.url,
            "dumps": worker.dumps,
            "requests_per_second": worker.requests_per_second,
            "draining": worker.draining,
            "api_key": worker.api_key,
        }
        replaced = connection.execute(update(workers).where(workers.c.name == worker.name).values(values))
        if replaced.rowcount == 0:
            connection.execute(insert(workers).values(name=worker.name, **values))

    @writing
    def delete_worker(self, connection: Connection, name: str) -> None:
        """Raises NotFound."""
        if connection.execute(delete(workers).where(workers.c.name == name)).rowcount == 0:
            raise NotFound(f"there is no worker {name!r}")

    @reading
    def workers(self, connection: Connection) -> list[WorkerRecord]:
        """By name."""
        rows = connection.execute(select(workers).order_by(workers.c.name))
        return [WorkerRecord(**row) for row in rows.mappings()]
