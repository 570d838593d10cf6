"""Rows by the thousand: all of them, in order, whatever their number, and none twice."""

import pytest
from sqlalchemy import Column, Integer, MetaData, Table, Text, create_engine, select
from sqlalchemy.exc import IntegrityError
from statetap.adapters.ledger.bulk import QUERIED_VALUES, insert_rows

TABLE = Table("things", MetaData(), Column("number", Integer, primary_key=True), Column("name", Text))
AT_ONCE = QUERIED_VALUES // 2


@pytest.fixture
def connection(tmp_path):
    engine = create_engine(f"sqlite:///{tmp_path}/things.db")
    with engine.begin() as connection:
        TABLE.create(connection)
        yield connection
    engine.dispose()


@pytest.mark.parametrize("count", [0, 1, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE + 7])
def test_every_row_is_inserted(connection, count) -> None:
    rows = [(number, None if number % 3 else f"thing {number}") for number in range(count)]
    insert_rows(connection, TABLE, iter(rows))
    assert [tuple(row) for row in connection.execute(select(TABLE).order_by(TABLE.c.number))] == rows


def test_a_row_that_comes_twice_is_an_error(connection) -> None:
    with pytest.raises(IntegrityError):
        insert_rows(connection, TABLE, [(1, "one"), (2, "two"), (1, "one")])
