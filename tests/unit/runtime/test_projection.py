"""The store's `samples/*`: only what changed is written, an error is made up for, and no job is over before it is there."""

import pytest
from statetap.core.records import JobState, SampleStatus
from statetap.ports import StoreError, StoreFull
from statetap.runtime import projection
from statetap.telemetry import events

from tests.fakes.clock import settle
from tests.fakes.harness import STORE, FakeWorker, World, running
from tests.fakes.inference import Hang

STORED, PENDING = SampleStatus.STORED, SampleStatus.PENDING


@pytest.fixture
def runs_of_two(monkeypatch):
    monkeypatch.setattr(projection, "SAMPLES_PER_RUN", 2)


def writes(world):
    """The first sample of every run that is written from now on."""
    written = []
    write = world.store.write_samples

    async def write_and_tell(location, columns):
        written.append((columns.first, len(columns.ids)))
        await write(location, columns)

    world.store.write_samples = write_and_tell
    return written


async def test_only_runs_with_news_are_written(runs_of_two):
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker, projection_seconds=5) as world:
        written = writes(world)
        job = await world.submit(8, 8, 8, 8, 8)
        assert written == [(0, 2), (2, 2), (4, 1)]
        written.clear()
        worker.client.script.append(worker.client.default)
        worker.client.script.append(Hang())
        worker.client.wake()
        await settle()
        await world.passes(5)
        assert world.statuses(job) == [STORED, STORED, PENDING, PENDING, PENDING]
        assert written == [(0, 2)]
        assert world.store.groups[STORE].statuses == world.statuses(job)
        await world.passes(20)
        assert written == [(0, 2)]


async def test_the_columns_are_the_ledgers():
    async with running(FakeWorker("a")) as world:
        job = await world.submit(3, 5)
        columns, samples = world.store.groups[STORE].columns, world.ledger.jobs_by_id[job].samples
        for index in (0, 1):
            sample = samples[index]
            assert (columns["id"][index], columns["row_start"][index], columns["length"][index]) == (
                sample.id,
                sample.row_start,
                sample.length,
            )
            assert (columns["next_token"][index], columns["digest"][index]) == (7, sample.digest)
        assert samples[0].digest != samples[1].digest != 0


async def test_a_job_is_over_only_once_the_store_says_what_the_ledger_says():
    async with running(FakeWorker("a")) as world:
        seen = []
        set_state = world.ledger.set_job_state

        async def look(job, state, *arguments, **named):
            if state is JobState.COMPLETED:
                seen.append(list(world.store.groups[STORE].statuses))
            return await set_state(job, state, *arguments, **named)

        world.ledger.set_job_state = look
        await world.submit(8, 8)
        assert seen == [[STORED, STORED]]


@pytest.mark.parametrize("error", [StoreFull("no space left"), RuntimeError("a bug")])
async def test_a_job_whose_last_projection_failed_is_over_when_it_succeeds(error):
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker, projection_seconds=5) as world:
        job = await world.submit(8)
        world.store.fail_once("write_samples", error)
        world.store.fail_once("write_samples", error)
        worker.client.wake()
        await settle()
        assert (await world.job(job)).state is JobState.RUNNING
        await world.passes(5)
        assert len(world.logged(events.PROJECTION_FAILED)) == 2
        assert (await world.job(job)).state is JobState.RUNNING
        await world.passes(5)
        assert (await world.job(job)).state is JobState.COMPLETED
        assert world.store.groups[STORE].statuses == [STORED]


async def test_a_cancelled_job_whose_projection_failed_is_over_when_it_succeeds():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker, projection_seconds=5) as world:
        job = await world.submit(8)
        world.store.fail_once("write_samples", StoreError("read-only"))
        assert (await world.desk.cancel(job)).record.state is JobState.CANCELLING
        await world.passes(5)
        assert (await world.job(job)).state is JobState.CANCELLED
        assert world.store.groups[STORE].statuses == [SampleStatus.CANCELLED]


async def test_it_is_rebuilt_at_the_start():
    worker = FakeWorker("a")
    worker.client.script.extend([worker.client.default, Hang()])
    world = World(worker)
    await world.start()
    job = await world.submit(8, 8)
    await world.kill()
    assert world.store.groups[STORE].statuses == [PENDING, PENDING]
    worker.client.script.append(Hang())
    await world.start()
    await world.passes(5)
    assert world.store.groups[STORE].statuses == world.statuses(job) == [STORED, PENDING]
    await world.stop()


async def test_a_start_survives_a_store_that_fails():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    world = World(worker)
    await world.start()
    job = await world.submit(8)
    await world.ledger.set_job_state(job, JobState.CANCELLING, None, at=0.0)
    await world.kill()
    world.store.fail_once("describe", StoreError("the disk is away"))
    world.store.fail_once("write_samples", StoreError("the disk is away"))
    await world.start()
    assert (await world.job(job)).state is JobState.CANCELLING
    await world.passes(10)
    assert (await world.job(job)).state is JobState.CANCELLED
    await world.stop()


async def test_the_last_state_is_written_at_a_stop():
    worker = FakeWorker("a")
    worker.client.script.extend([worker.client.default, Hang()])
    async with running(worker) as world:
        job = await world.submit(8, 8)
        assert world.store.groups[STORE].statuses == [PENDING, PENDING]
        await world.stop()
        assert world.store.groups[STORE].statuses == world.statuses(job) == [STORED, PENDING]


async def test_a_slow_store_is_written_less_often():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker, projection_seconds=5) as world:
        job = await world.submit(8)
        write = world.store.write_samples

        async def slowly(location, columns):
            await world.clock.sleep(3)
            await write(location, columns)

        world.store.write_samples = slowly
        world.course.projector.mark(await world.job(job))
        await world.passes(8)
        world.store.write_samples = write
        written = writes(world)
        world.course.projector.mark(await world.job(job))
        await world.passes(29)
        assert written == []
        await world.passes(1)
        assert written == [(0, 1)]
