"""The ledger on a SQL database, put together from its parts: one file a noun, one transaction a method."""

from __future__ import annotations

from statetap.adapters.ledger.commits import SqlCommits
from statetap.adapters.ledger.database import Database
from statetap.adapters.ledger.datasets import SqlDatasets
from statetap.adapters.ledger.jobs import SqlJobs
from statetap.adapters.ledger.journal import SqlJournal
from statetap.adapters.ledger.migrate import migrate
from statetap.adapters.ledger.planning import SqlPlanning
from statetap.adapters.ledger.samples import SqlSamples
from statetap.adapters.ledger.units import SqlUnits
from statetap.adapters.ledger.workers import SqlWorkers


class SqlLedger(SqlDatasets, SqlPlanning, SqlJobs, SqlUnits, SqlCommits, SqlSamples, SqlJournal, SqlWorkers):
    """`ports.Ledger` on SQLite (`sqlite:///<path>`) or PostgreSQL (`postgresql+psycopg://…`).

    Raises:
        LedgerError: the URL cannot be a ledger's.
    """

    def __init__(self, url: str) -> None:
        super().__init__(Database(url))

    async def open(self) -> None:
        """Bring the database up to this version's tables.

        Raises:
            LedgerError: it cannot be opened, is something else, or was written by a newer version.
        """
        self._db.require_place()
        await self._db.write(lambda connection: migrate(connection, self._db.location))

    async def close(self) -> None:
        await self._db.close()
