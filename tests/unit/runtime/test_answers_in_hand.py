"""The next request leaves before the answers of the last one are taken, and no answer that is in hand is lost by that."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from statetap.core.records import SampleStatus
from statetap.core.requests import RequestName
from statetap.core.worker import WorkerState
from statetap.runtime.turn import Turn
from statetap.telemetry import events

from tests.fakes.clock import settle
from tests.fakes.harness import FakeWorker, World, running
from tests.fakes.inference import Answer, AnswerSome, Hang, Refuse

STORED = SampleStatus.STORED


def on_record(world: World) -> int:
    return sum(map(len, world.answers.kept.values()))


class WatchedWorker(FakeWorker):
    """`arrives` is called whenever a request has reached the worker."""

    arrives: Callable[[], None] = staticmethod(lambda: None)

    async def _on_request(self, samples):
        self.arrives()
        await super()._on_request(samples)


def recorded_at_arrivals(world: World, worker: WatchedWorker) -> list[int]:
    """How many answers are on record when each of the worker's requests reaches it."""
    seen: list[int] = []
    worker.arrives = lambda: seen.append(on_record(world))
    return seen


def at_the_second_request(worker: WatchedWorker, happens: Callable[[], None]) -> None:
    """Let it happen when the second request has arrived: the answers of the first one are still in hand."""

    def arrives() -> None:
        if len(worker.client.requests) == 2:
            happens()

    worker.arrives = arrives


async def submit(world: World) -> str:
    """One unit, of three requests of two samples."""
    return await world.submit(*[2] * 6, rows_per_shard=16)


async def test_the_next_request_is_with_the_worker_before_the_answers_are_on_record():
    worker = WatchedWorker("a")
    async with running(worker, max_batch_tokens=4) as world:
        seen = recorded_at_arrivals(world, worker)
        job = await submit(world)
        assert seen == [0, 0, 2]
        assert world.statuses(job) == [STORED] * 6
        world.assert_stored(job)


async def test_the_answers_are_taken_while_the_next_request_is_in_flight():
    worker = FakeWorker("a")
    worker.client.script.extend([Answer(), Hang()])
    async with running(worker, max_batch_tokens=4) as world:
        await submit(world)
        assert [len(request) for request in worker.client.requests] == [2, 2]
        assert on_record(world) == 2
        assert [RequestName.parse(sample.rid).sample for sample in worker.client.prepared[-1]] == [4, 5]


@pytest.mark.parametrize(("first", "recorded"), [(AnswerSome((0,)), 1), (Refuse(500), 0)])
async def test_where_anything_failed_that_comes_first(first, recorded):
    worker = WatchedWorker("a")
    worker.client.script.append(first)
    async with running(worker, max_batch_tokens=4) as world:
        seen = recorded_at_arrivals(world, worker)
        await submit(world)
        assert [len(request) for request in worker.client.requests[:2]] == [2, 2]
        assert seen[:2] == [0, recorded]


async def test_where_requests_are_rationed_no_answer_waits_for_the_next_one():
    worker = WatchedWorker("a")
    ports = worker.connect()
    worker.connect = lambda: replace(ports, requests_per_second=1e9)
    async with running(worker, max_batch_tokens=4) as world:
        seen = recorded_at_arrivals(world, worker)
        await submit(world)
        assert seen == [0, 2, 4]


async def test_answers_in_hand_are_recorded_when_the_worker_is_taken_away():
    worker, other = WatchedWorker("a"), FakeWorker("b")
    worker.client.script.extend([Answer(), Hang()])
    other.client.up = False
    async with running(worker, other, max_batch_tokens=4) as world:
        driver = next(driver for driver in world.pool.drivers if driver.name == "a")

        def taken_away() -> None:
            driver.drain()
            driver.turn.cancel()

        at_the_second_request(worker, taken_away)
        job = await submit(world)
        assert len(world.answers.kept[job, 0]) == 2
        other.client.up = True
        await world.passes(10)
        assert world.statuses(job) == [STORED] * 6
        assert sorted(RequestName.parse(rid).sample for rid in other.asked) == [2, 3, 4, 5]
        world.assert_stored(job)


async def test_answers_in_hand_are_recorded_when_the_service_stops(monkeypatch):
    # The loop has this to do first.
    monkeypatch.setattr(Turn, "_meanwhile", lambda turn, following: None)
    worker = WatchedWorker("a")
    worker.client.script.extend([Answer(), Hang()])
    async with running(worker, max_batch_tokens=4) as world:
        stopping: list[asyncio.Task[None]] = []
        at_the_second_request(worker, lambda: stopping.append(asyncio.create_task(world.course.dispatcher.stop(0.0))))
        job = await submit(world)
        await stopping[0]
        assert len(world.answers.kept[job, 0]) == 2
        await world.stop()
        await world.start()
        assert world.statuses(job) == [STORED] * 6
        assert len(world.logged(events.CAPTURE_ADOPTED)) == 2
        world.assert_stored(job)


async def test_a_kill_before_answers_are_on_record_stores_nothing_of_them():
    worker = WatchedWorker("a")
    worker.client.script.extend([Answer(), Hang()])
    world = World(worker, max_batch_tokens=4)
    await world.start()
    record, killing = world.answers.record, []

    def killed_instead(*_: object) -> None:
        world.answers.record = lambda *_: None
        killing.append(asyncio.create_task(world.kill()))

    world.answers.record = killed_instead
    job = await submit(world)
    await killing[0]
    world.answers.record = record
    assert on_record(world) == 0
    assert len(world.held_dumps) == 4
    await world.start()
    assert world.statuses(job) == [STORED] * 6
    assert world.logged(events.CAPTURE_ADOPTED) == []
    assert len(worker.asked) == 4 + 6
    assert world.held_dumps == []
    world.assert_stored(job)
    await world.stop()


async def test_an_answer_that_cannot_be_recorded_lets_the_request_in_flight_end_and_gives_the_unit_back():
    worker = WatchedWorker("a")
    worker.client.script.extend([Answer(), Hang()])

    async with running(worker, max_batch_tokens=4) as world:
        record = world.answers.record

        def refuse_once(*_: object) -> None:
            world.answers.record = record
            raise OSError(28, "No space left on device")

        def breaks() -> None:
            world.answers.record = refuse_once

        at_the_second_request(worker, breaks)
        job = await submit(world)
        (driver,) = world.pool.drivers
        assert driver.machine.state is WorkerState.BUSY
        assert world.logged(events.UNIT_GIVEN_BACK) == []
        worker.client.wake()
        await settle()
        assert len(world.logged(events.UNIT_CRASHED)) == 1
        assert world.logged(events.UNIT_GIVEN_BACK)[0]["reason"] == "OSError: [Errno 28] No space left on device"
        await world.passes(10)
        assert world.logged(events.WORKER_SUSPECT) == []
        assert world.statuses(job) == [STORED] * 6
        assert world.held_dumps == []
        world.assert_stored(job)
