"""Jobs: taken whole or not at all, listed, and their states."""

from __future__ import annotations

from dataclasses import replace

import pytest
from statetap.core.records import JobState, SampleStatus
from statetap.ports import LedgerError, NotFound

from tests.contract.ledgers.plan import AT_START, SAMPLES, SPEC, UNITS, job, pages, sample, samples_of, unit


async def test_a_job_comes_back_whole_with_counts_of_its_own(planned):
    assert await planned.job("job") == job(counts=AT_START)
    assert await planned.units("job") == UNITS
    assert await samples_of(planned) == SAMPLES


@pytest.mark.parametrize(
    ("units", "samples"),
    [
        (UNITS, SAMPLES[:-2]),
        (UNITS, [*SAMPLES, sample(5, 1, 96)]),
        (UNITS[:1], SAMPLES),
        (UNITS, [*SAMPLES[:-1], sample(4, None)]),
        (UNITS, [*SAMPLES[:-1], sample(4, None, status=SampleStatus.SKIPPED)]),
    ],
    ids=["sample missing", "sample too many", "unit missing", "pending nowhere", "skipped for no reason"],
)
async def test_a_plan_that_contradicts_itself_leaves_nothing(ledger, units, samples):
    with pytest.raises(LedgerError):
        await ledger.add_job(job(), units, samples)
    with pytest.raises(NotFound):
        await ledger.job("job")
    await ledger.add_job(job(), UNITS, SAMPLES)


async def test_a_sample_that_comes_twice_is_refused(ledger):
    twice = [unit(0, (3, 3)), UNITS[1]]
    with pytest.raises(LedgerError):
        await ledger.add_job(job(), twice, [*SAMPLES[1:], sample(3, 0, 32)])


async def test_a_job_needs_an_id_of_its_own_and_a_dataset(planned):
    with pytest.raises(LedgerError, match="already"):
        await planned.add_job(job(), UNITS, SAMPLES)
    with pytest.raises(NotFound, match="'other'"):
        await planned.add_job(job("second", spec=replace(SPEC, dataset="other")), UNITS, SAMPLES)


async def test_jobs_are_listed_newest_first_by_state(ledger):
    for number in range(5):
        state = JobState.PAUSED if number % 2 else JobState.RUNNING
        await ledger.add_job(job(f"job-{number}", state=state), [], [])
    items, sizes = await pages(ledger.jobs)
    assert [j.id for j in items] == ["job-4", "job-3", "job-2", "job-1", "job-0"]
    assert sizes == [2, 2, 1]
    items, sizes = await pages(ledger.jobs, states=[JobState.PAUSED, JobState.FAILED])
    assert [j.id for j in items] == ["job-3", "job-1"]
    assert sizes == [2]


async def test_states_and_the_times_that_go_with_them(planned):
    assert (await planned.set_job_state("job", JobState.RUNNING, None, at=10.0)).started_at == 10.0
    paused = await planned.set_job_state("job", JobState.PAUSED, "no space", at=11.0)
    assert (paused.state, paused.reason, paused.finished_at) == (JobState.PAUSED, "no space", None)
    again = await planned.set_job_state("job", JobState.RUNNING, None, at=12.0)
    assert (again.reason, again.started_at) == (None, 10.0)
    done = await planned.set_job_state("job", JobState.COMPLETED, None, at=13.0)
    assert (done.started_at, done.finished_at) == (10.0, 13.0)
    assert await planned.job("job") == done
    assert (await planned.set_job_state("job", JobState.RUNNING, None, at=14.0)).finished_at is None


async def test_an_unknown_job_is_not_found(ledger):
    for asked in (
        ledger.job("no"),
        ledger.set_job_state("no", JobState.RUNNING, None, at=0.0),
        ledger.append_units("no", [], [], state=JobState.PLANNING, at=0.0),
        ledger.peek_unit("no", now=0.0),
        ledger.lease_unit("no", "me", now=0.0, ttl_seconds=1.0),
        ledger.cancel_pending("no", at=0.0),
        ledger.units("no"),
        ledger.unit_samples("no", 0),
        ledger.samples("no", status=None, limit=1, cursor=None),
        ledger.sample_columns("no", 0, 1),
        ledger.failures("no"),
    ):
        with pytest.raises(NotFound, match="'no'"):
            await asked
