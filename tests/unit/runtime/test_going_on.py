"""At the end of a unit a worker goes on by itself with what is ready for it, while the dispatcher sees to others."""

import asyncio

from statetap.core.records import SampleStatus
from statetap.core.requests import RequestName
from statetap.telemetry import events

from tests.fakes.clock import settle
from tests.fakes.harness import FakeWorker, running
from tests.fakes.inference import Hang

STORED, PENDING = SampleStatus.STORED, SampleStatus.PENDING


def stop_dispatching(world):
    """As if it was with the ledger, about another worker, from here on."""
    world.course.dispatcher._tasks[0].cancel()


async def test_a_worker_goes_on_with_what_was_leased_ahead_while_others_are_seen_to():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker) as world:
        job = await world.submit(8, 8, 8)
        stop_dispatching(world)
        worker.client.wake()
        await settle()
        assert [RequestName.parse(rid).unit for rid in worker.asked] == [0, 1]
        assert world.statuses(job) == [STORED, STORED, PENDING]


async def test_a_worker_does_not_go_on_by_itself_where_a_more_urgent_job_might_be_leased():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker) as world:
        await world.submit(8, 8, store="s0")
        stop_dispatching(world)
        await world.submit(8, store="s1", priority=9)
        worker.client.wake()
        await settle()
        assert len(worker.asked) == 1


async def test_what_a_worker_went_on_with_is_not_withdrawn():
    a, b = FakeWorker("a"), FakeWorker("b")
    a.client.default = b.client.default = Hang()
    async with running(a, b) as world:
        job = await world.submit(*[8] * 4)
        recorded, give_back = asyncio.Event(), world.ledger.give_back

        async def give_back_slowly(lease):
            await recorded.wait()
            await give_back(lease)

        world.ledger.give_back = give_back_slowly
        await world.desk.pause(job)
        await settle()
        await world.desk.resume(job)
        b.client.wake()
        await settle()
        assert [RequestName.parse(rid).unit for rid in b.asked] == [1, 3]
        recorded.set()
        await settle()
        assert [line["unit"] for line in world.logged(events.UNIT_GIVEN_BACK)] == [2]


async def test_a_worker_does_not_go_on_with_a_job_that_was_paused():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker) as world:
        job = await world.submit(8, 8)
        stop_dispatching(world)
        await world.desk.pause(job)
        worker.client.wake()
        await settle()
        assert len(worker.asked) == 1
