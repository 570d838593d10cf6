"""Who works on what: one request a worker, room reserved before a lease, urgency, and what may never wait for ever."""

from dataclasses import replace

import pytest
from statetap.core.records import JobState, SampleStatus, UnitState
from statetap.core.requests import RequestName
from statetap.core.reservation import unit_dump_bytes
from statetap.telemetry import events

from tests.fakes.clock import settle
from tests.fakes.harness import ARRAYS, TAP, FakeWorker, running
from tests.fakes.inference import Answer, Hang, Refuse

STORED, PENDING = SampleStatus.STORED, SampleStatus.PENDING
UNIT_BYTES = unit_dump_bytes([8], ARRAYS, None)


def worker_with_room(name, units):
    """A worker whose dump directory takes so many units of one sample of 8 rows, and not a byte more."""
    return FakeWorker(name, replace(TAP, budget_bytes=-(-units * UNIT_BYTES * 10 // 9)))


async def test_workers_share_a_job_and_never_have_two_requests():
    # The fake client fails the test on a second request in flight.
    a, b = FakeWorker("a"), FakeWorker("b")
    a.client.script.append(Hang())
    b.client.script.append(Hang())
    async with running(a, b) as world:
        job = await world.submit(*[4] * 12)
        assert (len(a.asked), len(b.asked)) == (1, 1)
        a.client.wake()
        b.client.wake()
        await settle()
        assert world.statuses(job) == [STORED] * 12
        world.assert_stored(job)


async def test_a_unit_is_one_workers_at_a_time():
    a, b = FakeWorker("a"), FakeWorker("b")
    a.client.script.append(Hang())
    async with running(a, b) as world:
        job = await world.submit(2, 2, 2)
        assert b.asked == []
        a.client.wake()
        await settle()
        assert world.statuses(job) == [STORED] * 3


async def test_room_is_reserved_before_the_lease_and_given_back_after_the_commit():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker) as world:
        seen = []
        lease = world.ledger.lease_unit

        async def lease_unit(*arguments, **named):
            seen.append(world.pool.list()[0].dump_bytes)
            return await lease(*arguments, **named)

        world.ledger.lease_unit = lease_unit
        await world.submit(8)
        assert seen == [UNIT_BYTES]
        assert world.metric("dump_bytes", worker="a") == UNIT_BYTES
        worker.client.wake()
        await settle()
        assert world.pool.list()[0].dump_bytes == 0
        assert world.metric("dump_bytes", worker="a") == 0


async def test_what_has_no_room_waits_and_another_worker_takes_it():
    a, b = worker_with_room("a", 1), worker_with_room("b", 2)
    a.publish = a.publish_nothing
    b.publish = b.publish_nothing
    b.client.script.append(Hang())
    async with running(a, b) as world:
        job = await world.submit(8, 8, 8, 8, 8)
        # One each, and one ahead for the worker that has room for two.
        assert len(await world.ledger.units(job, UnitState.LEASED)) == 3
        b.client.wake()
        await settle()
        assert len(a.asked) == 1
        assert len(b.asked) == 2
        assert len(await world.ledger.units(job, UnitState.PENDING)) == 2
        a.publish, b.publish = a.publish_whole, b.publish_whole
        a.put(a.client.requests[0][0])
        await settle()
        # The commit gave the room back: the next unit is under way, and the one after it.
        assert len(a.asked) == 4 - 1
        assert await world.ledger.units(job, UnitState.PENDING) == []


async def test_the_next_unit_is_leased_while_a_worker_is_at_work_and_begun_when_it_is_done():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker) as world:
        job = await world.submit(8, 8, 8)
        assert [line["unit"] for line in world.logged(events.UNIT_LEASED)] == [0, 1]
        assert world.pool.list()[0].dump_bytes == 2 * UNIT_BYTES
        assert len(worker.asked) == 1
        worker.client.wake()
        await settle()
        assert world.statuses(job) == [STORED] * 3


async def test_without_room_for_two_units_nothing_is_leased_ahead_and_the_ledger_is_not_asked_again_and_again():
    worker = worker_with_room("a", 1)
    async with running(worker) as world:
        peeks = []
        peek = world.ledger.peek_unit

        async def peek_unit(*arguments, **named):
            peeks.append(1)
            return await peek(*arguments, **named)

        worker.client.script.append(Hang())
        world.ledger.peek_unit = peek_unit
        job = await world.submit(8, 8)
        for _ in range(10):
            world.pool.changed.set()
            await settle()
        assert [line["unit"] for line in world.logged(events.UNIT_LEASED)] == [0]
        assert len(peeks) == 2
        worker.client.wake()
        await settle()
        assert world.statuses(job) == [STORED, STORED]


async def test_what_was_leased_ahead_is_given_back_when_its_job_is_paused_and_that_is_no_strike():
    worker = FakeWorker("a")
    async with running(worker) as world:
        worker.client.script.append(Hang())
        job = await world.submit(8, 8)
        for _ in range(4):
            await world.desk.pause(job)
            await settle()
            assert [unit.index for unit in await world.ledger.units(job, UnitState.LEASED)] == [0]
            assert world.pool.list()[0].dump_bytes == UNIT_BYTES
            await world.desk.resume(job)
            await settle()
        assert (await world.job(job)).state is JobState.RUNNING
        worker.client.wake()
        await settle()
        assert world.statuses(job) == [STORED, STORED]


async def test_what_was_leased_ahead_for_a_worker_that_goes_away_is_given_back_and_done_by_another():
    a, b = FakeWorker("a"), FakeWorker("b")
    async with running(a, b) as world:
        a.client.script.append(Hang())
        b.client.default = Hang()
        job = await world.submit(*[8] * 12)
        ahead = {run.id[1] for run in world.course.dispatcher.open_runs(job) if not run.begun}
        assert ahead == {2, 3}
        await world.pool.remove("a")
        while len(b.asked) < 5:
            await world.passes(1)
            b.client.wake()
            await settle()
        assert [RequestName.parse(rid).unit for rid in b.asked] == [1, 0, 3, 2, 4]
        b.client.default = Answer()
        b.client.wake()
        await settle()
        assert world.statuses(job) == [STORED] * 12


async def test_a_unit_that_wants_another_worker_gets_it_before_what_was_leased_ahead_for_that():
    a, b = FakeWorker("a"), FakeWorker("b")
    async with running(a, b, retry_backoff_seconds=0.001) as world:
        a.client.script.append(Refuse(500))
        a.client.default = b.client.default = Hang()
        await world.submit(*[8] * 12)
        while len(b.asked) < 3:
            await world.passes(0.1)
            b.client.wake()
            await settle()
        assert [RequestName.parse(rid).unit for rid in b.asked] == [1, 0, 3]


async def test_an_urgent_job_comes_before_what_was_leased_ahead_of_another():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker) as world:
        low = await world.submit(*[8] * 4, store="s0")
        high = await world.submit(8, 8, store="s1", priority=9)
        worker.client.wake()
        await settle()
        assert [RequestName.parse(rid).job for rid in worker.asked] == [low, high, high, low, low, low]


async def test_the_more_urgent_job_goes_first_and_then_the_older_one():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker) as world:
        first = await world.submit(8, store="s0")
        low = await world.submit(8, store="s1", priority=-1)
        world.clock.advance(1)
        old = await world.submit(8, store="s2")
        world.clock.advance(1)
        new = await world.submit(8, store="s3")
        high = await world.submit(8, store="s4", priority=5)
        worker.client.wake()
        await settle()
        assert [RequestName.parse(rid).job for rid in worker.asked] == [first, high, old, new, low]


async def test_a_commit_wakes_an_idle_worker():
    worker = worker_with_room("a", 1)
    worker.publish = worker.publish_nothing
    async with running(worker) as world:
        job = await world.submit(8, 8)
        assert len(worker.asked) == 1
        worker.publish = worker.publish_whole
        worker.put(worker.client.requests[0][0])
        await settle()
        assert world.statuses(job) == [STORED, STORED]


async def test_two_units_that_need_each_others_room_do_not_wait_for_ever():
    a, b = worker_with_room("a", 1), worker_with_room("b", 1)
    a.client.script.append(Refuse(500))
    b.client.script.append(Refuse(500))
    async with running(a, b) as world:
        job = await world.submit(8, 8)
        await world.passes(60)
        assert world.statuses(job) == [STORED, STORED]


async def test_a_lease_is_renewed_while_its_unit_is_open():
    worker = FakeWorker("a")
    worker.publish = worker.publish_nothing
    async with running(worker, lease_seconds=30, capture_timeout_seconds=1000) as world:
        job = await world.submit(8)
        await world.passes(200)
        unit = world.ledger.jobs_by_id[job].units[0]
        assert unit.expires_at > world.clock.now()
        assert unit.fence == 1


async def test_a_renewal_that_fails_is_not_the_last():
    worker = FakeWorker("a")
    worker.publish = worker.publish_nothing
    async with running(worker, lease_seconds=30, capture_timeout_seconds=1000) as world:
        job = await world.submit(8)
        renew, errors = world.ledger.renew_leases, [RuntimeError("database is locked")]

        async def renew_leases(*arguments, **named):
            if errors:
                raise errors.pop()
            await renew(*arguments, **named)

        world.ledger.renew_leases = renew_leases
        await world.passes(100)
        assert not errors
        assert world.ledger.jobs_by_id[job].units[0].expires_at > world.clock.now()


async def test_a_lease_that_ran_out_here_is_not_leased_a_second_time():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker) as world:
        job = await world.submit(8)
        world.ledger.jobs_by_id[job].units[0].expires_at = 0.0
        world.pool.changed.set()
        other = FakeWorker("b")
        world.workers["b"] = other
        await world.pool.add(other.record)
        await settle()
        assert other.asked == []
        worker.client.wake()
        await settle()
        assert world.statuses(job) == [STORED]


async def test_a_unit_given_back_is_not_leased_again_before_its_run_has_ended():
    a, b = FakeWorker("a"), FakeWorker("b")
    async with running(a, b) as world:
        world.writer.fail_once("write", RuntimeError("a bug"))
        give_back = world.ledger.give_back

        async def give_back_slowly(lease):
            await give_back(lease)
            world.pool.changed.set()
            await settle(5)

        world.ledger.give_back = give_back_slowly
        job = await world.submit(8)
        assert world.statuses(job) == [STORED]
        assert world.ledger.jobs_by_id[job].units[0].fence == 2
        world.assert_stored(job)
        assert world.held_dumps == []


async def test_a_dataset_that_cannot_be_opened_pauses_its_job_and_no_other():
    worker = FakeWorker("a")
    async with running(worker) as world:
        (driver,) = world.pool.drivers
        broken, fine = await world.dataset(8), await world.dataset(8)
        opened = world.datasets.open
        worker.client.up = False
        driver._nudged.set()
        await world.passes(3)
        first = await world.submit(dataset=broken, store="s1", priority=1)
        second = await world.submit(dataset=fine, store="s2")
        world.course.datasets.keep_only(())

        async def open_dataset(dataset):
            if dataset == broken:
                raise OSError("the file is gone")
            return await opened(dataset)

        world.datasets.open = open_dataset
        worker.client.up = True
        await world.passes(20)
        assert world.statuses(second) == [STORED]
        record = await world.job(first)
        assert (record.state, record.reason) == (JobState.PAUSED, "OSError: the file is gone")
        world.datasets.open = opened
        await world.desk.resume(first)
        await settle()
        assert world.statuses(first) == [STORED]


async def test_dispatching_goes_on_after_an_error_of_its_own():
    worker = FakeWorker("a")
    async with running(worker) as world:
        peek, errors = world.ledger.peek_unit, [RuntimeError("database is locked")]

        async def peek_unit(*arguments, **named):
            if errors:
                raise errors.pop()
            return await peek(*arguments, **named)

        world.ledger.peek_unit = peek_unit
        job = await world.submit(8)
        assert world.statuses(job) == [PENDING]
        await world.passes(1)
        assert len(world.logged(events.DISPATCH_FAILED)) == 1
        assert world.statuses(job) == [STORED]


async def test_a_turn_that_is_cancelled_before_it_begins_is_over():
    a, b = FakeWorker("a"), FakeWorker("b")
    b.client.up = False
    async with running(a, b) as world:
        give_turn = world.course.dispatcher._give_turn

        def cancelled_at_once(driver, run):
            give_turn(driver, run)
            driver.turn.cancel()
            world.course.dispatcher._give_turn = give_turn

        world.course.dispatcher._give_turn = cancelled_at_once
        job = await world.submit(8)
        assert world.statuses(job) == [STORED]


@pytest.mark.parametrize("lengths", [(3, 9, 4), (8, 20, 1, 7)])
async def test_truncated_and_long_samples_are_stored_where_they_were_placed(lengths):
    async with running(FakeWorker("a"), FakeWorker("b")) as world:
        job = await world.submit(*lengths, order="permutation", seed=3)
        assert world.statuses(job) == [STORED] * len(lengths)
        world.assert_stored(job)
