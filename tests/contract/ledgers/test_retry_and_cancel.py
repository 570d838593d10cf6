"""Units that come to a job later, and units that never will be written."""

from __future__ import annotations

from dataclasses import replace

import pytest
from statetap.core.records import JobState, SampleStatus, UnitState
from statetap.ports import LeaseLost, LedgerError

from tests.contract.ledgers.plan import AT_START, SAMPLES, failed, lease, sample, samples_of, stored, unit


async def test_failed_samples_are_tried_again_in_units_at_the_end(planned):
    await planned.commit_unit(await lease(planned), [stored(3), failed(0)], [], bytes_stored=9, at=1.0)
    again = await planned.append_units("job", [unit(2, (0,))], [sample(0, 2, 128)], state=JobState.PLANNING, at=2.0)
    assert again == await planned.job("job")
    assert again.state is JobState.PLANNING
    counts = again.counts
    assert (counts.pending, counts.failed, counts.units_total, counts.tokens_total) == (3, 0, 3, AT_START.tokens_total)
    assert await planned.unit_samples("job", 2) == [replace(SAMPLES[0], unit=2, row_start=128, attempts=3)]
    assert [s.sample for s in await planned.unit_samples("job", 0)] == [3]
    assert await planned.failures("job") == {"too long": 1}
    assert [(await lease(planned)).unit.samples for _ in range(2)] == [(1, 2), (0,)]


@pytest.mark.parametrize(
    ("units", "samples"),
    [
        ([unit(2, (3,))], [sample(3, 2, 128)]),
        ([unit(2, (99,))], [sample(99, 2, 128)]),
        ([unit(1, (0,))], [sample(0, 1, 128)]),
        ([unit(2, (0, 3))], [sample(0, 2, 128)]),
        ([unit(2, (0, 0))], [sample(0, 2, 128), sample(0, 2, 144)]),
        ([unit(2, (0,))], [sample(0, 1, 128)]),
        ([], [sample(0, None)]),
    ],
    ids=["not failed", "unknown", "old unit", "sample missing", "twice", "not in the new unit", "nowhere"],
)
async def test_a_wrong_retry_changes_nothing(planned, units, samples):
    await planned.commit_unit(await lease(planned), [stored(3), failed(0)], [], bytes_stored=9, at=1.0)
    before = await planned.job("job"), await planned.units("job"), await samples_of(planned)
    with pytest.raises(LedgerError):
        await planned.append_units("job", units, samples, state=JobState.RUNNING, at=2.0)
    assert (await planned.job("job"), await planned.units("job"), await samples_of(planned)) == before


async def test_cancelling_leaves_what_is_leased_until_it_is_given_back(planned):
    held = await lease(planned)
    await planned.set_job_state("job", JobState.CANCELLING, None, at=1.0)
    counts = await planned.cancel_pending("job", at=1.0)
    assert counts == replace(AT_START, pending=2, cancelled=2)
    assert [u.index for u in await planned.units("job", UnitState.CANCELLED)] == [1]
    cancelled = (await planned.samples("job", status=SampleStatus.CANCELLED, limit=9, cursor=None)).items
    assert [s.sample for s in cancelled] == [1, 2]
    assert all(s.reason for s in cancelled)
    await planned.give_back(held)
    assert (await planned.job("job")).counts == replace(AT_START, pending=0, cancelled=4)
    assert await planned.lease_unit("job", "me", now=500.0, ttl_seconds=1.0) is None
    assert await planned.failures("job") == {"too long": 1}


async def test_cancelling_spares_a_live_lease_but_no_expired_one(planned):
    await lease(planned)
    live = await lease(planned, "you", now=30.0)
    await planned.set_job_state("job", JobState.CANCELLING, None, at=61.0)
    assert (await planned.cancel_pending("job", at=61.0)).cancelled == 2
    assert (await planned.commit_unit(live, [stored(1), stored(2)], [], bytes_stored=1, at=62.0)).stored == 2


async def test_a_lease_that_expires_at_the_very_moment_is_cancelled_with_its_samples(planned):
    held = await lease(planned)
    counts = await planned.cancel_pending("job", at=held.expires_at)
    assert (counts.pending, counts.cancelled) == (0, 4)
    assert [u.index for u in await planned.units("job", UnitState.CANCELLED)] == [0, 1]
    with pytest.raises(LeaseLost):
        await planned.commit_unit(held, [stored(3), stored(0)], [], bytes_stored=1, at=61.0)


async def test_take_over_cancels_what_a_cancelled_job_had_leased(planned):
    await lease(planned, "dead")
    await planned.set_job_state("job", JobState.CANCELLING, None, at=1.0)
    await planned.cancel_pending("job", at=1.0)
    await planned.take_over("me")
    assert (await planned.job("job")).counts == replace(AT_START, pending=0, cancelled=4)
