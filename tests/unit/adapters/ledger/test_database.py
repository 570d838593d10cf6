"""Transactions on SQLite: when they begin, what undoes them, and who waits for whom."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from contextlib import closing

import pytest
from sqlalchemy import insert, select, text
from statetap.adapters.ledger.database import Database
from statetap.adapters.ledger.ledger import SqlLedger
from statetap.adapters.ledger.schema import workers
from statetap.ports import LedgerError

WORKER = {"name": "w", "url": "u", "dumps": {}, "draining": False}


@pytest.fixture
async def database(tmp_path):
    path = tmp_path / "ledger.db"
    ledger = SqlLedger(f"sqlite:///{path}")
    await ledger.open()
    await ledger.close()
    made = Database(f"sqlite:///{path}")
    yield made
    await made.close()


async def names(database):
    return await database.read(lambda connection: list(connection.execute(select(workers.c.name)).scalars()))


def add_worker(connection):
    connection.execute(insert(workers).values(WORKER))


@pytest.mark.parametrize(
    ("pragma", "value"), [("journal_mode", "wal"), ("synchronous", 2), ("foreign_keys", 1), ("busy_timeout", 10000)]
)
async def test_every_connection_is_durable_and_patient(database, pragma, value):
    for run in (database.read, database.write):
        assert await run(lambda connection: connection.execute(text(f"PRAGMA {pragma}")).scalar()) == value


async def test_a_connection_keeps_little_of_the_ledger_in_memory(database):
    """Each thread has one, for as long as the service runs."""
    for run in (database.read, database.write):
        assert await run(lambda connection: connection.execute(text("PRAGMA cache_size")).scalar()) == -2048


async def test_a_large_transaction_is_not_spilled_before_its_end(database, tmp_path):
    log = tmp_path / "ledger.db-wal"
    before = log.stat().st_size if log.exists() else 0
    many = [{**WORKER, "name": f"worker-{number}", "url": "u" * 1000} for number in range(8000)]

    def add_many(connection):
        connection.execute(insert(workers), many)
        return log.stat().st_size - before

    assert await database.write(add_many) < 1 << 20
    assert log.stat().st_size > 8 << 20


async def test_what_is_raised_inside_undoes_all_of_it(database):
    def change_ones_mind(connection):
        add_worker(connection)
        raise ValueError("not after all")

    with pytest.raises(ValueError, match="after all"):
        await database.write(change_ones_mind)
    assert await names(database) == []


async def test_a_cancelled_writer_leaves_nothing_and_does_not_block_the_next(database):
    inside, go_on = threading.Event(), threading.Event()

    def write(connection):
        add_worker(connection)
        inside.set()
        assert go_on.wait(30)

    task = asyncio.create_task(database.write(write))
    assert await asyncio.to_thread(inside.wait, 30)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=0)
    assert not done, "the caller came back while its transaction was still open"
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await names(database) == []
    await database.write(add_worker)
    assert await names(database) == ["w"]


async def test_a_writer_holds_the_lock_before_its_first_statement(database, tmp_path):
    other = sqlite3.connect(tmp_path / "ledger.db", timeout=0, isolation_level=None, check_same_thread=False)

    def lock_elsewhere(_connection):
        other.execute("BEGIN IMMEDIATE")
        other.execute("ROLLBACK")

    await database.read(lock_elsewhere)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        await database.write(lock_elsewhere)
    other.close()


async def test_a_writer_that_gets_no_lock_says_so(database, tmp_path):
    await database.write(lambda connection: connection.execute(text("PRAGMA busy_timeout=0")))
    with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match=r"ledger\.db: database is locked"):
            await database.write(add_worker)
    await database.write(add_worker)
    assert await names(database) == ["w"]


async def test_readers_see_one_moment_and_do_not_wait_for_a_writer(database):
    loop = asyncio.get_running_loop()

    def seen(connection):
        return connection.execute(select(workers.c.name)).all()

    def write(connection):
        add_worker(connection)
        assert asyncio.run_coroutine_threadsafe(names(database), loop).result(30) == []

    def read(connection):
        before = seen(connection)
        asyncio.run_coroutine_threadsafe(database.write(write), loop).result(30)
        return before, seen(connection)

    assert await database.read(read) == ([], [])
    assert await names(database) == ["w"]


async def test_many_writers_take_turns(database):
    async def write(name):
        def transaction(connection):
            seen = len(connection.execute(select(workers.c.name)).all())
            connection.execute(insert(workers).values(WORKER | {"name": name, "url": str(seen)}))

        await database.write(transaction)

    await asyncio.gather(*(write(f"w{n}") for n in range(20)))
    urls = await database.read(lambda connection: list(connection.execute(select(workers.c.url)).scalars()))
    assert sorted(map(int, urls)) == list(range(20))


async def test_the_event_loop_goes_on_while_a_transaction_runs(database):
    turned = threading.Event()
    loop = asyncio.get_running_loop()

    def wait_for_the_loop(_connection):
        loop.call_soon_threadsafe(turned.set)
        return turned.wait(30)

    assert await database.write(wait_for_the_loop)


async def test_what_the_database_says_becomes_a_ledger_error(database):
    with pytest.raises(LedgerError, match=r"ledger\.db: UNIQUE constraint failed: workers\.name"):
        await database.write(lambda connection: connection.execute(insert(workers), [WORKER, WORKER]))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("sqlite://", "would not outlive"),
        ("sqlite:///:memory:", "would not outlive"),
        ("sqlite+nosuch:///x.db", "use sqlite:///<path>"),
        ("no url", "use sqlite:///<path>"),
        ("nosuch+driver://x", "use sqlite:///<path>"),
    ],
)
def test_a_url_that_cannot_be_a_ledgers_is_refused(url, reason):
    with pytest.raises(LedgerError, match=reason):
        Database(url)


async def test_a_missing_folder_is_named(tmp_path):
    ledger = SqlLedger(f"sqlite:///{tmp_path}/missing/ledger.db")
    with pytest.raises(LedgerError, match=r"ledger\.db: there is no folder .*/missing; create it"):
        await ledger.open()
    await ledger.close()
