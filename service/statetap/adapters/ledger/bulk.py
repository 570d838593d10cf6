"""Rows by the million, from iterables: a batch at a time, so that neither memory nor the event loop is held by a whole job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, islice
from typing import Any, TypeVar

from sqlalchemy import Connection, Table, insert

T = TypeVar("T")

BATCH_ROWS = 1000
# A statement may carry only so many values: SQLite's least limit.
QUERIED_VALUES = 999


def batches(items: Iterable[T], size: int = BATCH_ROWS) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def insert_rows(connection: Connection, table: Table, rows: Iterable[tuple[Any, ...]]) -> None:
    """Insert `rows`: a value for every column, in the table's order, as the driver takes it.

    The driver is given plain values, past SQLAlchemy's handling of single parameters, which takes longer than the insertion
    itself, and as many rows in a statement as may be: a statement for each takes nearly twice the time.
    """
    dialect: Any = type(connection.dialect)
    for batch in batches(rows, QUERIED_VALUES // len(table.columns)):
        statement = _insertion(table, dialect, connection.dialect.paramstyle, len(batch))
        connection.exec_driver_sql(statement, tuple(chain.from_iterable(batch)))


@cache
def _insertion(table: Table, dialect: Any, paramstyle: str, count: int) -> str:
    """Of `count` rows."""
    positional = dialect(paramstyle="qmark" if paramstyle == "qmark" else "format")
    head, row = str(insert(table).compile(dialect=positional)).split(" VALUES ")
    return f"{head} VALUES {', '.join([row] * count)}"
