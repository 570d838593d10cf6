"""A store's disk that runs low pauses the jobs that write there, and they go on by themselves."""

from statetap.core.records import JobState, SampleStatus
from statetap.ports import StoreFull
from statetap.runtime.jobs import PAUSED_BY_HAND
from statetap.telemetry import events

from tests.fakes.harness import FakeWorker, running
from tests.fakes.inference import Hang

STORED = SampleStatus.STORED
RESERVE = 1000
LOW, ENOUGH = RESERVE - 1, RESERVE * 2


def watched(*workers, **settings):
    return running(*workers, disk_reserve_bytes=RESERVE, disk_probe_seconds=5.0, **settings)


async def low_in_mid_job(world):
    """A job of two units of which the first is with its worker while the disk runs low; returns it, paused."""
    world.workers["a"].client.script.append(Hang())
    job = await world.submit(8, 8)
    world.store.free = LOW
    await world.passes(5)
    return job


async def test_a_job_pauses_below_the_reserve_and_goes_on_by_itself():
    async with watched(FakeWorker("a")) as world:
        job = await low_in_mid_job(world)
        paused = await world.job(job)
        assert paused.state is JobState.PAUSED
        assert paused.reason is not None
        assert paused.reason.startswith("disk: store has 999 bytes free, less than the reserve of 1,000")
        world.workers["a"].client.wake()
        await world.passes(60)
        assert world.statuses(job) == [STORED, SampleStatus.PENDING]
        world.store.free = ENOUGH
        await world.passes(60)
        assert world.statuses(job) == [STORED, STORED]
        world.assert_stored(job)
        assert [line["log_level"] for line in world.logged(events.JOB_PAUSED)] == ["warning"]
        assert len(world.logged(events.JOB_RESUMED)) == 1


async def test_a_little_more_than_the_reserve_is_not_enough_to_go_on():
    async with watched(FakeWorker("a")) as world:
        job = await low_in_mid_job(world)
        world.store.free = RESERVE
        await world.passes(10)
        assert (await world.job(job)).state is JobState.PAUSED


async def test_a_job_that_was_paused_by_the_disk_goes_on_after_a_restart():
    async with watched(FakeWorker("a")) as world:
        job = await low_in_mid_job(world)
        await world.stop()
        await world.start()
        assert (await world.job(job)).state is JobState.PAUSED
        world.store.free = ENOUGH
        await world.passes(60)
        assert world.statuses(job) == [STORED, STORED]


async def test_who_pauses_last_says_when_it_goes_on():
    async with watched(FakeWorker("a")) as world:
        job = await low_in_mid_job(world)
        assert (await world.desk.pause(job)).record.reason == PAUSED_BY_HAND
        world.store.free = ENOUGH
        await world.passes(60)
        assert (await world.job(job)).state is JobState.PAUSED
        world.workers["a"].client.wake()
        await world.desk.resume(job)
        await world.passes(60)
        assert world.statuses(job) == [STORED, STORED]


async def test_a_store_without_a_file_system_of_its_own_pauses_nothing():
    async with watched(FakeWorker("a")) as world:
        world.workers["a"].client.script.append(Hang())
        job = await world.submit(8)
        world.store.free = None
        await world.passes(5)
        assert (await world.job(job)).state is JobState.RUNNING


async def test_a_disk_that_fills_in_mid_shard_loses_nothing():
    async with watched(FakeWorker("a")) as world:
        world.writer.fail_once("write", StoreFull("no space left"))
        job = await world.submit(8)
        world.store.free = LOW
        await world.passes(5)
        asked = len(world.workers["a"].asked)
        assert asked == 1
        world.store.free = ENOUGH
        await world.passes(120)
        assert world.statuses(job) == [STORED]
        assert len(world.workers["a"].asked) == asked
