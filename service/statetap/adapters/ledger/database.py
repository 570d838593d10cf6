"""The engine: where a transaction runs, how it begins, and what makes an acknowledged one survive.

A transaction is one plain function, run from its first statement to its end by one thread: the event loop hands it over and hears
of it once. A thread switch for every statement would cost several times what SQLite itself takes.

SQLite's Python driver opens transactions by itself, too late and only before some statements; here it is told not to, and `BEGIN`
goes straight to it: by SQLAlchemy's event it would cost as much as any statement, and each of those would look for events, too. A
writing transaction takes the write lock at once (`BEGIN IMMEDIATE`): one that first reads and then writes could otherwise fail
half-way. Sources: SQLAlchemy, "SQLite: pysqlite", on transactions; sqlite.org/wal.html and
sqlite.org/pragma.html#pragma_synchronous.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from threading import Event
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from sqlalchemy import Connection, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from statetap.ports import LedgerError

READERS = 2

P = ParamSpec("P")
T = TypeVar("T")

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
                raise LedgerError(f"the ledger {self.location} would not outlive its process; give it a file: sqlite:///<path>")
            options: dict[str, Any] = {"connect_args": {"isolation_level": None}} if sqlite else {}
            self.engine = create_engine(parsed, **options)
        except (SQLAlchemyError, ImportError) as error:
            raise LedgerError(
                f"no ledger can be opened by that URL: {error}; use sqlite:///<path> or postgresql+psycopg://<host>/<name>"
            ) from error
        if sqlite:
            event.listen(self.engine, "connect", _set_pragmas)
        # What begins a transaction, where the driver is told not to.
        self._begin_reading = "BEGIN" if sqlite else None
        self._begin_writing = "BEGIN IMMEDIATE" if sqlite else None
        self._folder = Path(parsed.database or "").parent if sqlite else None
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="ledger-reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="ledger-writer")

    def require_place(self) -> None:
        """Raise LedgerError if SQLite's file has no folder to be in: what SQLite itself says of that names nothing."""
        if self._folder is not None and not self._folder.is_dir():
            raise LedgerError(f"the ledger {self.location}: there is no folder {self._folder}; create it, or use another")

    async def close(self) -> None:
        """Let the transactions that run come to their end, then close all connections."""
        await asyncio.to_thread(self._close)

    async def read(self, transaction: Callable[[Connection], T]) -> T:
        """Run one transaction that only reads: all that it reads is of one moment."""
        return await self._run(self._readers, self._begin_reading, transaction)

    async def write(self, transaction: Callable[[Connection], T]) -> T:
        """Run one transaction that writes: durable when this returns, undone by whatever it raises."""
        return await self._run(self._writer, self._begin_writing, transaction)

    async def _run(self, threads: ThreadPoolExecutor, begin: str | None, transaction: Callable[[Connection], T]) -> T:
        """If the caller is cancelled, the transaction is undone (or, its commit under way, done) before this returns."""
        abandoned = Event()
        running = asyncio.get_running_loop().run_in_executor(threads, self._transact, begin, transaction, abandoned)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            abandoned.set()
            while not running.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            # Looked at, so that nobody complains of an exception that was never retrieved.
            running.exception()
            raise
        finally:
            # An error's traceback holds this frame, which would hold the error, and with it all that its callers hold.
            del running

    def _transact(self, begin: str | None, transaction: Callable[[Connection], T], abandoned: Event) -> T:
        with self._failures(), self.engine.begin() as connection:
            if begin is not None:
                self._send(connection, begin)
            result = transaction(connection)
            if abandoned.is_set():
                raise LedgerError("whoever asked for this transaction was cancelled")
            return result

    def _send(self, connection: Connection, begin: str) -> None:
        driver: Any = connection.connection.driver_connection
        try:
            driver.execute(begin)
        except sqlite3.Error as error:
            raise LedgerError(f"the ledger {self.location}: {error}") from error

    def _close(self) -> None:
        self._readers.shutdown()
        self._writer.shutdown()
        self.engine.dispose()

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


class HasDatabase(Protocol):
    """What the methods are of that `reading` and `writing` make."""

    _db: Database


S = TypeVar("S", bound=HasDatabase)


def reading(
    transaction: Callable[Concatenate[S, Connection, P], T],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Make a method that is one transaction, and only reads, from what it does with a connection."""

    @wraps(transaction)
    async def method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._db.read(lambda connection: transaction(self, connection, *args, **kwargs))

    return method


def writing(
    transaction: Callable[Concatenate[S, Connection, P], T],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """The same for one that writes."""

    @wraps(transaction)
    async def method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._db.write(lambda connection: transaction(self, connection, *args, **kwargs))

    return method
