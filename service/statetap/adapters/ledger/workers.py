"""The registered workers."""

from __future__ import annotations

from sqlalchemy import delete, insert, select, update

from statetap.adapters.ledger.database import Database
from statetap.adapters.ledger.schema import workers
from statetap.core.records import WorkerRecord
from statetap.ports import NotFound


class SqlWorkers:
    """The port's methods about workers."""

    def __init__(self, database: Database) -> None:
        self._db = database

    async def add_worker(self, worker: WorkerRecord) -> None:
        values = {
            "url": worker.url,
            "dumps": worker.dumps,
            "requests_per_second": worker.requests_per_second,
            "draining": worker.draining,
            "api_key": worker.api_key,
        }
        async with self._db.writing() as connection:
            replaced = await connection.execute(update(workers).where(workers.c.name == worker.name).values(values))
            if replaced.rowcount == 0:
                await connection.execute(insert(workers).values(name=worker.name, **values))

    async def delete_worker(self, name: str) -> None:
        """Raises NotFound."""
        async with self._db.writing() as connection:
            if (await connection.execute(delete(workers).where(workers.c.name == name))).rowcount == 0:
                raise NotFound(f"there is no worker {name!r}")

    async def workers(self) -> list[WorkerRecord]:
        """By name."""
        async with self._db.reading() as connection:
            rows = await connection.execute(select(workers).order_by(workers.c.name))
        return [WorkerRecord(**row) for row in rows.mappings()]
