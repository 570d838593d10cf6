"""The engine: how a transaction begins, and what makes an acknowledged one survive.

SQLite's Python driver opens transactions by itself, too late and only before some statements; here it is told not to, and `BEGIN`
is sent by SQLAlchemy's event. A writing transaction takes the write lock at once (`BEGIN IMMEDIATE`): one that first reads and
then writes could otherwise fail half-way. Sources: SQLAlchemy, "SQLite: pysqlite", on transactions; sqlite.org/wal.html and
sqlite.org/pragma.html#pragma_synchronous.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, event, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, create_async_engine

from statetap.ports import LedgerError

_WRITES = "statetap_writes"

# synchronous=FULL syncs the write-ahead log at every commit: what was acknowledged survives a power failure, which NORMAL does
# not promise. Each connection of the pool has a cache of its own, which fills as the ledger grows and is never given back: it is
# small (2 MiB). A transaction may take more until it ends, 64 MiB of 4 KiB pages: a large job is not spilled page by page. The
# size limit gives the space of the log back.
_PRAGMAS = (
    "journal_mode=WAL",
    "synchronous=FULL",
    "foreign_keys=ON",
    "busy_timeout=10000",
    "cache_size=-2048",
    "cache_spill=16384",
    "journal_size_limit=67108864",
)


class Database:
    """One database. Writers of this process take turns; readers do not wait for them.

    Raises:
        LedgerError: a URL that no ledger can be at; in every transaction, what the database could not do.
    """

    def __init__(self, url: str) -> None:
        try:
            parsed = make_url(url)
            self.location = parsed.render_as_string()
            sqlite = parsed.get_backend_name() == "sqlite"
            if sqlite and parsed.database in (None, "", ":memory:"):
                raise LedgerError(
                    f"the ledger {self.location} would not outlive its process; give it a file: sqlite+aiosqlite:///<path>"
                )
            options: dict[str, Any] = {"connect_args": {"isolation_level": None}} if sqlite else {}
            self._engine = create_async_engine(parsed, **options)
            self._writer = self._engine.execution_options(**{_WRITES: True})
        except (SQLAlchemyError, ImportError) as error:
            raise LedgerError(
                f"no ledger can be opened by that URL: {error}; use sqlite+aiosqlite:///<path> or postgresql+psycopg://<host>/<name>"
            ) from error
        if sqlite:
            event.listen(self._engine.sync_engine, "connect", _set_pragmas)
            event.listen(self._engine.sync_engine, "begin", _begin)
        self._folder = Path(parsed.database or "").parent if sqlite else None
        self._writing = asyncio.Lock()

    def require_place(self) -> None:
        """Raise LedgerError if SQLite's file has no folder to be in: what SQLite itself says of that names nothing."""
        if self._folder is not None and not self._folder.is_dir():
            raise LedgerError(f"the ledger {self.location}: there is no folder {self._folder}; create it, or use another")

    async def close(self) -> None:
        await self._engine.dispose()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """One transaction that only reads: all that it reads is of one moment."""
        with self._failures():
            async with self._engine.begin() as connection:
                yield connection

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[AsyncConnection]:
        """One transaction that writes: durable when this returns, undone by whatever is raised inside."""
        with self._failures():
            async with self._writing, self._writer.begin() as connection:
                yield connection

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except SQLAlchemyError as error:
            cause = error.orig if isinstance(error, DBAPIError) else error
            raise LedgerError(f"the ledger {self.location}: {cause}") from error


def _set_pragmas(connection: Any, _record: object) -> None:
    cursor = connection.cursor()
    for pragma in _PRAGMAS:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get(_WRITES) else "BEGIN")
