"""Commits: a unit whole, or nothing of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from statetap.core.records import SampleStatus, ShardObject, UnitState
from statetap.ports import CommitEvent, LeaseLost, LedgerError

from tests.contract.ledgers.plan import AT_START, SAMPLES, UNITS, failed, job, lease, sample, samples_of, stored


async def test_a_commit_records_verdicts_and_counts(planned):
    held = await lease(planned)
    counts = await planned.commit_unit(
        held, [stored(3), failed(0)], [ShardObject(key="aux/c/0", nbytes=4096)], bytes_stored=777, at=5.0
    )
    assert counts == replace(AT_START, pending=2, stored=1, failed=1, tokens_stored=13, bytes_stored=777, units_committed=1)
    assert (await planned.job("job")).counts == counts
    assert await planned.units("job", UnitState.COMMITTED) == [replace(UNITS[0], state=UnitState.COMMITTED)]
    assert await planned.unit_samples("job", 0) == [
        replace(SAMPLES[3], status=SampleStatus.STORED, attempts=1, worker="w", next_token=5, digest=2**64 - 1),
        replace(SAMPLES[0], status=SampleStatus.FAILED, reason="not finite", attempts=3, worker="w"),
    ]
    with pytest.raises(LeaseLost):
        await planned.commit_unit(held, [stored(3), stored(0)], [], bytes_stored=1, at=6.0)
    assert await planned.failures("job") == {"not finite": 1, "too long": 1}


@pytest.mark.parametrize(
    "verdicts",
    [
        [stored(3), stored(0), stored(1)],
        [stored(3), stored(0), stored(99)],
        [stored(3)],
        [stored(3), stored(0), stored(3)],
        [stored(3), stored(0, status=SampleStatus.CANCELLED, reason="no")],
        [stored(3), failed(0, reason=None)],
    ],
    ids=["of another unit", "of no sample", "one missing", "one twice", "no end", "no reason"],
)
async def test_a_commit_with_wrong_verdicts_changes_nothing(planned, verdicts):
    held = await lease(planned)
    with pytest.raises(LedgerError) as refused:
        await planned.commit_unit(held, verdicts, [], bytes_stored=1, at=5.0)
    assert not isinstance(refused.value, LeaseLost)
    assert (await planned.job("job")).counts == AT_START
    assert await samples_of(planned) == SAMPLES
    await planned.commit_unit(held, [stored(3), stored(0)], [], bytes_stored=1, at=5.0)


async def test_an_object_is_recorded_once(planned):
    thing = ShardObject(key="aux/c/0", nbytes=1)
    await planned.commit_unit(await lease(planned), [stored(3), stored(0)], [thing], bytes_stored=1, at=1.0)
    held = await lease(planned)
    with pytest.raises(LedgerError):
        await planned.commit_unit(held, [stored(1), stored(2)], [thing], bytes_stored=1, at=1.0)
    assert (await planned.job("job")).counts.stored == 2


async def test_a_sample_that_had_ended_keeps_its_end_unless_judged(ledger):
    ended = sample(0, 0, 16, status=SampleStatus.SKIPPED, reason="too long")
    await ledger.add_job(job(), UNITS, [ended, *SAMPLES[1:]])
    counts = await ledger.commit_unit(await lease(ledger), [stored(3)], [], bytes_stored=1, at=1.0)
    assert (counts.stored, counts.skipped, counts.pending) == (1, 2, 2)
    assert (await samples_of(ledger))[0] == ended


async def test_a_commit_and_its_event_are_one(planned):
    held = await lease(planned)
    event = CommitEvent("unit.committed", {"unit": 0})
    with pytest.raises(LedgerError):
        await planned.commit_unit(held, [stored(3)], [], bytes_stored=1, at=5.0, event=event)
    assert await planned.events(held.unit.job, after=0, limit=10) == []
    await planned.commit_unit(held, [stored(3), stored(0)], [], bytes_stored=1, at=6.0, event=event)
    (recorded,) = await planned.events(held.unit.job, after=0, limit=10)
    assert (recorded.name, recorded.at, recorded.data) == ("unit.committed", 6.0, {"unit": 0})
