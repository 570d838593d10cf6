"""Transactions on SQLite: when they begin, what undoes them, and who waits for whom."""

from __future__ import annotations

import asyncio
import sqlite3

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
    ledger = SqlLedger(f"sqlite+aiosqlite:///{path}")
    await ledger.open()
    await ledger.close()
    made = Database(f"sqlite+aiosqlite:///{path}")
    yield made
    await made.close()


async def names(database):
    async with database.reading() as connection:
        return list((await connection.execute(select(workers.c.name))).scalars())


@pytest.mark.parametrize(
    ("pragma", "value"), [("journal_mode", "wal"), ("synchronous", 2), ("foreign_keys", 1), ("busy_timeout", 10000)]
)
async def test_every_connection_is_durable_and_patient(database, pragma, value):
    for transaction in (database.reading, database.writing):
        async with transaction() as connection:
            assert (await connection.execute(text(f"PRAGMA {pragma}"))).scalar() == value


async def test_a_connection_keeps_little_of_the_ledger_in_memory(database):
    """There are up to fifteen of them, for as long as the service runs."""
    for transaction in (database.reading, database.writing):
        async with transaction() as connection:
            assert (await connection.execute(text("PRAGMA cache_size"))).scalar() == -2048


async def test_a_large_transaction_is_not_spilled_before_its_end(database, tmp_path):
    log = tmp_path / "ledger.db-wal"
    before = log.stat().st_size if log.exists() else 0
    many = [{**WORKER, "name": f"worker-{number}", "url": "u" * 1000} for number in range(8000)]
    async with database.writing() as connection:
        await connection.execute(insert(workers), many)
        assert log.stat().st_size - before < 1 << 20
    assert log.stat().st_size > 8 << 20


async def test_what_is_raised_inside_undoes_all_of_it(database):
    async def change_ones_mind():
        async with database.writing() as connection:
            await connection.execute(insert(workers).values(WORKER))
            raise ValueError("not after all")

    with pytest.raises(ValueError, match="after all"):
        await change_ones_mind()
    assert await names(database) == []


async def test_a_cancelled_writer_leaves_nothing_and_does_not_block_the_next(database):
    inside = asyncio.Event()

    async def write():
        async with database.writing() as connection:
            await connection.execute(insert(workers).values(WORKER))
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(write())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await names(database) == []
    async with database.writing() as connection:
        await connection.execute(insert(workers).values(WORKER))
    assert await names(database) == ["w"]


async def test_a_writer_holds_the_lock_before_its_first_statement(database, tmp_path):
    other = sqlite3.connect(tmp_path / "ledger.db", timeout=0, isolation_level=None)
    async with database.reading():
        other.execute("BEGIN IMMEDIATE")
        other.execute("ROLLBACK")
    async with database.writing():
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
    other.close()


async def test_readers_see_one_moment_and_do_not_wait_for_a_writer(database):
    async with database.reading() as reader:
        assert (await reader.execute(select(workers.c.name))).all() == []
        async with database.writing() as writer:
            await writer.execute(insert(workers).values(WORKER))
            assert await names(database) == []
        assert (await reader.execute(select(workers.c.name))).all() == []
    assert await names(database) == ["w"]


async def test_many_writers_take_turns(database):
    async def write(name):
        async with database.writing() as connection:
            seen = len((await connection.execute(select(workers.c.name))).all())
            await connection.execute(insert(workers).values(WORKER | {"name": name, "url": str(seen)}))

    await asyncio.gather(*(write(f"w{n}") for n in range(20)))
    async with database.reading() as connection:
        assert sorted(int(u) for u in (await connection.execute(select(workers.c.url))).scalars()) == list(range(20))


async def test_what_the_database_says_becomes_a_ledger_error(database):
    with pytest.raises(LedgerError, match=r"ledger\.db: UNIQUE constraint failed: workers\.name"):
        async with database.writing() as connection:
            await connection.execute(insert(workers), [WORKER, WORKER])


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("sqlite+aiosqlite://", "would not outlive"),
        ("sqlite+aiosqlite:///:memory:", "would not outlive"),
        ("sqlite:///x.db", "use sqlite[+]aiosqlite:///<path>"),
        ("no url", "use sqlite[+]aiosqlite:///<path>"),
        ("nosuch+driver://x", "use sqlite[+]aiosqlite:///<path>"),
    ],
)
def test_a_url_that_cannot_be_a_ledgers_is_refused(url, reason):
    with pytest.raises(LedgerError, match=reason):
        Database(url)


async def test_a_missing_folder_is_named(tmp_path):
    ledger = SqlLedger(f"sqlite+aiosqlite:///{tmp_path}/missing/ledger.db")
    with pytest.raises(LedgerError, match=r"ledger\.db: there is no folder .*/missing; create it"):
        await ledger.open()
    await ledger.close()
