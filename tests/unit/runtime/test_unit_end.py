"""From the last capture to the commit: what the store, the ledger or a bug may do to a unit, and that nothing is lost of it."""

import asyncio

import pytest
from statetap.core.records import JobState, SampleStatus, UnitState
from statetap.ports import StoreError, StoreFull
from statetap.telemetry import events

from tests.fakes.clock import settle
from tests.fakes.harness import ROW_BYTES, STORE, FakeWorker, running
from tests.fakes.inference import Hang

STORED, PENDING = SampleStatus.STORED, SampleStatus.PENDING


async def test_dumps_are_held_until_the_commit_is_recorded():
    worker = FakeWorker("a")
    async with running(worker) as world:
        held = []
        commit = world.ledger.commit_unit

        async def commit_unit(*arguments, **named):
            held.extend(world.held_dumps)
            counts = await commit(*arguments, **named)
            await settle(5)
            assert world.held_dumps == held
            return counts

        world.ledger.commit_unit = commit_unit
        await world.submit(2, 3)
        assert held == ["a/req_1", "a/req_2"]
        assert world.held_dumps == []
        assert world.answers.kept == {}


async def test_a_dump_that_cannot_be_removed_for_a_while_is_removed_later():
    worker = FakeWorker("a")
    async with running(worker) as world:
        forget = worker.source._forget
        exhausted = [True]

        def forget_if_possible(dump):
            if exhausted:
                raise OSError("too many open files")
            forget(dump)

        worker.source._forget = forget_if_possible
        job = await world.submit(2)
        assert world.statuses(job) == [STORED]
        await world.passes(6)
        assert len(world.held_dumps) == 1
        exhausted.clear()
        await world.passes(30)
        assert world.held_dumps == []
        assert len(world.logged(events.DUMP_REJECTED)) == 3


async def test_a_commit_records_bytes_objects_and_the_answered_token():
    async with running(FakeWorker("a")) as world:
        job = await world.submit(2, 3)
        record = world.ledger.jobs_by_id[job]
        assert record.counts().bytes_stored == 5 * ROW_BYTES
        assert record.samples[0].next_token == 7
        assert {key: written for key, (_, written) in record.objects.items()} == world.store.groups[STORE].objects


async def test_a_full_store_is_waited_for_without_asking_the_worker_again():
    worker = FakeWorker("a")
    async with running(worker) as world:
        for _ in range(20):
            world.writer.fail_once("write", StoreFull("no space left"))
        job = await world.submit(2)
        await world.passes(700)
        assert world.statuses(job) == [STORED]
        assert len(worker.asked) == 1
        assert world.logged(events.UNIT_GIVEN_BACK) == []
        attempts = [line["attempt"] for line in world.logged(events.UNIT_WRITE_FAILED)]
        assert attempts == list(range(1, 21))


async def test_a_store_may_be_full_for_days():
    worker = FakeWorker("a")
    async with running(worker, probe_seconds=1e9, progress_seconds=1e9, projection_seconds=1e9, lease_seconds=1e9) as world:
        for _ in range(1100):
            world.writer.fail_once("write", StoreFull("no space left"))
        job = await world.submit(2)
        for _ in range(1101):
            world.clock.advance(30)
            await settle(12)
        assert world.logged(events.UNIT_CRASHED) == []
        assert world.statuses(job) == [STORED]


async def test_what_an_attempt_to_write_left_is_discarded_before_the_next():
    async with running(FakeWorker("a")) as world:
        discarded = []
        discard = world.writer.discard

        async def discard_and_tell(*arguments):
            discarded.append(arguments[3:])
            await discard(*arguments)

        world.writer.discard = discard_and_tell
        world.writer.fail_once("write", StoreError("torn"))
        await world.submit(2)
        assert discarded == []
        await world.passes(3)
        assert discarded == [(0, 8)]


async def test_a_store_that_keeps_failing_gives_the_unit_back_and_after_three_strikes_pauses_the_job():
    worker = FakeWorker("a")
    async with running(worker, lease_seconds=1000) as world:
        for _ in range(15):
            world.writer.fail_once("write", StoreError("it is read-only"))
        job = await world.submit(2)
        await world.passes(31)
        assert [line["reason"] for line in world.logged(events.UNIT_GIVEN_BACK)] == ["store: it is read-only"]
        assert (await world.job(job)).state is JobState.RUNNING
        await world.passes(200)
        record = await world.job(job)
        assert (record.state, record.reason) == (JobState.PAUSED, "store: it is read-only")
        assert world.events(job)[-1] == events.JOB_PAUSED
        assert len(world.logged(events.UNIT_GIVEN_BACK)) == 3
        assert len(worker.asked) == 3
        assert world.held_dumps == []
        assert world.pool.list()[0].dump_bytes == 0
        await world.desk.resume(job)
        await settle()
        assert world.statuses(job) == [STORED]


async def test_strikes_are_counted_one_time_after_the_other():
    async with running(FakeWorker("a")) as world:
        job = await world.submit(2)
        for _ in range(3):
            world.writer.fail_once("write", RuntimeError("a bug"))
            world.writer.fail_once("write", RuntimeError("a bug"))
            await world.submit(2)
        assert (await world.job(job)).state is JobState.COMPLETED
        assert world.logged(events.JOB_PAUSED) == []


async def test_a_lost_lease_records_nothing():
    worker = FakeWorker("a")
    async with running(worker) as world:
        write = world.writer.write

        async def lose_the_lease(unit):
            objects = await write(unit)
            world.ledger.jobs_by_id[job].units[0].fence += 1
            return objects

        world.writer.write = lose_the_lease
        worker.publish = worker.publish_nothing
        job = await world.submit(2)
        worker.put(worker.client.requests[0][0])
        await settle()
        assert world.statuses(job) == [PENDING]
        assert world.ledger.jobs_by_id[job].objects == {}
        assert world.logged(events.UNIT_LEASE_LOST)
        assert world.logged(events.UNIT_GIVEN_BACK) == []
        assert world.held_dumps == []


@pytest.mark.parametrize(("part", "effect"), [("inspector", "inspect"), ("writer", "write")])
async def test_an_effect_that_crashes_gives_the_unit_back(part, effect):
    worker = FakeWorker("a")
    async with running(worker) as world:
        getattr(world, part).fail_once(effect, RuntimeError("a bug"))
        job = await world.submit(2)
        assert len(world.logged(events.UNIT_CRASHED)) == 1
        assert world.logged(events.UNIT_GIVEN_BACK)[0]["reason"] == "RuntimeError: a bug"
        assert world.statuses(job) == [STORED]
        assert world.ledger.jobs_by_id[job].units[0].fence == 2
        assert world.held_dumps == []


async def test_a_commit_that_fails_is_done_again_under_another_lease():
    async with running(FakeWorker("a")) as world:
        commit, errors = world.ledger.commit_unit, [RuntimeError("database or disk is full")]

        async def commit_unit(*arguments, **named):
            if errors:
                raise errors.pop()
            return await commit(*arguments, **named)

        world.ledger.commit_unit = commit_unit
        job = await world.submit(2)
        assert world.statuses(job) == [STORED]
        assert (await world.job(job)).state is JobState.COMPLETED


async def test_a_commit_that_was_recorded_though_it_failed_still_ends_the_job():
    async with running(FakeWorker("a")) as world:
        commit = world.ledger.commit_unit

        async def commit_unit(*arguments, **named):
            await commit(*arguments, **named)
            raise RuntimeError("the connection broke after COMMIT")

        world.ledger.commit_unit = commit_unit
        job = await world.submit(2)
        assert world.statuses(job) == [STORED]
        assert (await world.job(job)).state is JobState.COMPLETED
        assert world.store.groups[STORE].statuses == [STORED], "a reader goes by the store, not by the ledger"


async def test_a_lease_that_cannot_be_given_back_is_tried_again():
    async with running(FakeWorker("a")) as world:
        give_back, errors = world.ledger.give_back, [RuntimeError("database is locked")]

        async def give_back_at_last(lease):
            if errors:
                raise errors.pop()
            await give_back(lease)

        world.ledger.give_back = give_back_at_last
        world.writer.fail_once("write", RuntimeError("a bug"))
        job = await world.submit(2)
        assert len(await world.ledger.units(job, UnitState.LEASED)) == 1
        await world.passes(31)
        assert world.statuses(job) == [STORED]


async def test_a_dump_that_cannot_be_removed_does_not_hold_the_unit_up():
    worker = FakeWorker("a")
    worker.publish = worker.publish_nothing
    async with running(worker) as world:
        job = await world.submit(2)
        dump = worker.put(worker.client.requests[0][0], 0, 1)

        def stuck():
            raise RuntimeError("busy")

        dump.release = stuck
        worker.source.lose(worker.asked[0], "over budget")
        worker.publish = worker.publish_whole
        await world.passes(1)
        assert world.statuses(job) == [STORED]
        assert "busy" in world.logged(events.DUMP_REJECTED)[0]["reason"]


async def test_answers_that_cannot_be_forgotten_do_not_hold_the_job_up():
    async with running(FakeWorker("a")) as world:
        forget = world.answers.forget

        def forget_not(*_):
            raise OSError("read-only")

        world.answers.forget = forget_not
        job = await world.submit(2)
        assert (await world.job(job)).state is JobState.COMPLETED
        world.answers.forget = forget


async def test_commits_whose_ends_come_in_another_order_are_all_counted():
    a, b = FakeWorker("a"), FakeWorker("b")
    a.client.script.append(Hang())
    async with running(a, b) as world:
        gate, commit = asyncio.Event(), world.ledger.commit_unit

        async def commit_unit(lease, *arguments, **named):
            counts = await commit(lease, *arguments, **named)
            if lease.unit.index == 1:
                await gate.wait()
            return counts

        world.ledger.commit_unit = commit_unit
        job = await world.submit(8, 7)
        a.client.wake()
        await settle()
        assert (await world.job(job)).state is JobState.RUNNING
        gate.set()
        await settle()
        assert (await world.job(job)).state is JobState.COMPLETED
        committed = {event.data["unit"]: event.data for event in world.ledger.log if event.name == events.UNIT_COMMITTED}
        assert {unit: (data["stored"], data["tokens"]) for unit, data in committed.items()} == {0: (1, 8), 1: (1, 7)}
        assert world.store.groups[STORE].statuses == [STORED, STORED]


async def test_a_commit_is_seen_only_once_its_event_is_recorded():
    async with running(FakeWorker("a")) as world:
        seen, append = [], world.ledger.append_event

        async def append_event(job, name, *arguments, **named):
            if name == events.UNIT_COMMITTED:
                await settle(5)
                seen.append((await world.desk.view(job)).record.counts.units_committed)
            return await append(job, name, *arguments, **named)

        world.ledger.append_event = append_event
        await world.submit(8)
        assert seen == [0]


async def test_a_job_whose_last_event_could_not_be_recorded_is_over_nevertheless():
    async with running(FakeWorker("a")) as world:
        append = world.ledger.append_event

        async def append_event(job, name, *arguments, **named):
            if name == events.UNIT_COMMITTED:
                raise RuntimeError("database is locked")
            return await append(job, name, *arguments, **named)

        world.ledger.append_event = append_event
        job = await world.submit(8)
        await world.passes(10)
        assert (await world.job(job)).state is JobState.COMPLETED
