"""What opening does to a database: empty, ours, newer, somebody else's."""

from __future__ import annotations

import sqlite3

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable
from statetap.adapters.ledger import SqlLedger
from statetap.adapters.ledger.schema import metadata
from statetap.core.records import WorkerRecord
from statetap.ports import LedgerError


async def opened_and_closed(path):
    ledger = SqlLedger(f"sqlite:///{path}")
    try:
        await ledger.open()
    finally:
        await ledger.close()


async def test_the_migrations_make_the_schema(tmp_path):
    await opened_and_closed(tmp_path / "ledger.db")
    engine = create_engine(f"sqlite:///{tmp_path}/ledger.db")
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    engine.dispose()


async def test_opening_again_keeps_what_is_there(tmp_path):
    ledger = SqlLedger(f"sqlite:///{tmp_path}/ledger.db")
    worker = WorkerRecord(name="w", url="http://127.0.0.1:1", dumps={})
    await ledger.open()
    await ledger.add_worker(worker)
    await ledger.close()
    ledger = SqlLedger(f"sqlite:///{tmp_path}/ledger.db")
    await ledger.open()
    assert await ledger.workers() == [worker]
    await ledger.close()


async def test_a_newer_ledger_is_refused_untouched(tmp_path):
    path = tmp_path / "ledger.db"
    await opened_and_closed(path)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(
        LedgerError, match=r"revision 9999, which is newer than this version knows \(up to \d+\); run the version"
    ):
        await opened_and_closed(path)
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT version_num FROM alembic_version").fetchall() == [("9999",)]


async def test_a_database_of_something_else_is_refused_untouched(tmp_path):
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE jobs (x)")
    with pytest.raises(LedgerError, match="a database of its own"):
        await opened_and_closed(path)
    with sqlite3.connect(path) as connection:
        assert [name for (name,) in connection.execute("SELECT name FROM sqlite_master")] == ["jobs"]


async def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("not a database, but long enough to be taken for one at first sight\n" * 20)
    with pytest.raises(LedgerError, match=r"notes\.txt: file is not a database"):
        await opened_and_closed(tmp_path / "notes.txt")


async def test_a_percent_sign_in_the_path_is_no_trouble(tmp_path):
    (tmp_path / "100%s").mkdir()
    await opened_and_closed(tmp_path / "100%s" / "ledger.db")


@pytest.mark.parametrize("table", metadata.sorted_tables, ids=lambda table: table.name)
def test_postgresql_could_hold_every_table(table):
    dialect = postgresql.dialect()
    for statement in (CreateTable(table), *(CreateIndex(index) for index in table.indexes)):
        assert str(statement.compile(dialect=dialect))
