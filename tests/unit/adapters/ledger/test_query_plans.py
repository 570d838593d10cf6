"""No question that is asked per lease, per commit or per progress line may read a table from end to end, or sort one."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest
from sqlalchemy import event
from statetap.adapters.ledger import SqlLedger
from statetap.core.records import SampleStatus, ShardObject
from statetap.ports import IdempotencyKey

from tests.contract.ledgers.plan import SAMPLES, UNITS, dataset, failed, job, lease, stored


@pytest.fixture
async def ledger(tmp_path):
    made = SqlLedger(f"sqlite:///{tmp_path}/ledger.db")
    await made.open()
    await made.add_dataset(dataset())
    await made.add_job(job(), UNITS, SAMPLES)
    yield made
    await made.close()


@pytest.fixture
def plans(ledger, tmp_path):
    """Once called: SQLite's plan of every statement that the ledger has run since the test began."""
    asked = []

    def note(connection, cursor, statement, parameters, context, executemany):
        if statement.startswith(("SELECT", "UPDATE", "DELETE")):
            asked.append((statement, parameters[0] if executemany else parameters))

    def explain():
        with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection:
            return [
                (statement, row[-1])
                for statement, parameters in asked
                for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
            ]

    event.listen(ledger._db.engine, "before_cursor_execute", note)
    return explain


QUESTIONS = {
    "lease": lambda ledger: ledger.lease_unit("job", "me", now=0.0, ttl_seconds=1),
    "peek": lambda ledger: ledger.peek_unit("job", now=0.0),
    "renew": lambda ledger: ledger.renew_leases("me", now=0.0, ttl_seconds=1),
    "job": lambda ledger: ledger.job("job"),
    "unit samples": lambda ledger: ledger.unit_samples("job", 1),
    "samples": lambda ledger: ledger.samples("job", status=None, limit=10, cursor="c2FtcGxlczox"),
    "samples by status": lambda ledger: ledger.samples("job", status=SampleStatus.FAILED, limit=10, cursor="c2FtcGxlczox"),
    "range": lambda ledger: ledger.sample_columns("job", 1, 2),
    "events": lambda ledger: ledger.events("job", after=3, limit=10),
    "jobs": lambda ledger: ledger.jobs(limit=10, cursor="am9iczox"),
    "idempotent": lambda ledger: ledger.idempotent(IdempotencyKey("key", "hash")),
}


def require_indexed(plans):
    assert plans
    for statement, step in plans:
        assert not step.startswith("SCAN"), (step, statement)
        assert "TEMP B-TREE" not in step, (step, statement)


@pytest.mark.parametrize("question", QUESTIONS)
async def test_a_question_goes_through_an_index(ledger, plans, question):
    await QUESTIONS[question](ledger)
    require_indexed(plans())


async def test_a_commit_goes_through_indexes(ledger, plans):
    held = await lease(ledger)
    thing = ShardObject(key="aux/c/0", nbytes=1)
    await ledger.commit_unit(held, [stored(3), failed(0)], [thing], bytes_stored=5, at=1.0)
    require_indexed(plans())


async def test_failures_read_the_index_of_reasons_alone(ledger, plans):
    await ledger.failures("job")
    assert any("COVERING INDEX ix_samples_reason" in step for _, step in plans())


async def test_a_units_members_come_from_an_index_alone(ledger, plans):
    await lease(ledger)
    assert any("COVERING INDEX ix_samples_unit" in step for _, step in plans())
