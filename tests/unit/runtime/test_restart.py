"""Killed or stopped, and started again: what was answered and published is used, the rest is asked for, nothing is left lying."""

import asyncio
from dataclasses import replace

import pytest
from statetap.core.records import JobState, SampleStatus, UnitState
from statetap.core.reservation import unit_dump_bytes
from statetap.ports import StoreError
from statetap.telemetry import events

from tests.fakes.clock import settle
from tests.fakes.harness import ARRAYS, TAP, FakeWorker, World, running
from tests.fakes.inference import Hang

STORED, PENDING = SampleStatus.STORED, SampleStatus.PENDING


async def half_done(*lengths, hang_at=2):
    """A world in which the request number `hang_at` of a job's one unit hangs; those before were answered and published."""
    worker = FakeWorker("a")
    world = World(worker)
    await world.start()
    for _ in range(hang_at):
        worker.client.script.append(worker.client.default)
    worker.client.script.append(Hang())
    job = await world.submit(*lengths)
    assert len(worker.asked) == hang_at + 1
    return world, worker, job


async def test_after_a_kill_what_was_captured_is_not_asked_for_again():
    world, worker, job = await half_done(2, 3, 2)
    before = list(worker.asked)
    await world.kill()
    await world.start()
    assert world.statuses(job) == [STORED] * 3
    world.assert_stored(job)
    assert len(worker.asked) == len(before) + 1
    assert sorted(line["sample"] for line in world.logged(events.CAPTURE_ADOPTED)) == [0, 1]
    assert world.held_dumps == []
    assert world.answers.kept == {}
    await world.stop()


async def test_answers_that_a_kill_left_after_a_commit_are_forgotten():
    world, _, job = await half_done(2, 3, 2)
    await world.kill()
    world.answers.kept["committed", 0] = list(world.answers.kept[job, 0])
    await world.start()
    assert world.answers.kept == {}
    assert len(world.logged(events.CAPTURE_ADOPTED)) == 2
    await world.stop()


async def test_a_recalled_answer_without_its_dump_is_asked_for_again():
    world, worker, job = await half_done(2, 3, 2)
    await world.kill()
    del worker.source._dumps["req_2"]
    await world.start()
    assert [line["sample"] for line in world.logged(events.CAPTURE_ADOPTED)] == [0]
    assert world.statuses(job) == [STORED] * 3
    assert worker.asked_lengths[-2:] == [3, 2]
    await world.stop()


async def test_a_dump_without_its_answer_is_asked_for_again_and_released():
    world, worker, job = await half_done(2, 3, 2)
    worker.publish = worker.publish_nothing
    worker.put(worker.client.requests[2][0])
    await world.kill()
    worker.publish = worker.publish_whole
    await world.start()
    assert world.statuses(job) == [STORED] * 3
    assert worker.asked_lengths[3:] == [2]
    assert world.held_dumps == []
    await world.stop()


async def test_parked_dumps_count_as_held_until_their_unit_is_committed():
    world, worker, job = await half_done(2, 3, 2)
    await world.kill()
    held = sum(dump.facts.nbytes for dump in worker.source._dumps.values())
    worker.client.up = False
    await world.start()
    assert world.pool.list()[0].dump_bytes == held > 0
    assert len(world.held_dumps) == 3
    worker.client.up = True
    await world.passes(5)
    assert world.statuses(job) == [STORED] * 3
    assert world.pool.list()[0].dump_bytes == 0
    await world.stop()


async def test_dumps_recalled_from_another_worker_stay_counted_there():
    a, b = FakeWorker("a"), FakeWorker("b")
    b.client.up = False
    world = World(a, b)
    await world.start()
    a.client.script.extend([a.client.default, Hang()])
    job = await world.submit(2, 3)
    await world.kill()
    a.client.up, b.client.up = False, True
    b.client.script.append(Hang())
    held = sum(dump.facts.nbytes for dump in a.source._dumps.values() if dump.facts.rid.endswith("-0-1-1"))
    await world.start()
    await b.client.hanging.wait()
    (view_a, view_b) = world.pool.list()
    assert view_a.dump_bytes >= held > 0
    assert view_b.dump_bytes > 0
    b.client.wake()
    await settle()
    assert world.statuses(job) == [STORED, STORED]
    assert [view.dump_bytes for view in world.pool.list()] == [0, 0]
    await world.stop()


async def test_parked_dumps_of_a_cancelled_job_are_released_and_their_room_is_used():
    world, worker, job = await half_done(2, 3, 2)
    await world.desk.pause(job)
    await world.kill()
    await world.start()
    assert len(world.held_dumps) == 3
    worker.client.script.clear()
    await world.desk.cancel(job)
    assert world.held_dumps == []
    assert world.statuses(job) == [SampleStatus.CANCELLED] * 3
    assert world.pool.list()[0].dump_bytes == 0
    await world.stop()


async def test_room_that_a_cancelled_job_had_parked_wakes_whoever_waits_for_it():
    unit_bytes = unit_dump_bytes([8], ARRAYS, None)
    worker = FakeWorker("a", replace(TAP, budget_bytes=-(-unit_bytes * 10 // 9)))
    world = World(worker)
    await world.start()
    worker.client.script.append(Hang())
    job = await world.submit(8)
    await world.desk.pause(job)
    await world.kill()
    await world.start()
    other = await world.submit(8, store="other")
    assert world.statuses(other) == [PENDING]
    await world.desk.cancel(job)
    await settle()
    assert world.statuses(other) == [STORED]
    await world.stop()


async def test_a_dump_of_a_committed_unit_is_a_stray():
    worker = FakeWorker("a")
    world = World(worker)
    await world.start()
    job = await world.submit(2)
    await world.kill()
    # The kill came after the commit and before the release.
    worker.put(worker.client.requests[0][0])
    await world.start()
    assert world.held_dumps == []
    assert len(worker.asked) == 1
    assert world.statuses(job) == [STORED]
    await world.stop()


async def test_a_graceful_stop_leaves_leases_dumps_and_answers_to_the_next_start():
    world, worker, job = await half_done(2, 3, 2)
    await world.stop()
    assert len(await world.ledger.units(job, UnitState.LEASED)) == 1
    assert {"a/req_1", "a/req_2"} <= set(world.held_dumps)
    assert len(world.answers.kept[job, 0]) == 2
    await world.start()
    assert world.statuses(job) == [STORED] * 3
    assert len(worker.asked) == 4
    await world.stop()


async def test_a_stop_waits_for_what_is_in_flight_within_its_limit():
    world, worker, job = await half_done(2, 3, 2)
    stopping = asyncio.ensure_future(world.stop(drain_seconds=10))
    await settle()
    assert not stopping.done()
    worker.client.wake()
    await world.passes(0.1)
    assert stopping.done()
    # All captures were there, so the unit was written and committed on the way down, and its commit's event with it.
    assert world.statuses(job) == [STORED] * 3
    assert events.UNIT_COMMITTED in world.events(job)


async def test_a_stop_asks_for_nothing_more():
    world, worker, _ = await half_done(2, 3, 2, 4, 5)
    stopping = asyncio.ensure_future(world.stop(drain_seconds=10))
    await settle()
    worker.client.wake()
    await world.passes(0.2)
    assert stopping.done()
    assert len(worker.asked) == 3


async def test_a_stop_gives_up_waiting_at_its_limit():
    world, _, _ = await half_done(2, 3, 2)
    stopping = asyncio.ensure_future(world.stop(drain_seconds=10))
    await world.passes(9.8)
    assert not stopping.done()
    await world.passes(0.4)
    assert stopping.done()


async def test_a_stop_survives_a_store_that_fails():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    world = World(worker)
    await world.start()
    job = await world.submit(2)
    world.course.projector.mark(await world.job(job))
    world.store.fail_once("write_samples", StoreError("read-only"))
    await world.stop()
    assert worker.client.closed
    assert world.logged(events.PROJECTION_FAILED)


async def test_a_service_that_could_not_start_can_be_stopped():
    world = World(FakeWorker("a"))

    async def no_ledger(owner):
        raise RuntimeError("the ledger is broken")

    world.ledger.take_over = no_ledger
    with pytest.raises(RuntimeError, match="the ledger is broken"):
        await world.begin()
    await world.stop()


async def test_a_job_that_was_being_prepared_is_prepared_again():
    worker = FakeWorker("a")
    world = World(worker)
    await world.start()
    dataset = await world.dataset(2, 3)
    world.course.preparation.begin = lambda job: None
    job = await world.submit(dataset=dataset)
    assert (await world.job(job)).state is JobState.PLANNING
    await world.kill()
    await world.start()
    assert world.statuses(job) == [STORED, STORED]
    await world.stop()


async def test_a_job_whose_last_unit_was_committed_before_the_kill_ends_at_the_start():
    world, worker, job = await half_done(2, hang_at=0)

    async def killed_here(*_, **__):
        raise RuntimeError("killed before it was said that the job is over")

    world.states.move = killed_here
    worker.client.wake()
    await settle()
    assert world.statuses(job) == [STORED]
    assert (await world.job(job)).state is JobState.RUNNING
    await world.kill()
    await world.start()
    assert (await world.job(job)).state is JobState.COMPLETED
    await world.stop()


async def test_a_job_that_was_being_cancelled_is_cancelled_at_the_start():
    world, worker, job = await half_done(2, 3, 2)
    await world.ledger.set_job_state(job, JobState.CANCELLING, None, at=0.0)
    await world.kill()
    worker.client.script.clear()
    await world.start()
    assert (await world.job(job)).state is JobState.CANCELLED
    assert world.statuses(job) == [SampleStatus.CANCELLED] * 3
    assert world.held_dumps == []
    await world.stop()


async def test_what_workers_did_is_known_after_a_restart():
    async with running(FakeWorker("a")) as world:
        job = await world.submit(2, 3, 8)
        before = (await world.desk.view(job)).workers
        assert (before["a"].stored, before["a"].attempts) == (3, 3)
        await world.stop()
        await world.start()
        assert (await world.desk.view(job)).workers == before
