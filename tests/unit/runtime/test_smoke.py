from statetap.core.records import JobState
from tests.fakes.harness import FakeWorker, running

async def test_it():
    async with running(FakeWorker("a"), FakeWorker("b")) as world:
        job = await world.submit(3, 5, 2, 6, 20)
        print((await world.job(job)), world.events(job), world._capture.entries)
        assert (await world.job(job)).state is JobState.COMPLETED
        world.assert_stored(job)
        assert world.held_dumps == []
