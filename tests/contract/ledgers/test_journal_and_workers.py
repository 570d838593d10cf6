"""Idempotency keys, workers and events."""

from __future__ import annotations

from dataclasses import replace

import pytest
from statetap.core.records import WorkerRecord
from statetap.ports import IdempotencyConflict, IdempotencyKey, NotFound

from tests.contract.ledgers.plan import job


async def test_an_idempotency_key_stands_for_one_request(ledger):
    key, other = IdempotencyKey("key", "hash"), IdempotencyKey("key", "other")
    assert await ledger.idempotent(key) is None
    await ledger.add_job(job("job"), [], [], key=key)
    assert await ledger.idempotent(key) == "job"
    for refused in (
        ledger.idempotent(other),
        ledger.add_job(job("job-2"), [], [], key=other),
        ledger.add_job(job("job-2"), [], [], key=key),
    ):
        with pytest.raises(IdempotencyConflict, match="'key'"):
            await refused
    assert [j.id for j in (await ledger.jobs(limit=9, cursor=None)).items] == ["job"]


async def test_workers_are_added_replaced_and_deleted(ledger):
    one = WorkerRecord(name="one", url="http://127.0.0.1:1", dumps={"kind": "plain", "names": ["a", None], "chunk": 4})
    await ledger.add_worker(replace(one, name="two"))
    await ledger.add_worker(one)
    await ledger.add_worker(replace(one, name="two", draining=True))
    assert await ledger.workers() == [one, replace(one, name="two", draining=True)]
    await ledger.delete_worker("one")
    with pytest.raises(NotFound, match="'one'"):
        await ledger.delete_worker("one")
    assert [w.name for w in await ledger.workers()] == ["two"]


async def test_events_are_read_on_from_any_of_them(ledger):
    ids = [await ledger.append_event(owner, f"e.{n}", {"n": n, "ä": [1.5]}, at=float(n)) for n, owner in enumerate("abaa")]
    ids.append(await ledger.append_event(None, "service.started", {}, at=9.0))
    assert ids == sorted(set(ids))
    events = await ledger.events("a", after=0, limit=10)
    assert [(e.id, e.job, e.name, e.at, e.data) for e in events] == [
        (ids[n], "a", f"e.{n}", float(n), {"n": n, "ä": [1.5]}) for n in (0, 2, 3)
    ]
    assert await ledger.events("a", after=ids[0], limit=1) == events[1:2]
    assert await ledger.events("a", after=ids[-1], limit=10) == []
