"""The tables. What a migration made is what stands here: a test compares the two.

Jobs and datasets have a `number` beside their opaque id: it grows with every insertion (so lists are newest first without a
second key), and it is what the million rows of a job carry instead of a text. Nothing here is SQLite's alone.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    Table,
    Text,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

metadata = MetaData()

AutoNumber = BigInteger().with_variant(Integer, "sqlite")
"""A key that the database gives out; SQLite does so for `INTEGER` alone."""


def signed(value: int) -> int:
    """The int64 of a uint64's bits."""
    return value if value < 1 << 63 else value - (1 << 64)


class Unsigned64(TypeDecorator[int]):
    """A uint64 (an XXH3-64 digest) in the signed 64-bit integer that SQL has."""

    impl = BigInteger
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: Dialect) -> int | None:
        return None if value is None else signed(value)

    def process_result_value(self, value: Any | None, dialect: Dialect) -> int | None:
        return None if value is None else value % (1 << 64)


datasets = Table(
    "datasets",
    metadata,
    Column("number", AutoNumber, primary_key=True),
    Column("id", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("samples", BigInteger, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("max_tokens", BigInteger, nullable=False),
    Column("sha256", Text, nullable=False),
    Column("tokenizer", Text, nullable=False),
    Column("chat_template_sha256", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Index("ux_datasets_id", "id", unique=True),
    sqlite_autoincrement=True,
)

# The counters are kept in step by every transaction that changes what they count, so that no progress line counts rows.
jobs = Table(
    "jobs",
    metadata,
    Column("number", AutoNumber, primary_key=True),
    Column("id", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text),
    Column("dataset", Text, nullable=False),
    Column("spec", JSON, nullable=False),
    Column("pending", BigInteger, nullable=False),
    Column("stored", BigInteger, nullable=False),
    Column("failed", BigInteger, nullable=False),
    Column("cancelled", BigInteger, nullable=False),
    Column("skipped", BigInteger, nullable=False),
    Column("tokens_total", BigInteger, nullable=False),
    Column("tokens_stored", BigInteger, nullable=False),
    Column("bytes_stored", BigInteger, nullable=False),
    Column("units_total", BigInteger, nullable=False),
    Column("units_committed", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),
    Column("finished_at", Double),
    Index("ux_jobs_id", "id", unique=True),
    Index("ix_jobs_state", "state", "number"),
    Index("ix_jobs_dataset", "dataset"),
    sqlite_autoincrement=True,
)

# `owner` and `expires_at` are set while a unit is leased; `fence` stays, so that it only grows.
units = Table(
    "units",
    metadata,
    Column("job", BigInteger, ForeignKey("jobs.number"), primary_key=True, autoincrement=False),
    Column("unit", Integer, primary_key=True, autoincrement=False),
    Column("row_start", BigInteger, nullable=False),
    Column("rows", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    Column("owner", Text),
    Column("fence", BigInteger, nullable=False),
    Column("expires_at", Double),
    Column("committed_at", Double),
)
Index("ix_units_state", units.c.job, units.c.state, units.c.unit)
Index("ix_units_owner", units.c.owner, sqlite_where=units.c.owner.is_not(None), postgresql_where=units.c.owner.is_not(None))

# Placement order within a unit is the order of `row_start`: every sample has a row of its own.
samples = Table(
    "samples",
    metadata,
    Column("job", BigInteger, primary_key=True, autoincrement=False),
    Column("sample", BigInteger, primary_key=True, autoincrement=False),
    Column("id", Text, nullable=False),
    Column("unit", Integer),
    Column("row_start", BigInteger, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("status", SmallInteger, nullable=False),
    Column("reason", Text),
    Column("attempts", Integer, nullable=False),
    Column("worker", Text),
    Column("next_token", Integer, nullable=False),
    Column("digest", Unsigned64, nullable=False),
    ForeignKeyConstraint(["job", "unit"], ["units.job", "units.unit"]),
)
Index("ix_samples_unit", samples.c.job, samples.c.unit, samples.c.row_start, samples.c.sample)
Index("ix_samples_status", samples.c.job, samples.c.status, samples.c.sample)
Index(
    "ix_samples_reason",
    samples.c.job,
    samples.c.status,
    samples.c.reason,
    sqlite_where=samples.c.reason.is_not(None),
    postgresql_where=samples.c.reason.is_not(None),
)

shard_objects = Table(
    "shard_objects",
    metadata,
    Column("job", BigInteger, primary_key=True, autoincrement=False),
    Column("key", Text, primary_key=True),
    Column("unit", Integer, nullable=False),
    Column("nbytes", BigInteger, nullable=False),
    ForeignKeyConstraint(["job", "unit"], ["units.job", "units.unit"]),
)
Index("ix_shard_objects_unit", shard_objects.c.job, shard_objects.c.unit)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("key", Text, primary_key=True),
    Column("request_hash", Text, nullable=False),
    Column("job", Text, nullable=False),
    Column("at", Double, nullable=False),
)

workers = Table(
    "workers",
    metadata,
    Column("name", Text, primary_key=True),
    Column("url", Text, nullable=False),
    Column("dumps", JSON, nullable=False),
    Column("requests_per_second", Double),
    Column("draining", Boolean, nullable=False),
    Column("api_key", Text),
)

# Append-only: ids are never given out twice, so a reader that resumes after one misses nothing.
events = Table(
    "events",
    metadata,
    Column("id", AutoNumber, primary_key=True),
    Column("job", Text),
    Column("name", Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("data", JSON, nullable=False),
    Index("ix_events_job", "job", "id"),
    sqlite_autoincrement=True,
)
