"""Rows by the million, from iterables: a batch at a time, so that neither memory nor the event loop is held by a whole job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from typing import Any, TypeVar

from sqlalchemy import Connection, Table, insert

T = TypeVar("T")

BATCH_ROWS = 1000


def batches(items: Iterable[T], size: int = BATCH_ROWS) -> Iterator[list[T]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def insert_rows(connection: Connection, table: Table, rows: Iterable[tuple[Any, ...]]) -> None:
    """Insert `rows`: a value for every column, in the table's order, as the driver takes it.

    The driver is given tuples, past SQLAlchemy's handling of single parameters, which takes longer than the insertion itself.
    """
    dialect: Any = type(connection.dialect)
    statement = _insertion(table, dialect, connection.dialect.paramstyle)
    for batch in batches(rows):
        connection.exec_driver_sql(statement, batch)


@cache
def _insertion(table: Table, dialect: Any, paramstyle: str) -> str:
    positional = dialect(paramstyle="qmark" if paramstyle == "qmark" else "format")
    return str(insert(table).compile(dialect=positional))
