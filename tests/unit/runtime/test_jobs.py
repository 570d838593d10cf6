"""What people do with jobs, in every phase: pause, resume, cancel, look, and wait for news; and what is told of it."""

import asyncio

import pytest
from statetap.core.records import JobState, SampleStatus
from statetap.ports import NotFound, StoreError, StoreMismatch
from statetap.runtime.jobs import PAUSED_BY_HAND
from statetap.runtime.views import RefusalKind, Refused
from statetap.telemetry import events

from tests.fakes.clock import settle
from tests.fakes.harness import ROW_BYTES, STORE, FakeWorker, running
from tests.fakes.inference import Hang, Refuse

STORED, PENDING, CANCELLED = SampleStatus.STORED, SampleStatus.PENDING, SampleStatus.CANCELLED


def held(world, name):
    """Make a method of the store wait; returns what lets it go on."""
    gate = asyncio.Event()
    method = getattr(world.store, name)

    async def wait_first(*arguments):
        await gate.wait()
        return await method(*arguments)

    setattr(world.store, name, wait_first)
    return gate


# --- the event log


async def test_every_step_of_a_job_is_in_its_event_log():
    worker = FakeWorker("a")
    worker.client.script.append(Refuse(400))
    async with running(worker) as world:
        job = await world.submit(8, 8, name="mine")
        await world.desk.retry(job)
        await settle()
        assert world.events(job) == [
            events.JOB_SUBMITTED,
            events.JOB_STARTED,
            events.UNIT_COMMITTED,
            events.UNIT_COMMITTED,
            events.JOB_COMPLETED,
            events.JOB_RETRIED,
            events.JOB_STARTED,
            events.UNIT_COMMITTED,
            events.JOB_COMPLETED,
        ]
        first, second = (
            event.data for event in world.ledger.log if event.name == events.UNIT_COMMITTED and event.data["unit"] < 2
        )
        assert (first["stored"], first["failed"], first["tokens"], first["bytes"]) == (0, 1, 0, 0)
        assert (second["stored"], second["failed"], second["tokens"], second["bytes"]) == (1, 0, 8, 8 * ROW_BYTES)
        assert first["workers"] == {"a": {"stored": 0, "attempts": 1, "lost": 1}}
        assert second["workers"] == {"a": {"stored": 1, "attempts": 1, "lost": 0}}
        assert world.logged(events.JOB_COMPLETED)[0]["failed"] == 1


async def test_waiting_for_an_event_ends_when_there_is_one():
    async with running(FakeWorker("a")) as world:
        world.workers["a"].client.script.append(Hang())
        job = await world.submit(2)
        last = world.ledger.log[-1].id
        waits = [asyncio.ensure_future(world.desk.wait_for_event(job, last, timeout_seconds=60)) for _ in range(2)]
        await settle()
        assert not any(wait.done() for wait in waits)
        world.workers["a"].client.wake()
        await settle()
        assert all(wait.done() for wait in waits)
        assert len(await world.ledger.events(job, after=last, limit=10)) > 0


async def test_waiting_ends_at_once_for_old_news_and_at_its_limit_for_none():
    async with running(FakeWorker("a")) as world:
        job = await world.submit(2)
        await world.desk.wait_for_event(job, 0, timeout_seconds=60)
        wait = asyncio.ensure_future(world.desk.wait_for_event(job, 1000, timeout_seconds=60))
        await world.passes(59)
        assert not wait.done()
        await world.passes(1)
        assert wait.done()


# --- pause and resume


async def test_a_paused_job_ends_what_is_leased_and_leases_nothing():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker) as world:
        job = await world.submit(8, 8)
        paused = await world.desk.pause(job)
        assert (paused.record.state, paused.record.reason) == (JobState.PAUSED, PAUSED_BY_HAND)
        worker.client.wake()
        await world.passes(10)
        assert world.statuses(job) == [STORED, PENDING]
        resumed = await world.desk.resume(job)
        assert (resumed.record.state, resumed.record.reason) == (JobState.RUNNING, None)
        await settle()
        assert world.statuses(job) == [STORED, STORED]
        assert world.events(job)[2:5] == [events.JOB_PAUSED, events.UNIT_COMMITTED, events.JOB_RESUMED]


async def test_who_pauses_last_says_why_and_once():
    async with running(FakeWorker("a")) as world:
        for _ in range(3):
            world.writer.fail_once("write", RuntimeError("a bug"))
        job = await world.submit(8)
        assert (await world.desk.view(job)).record.reason == "RuntimeError: a bug"
        for _ in range(2):
            assert (await world.desk.pause(job)).record.reason == PAUSED_BY_HAND
        assert [line["reason"] for line in world.logged(events.JOB_PAUSED)] == ["RuntimeError: a bug", PAUSED_BY_HAND]
        await world.desk.resume(job)
        await world.desk.resume(job)
        assert world.events(job).count(events.JOB_RESUMED) == 1


async def test_a_paused_job_whose_units_are_all_committed_is_over():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker) as world:
        job = await world.submit(8)
        await world.desk.pause(job)
        worker.client.wake()
        await settle()
        assert (await world.job(job)).state is JobState.COMPLETED


async def test_a_job_that_is_prepared_or_over_cannot_be_paused_or_resumed():
    async with running(FakeWorker("a")) as world:
        gate = held(world, "prepare")
        job = await world.submit(8)
        for ask in (world.desk.pause, world.desk.resume):
            with pytest.raises(Refused, match=f"job {job} is planning: cannot") as caught:
                await ask(job)
            assert caught.value.kind is RefusalKind.CONFLICT
        gate.set()
        await settle()
        with pytest.raises(Refused, match="is completed: cannot pause it"):
            await world.desk.pause(job)
        with pytest.raises(NotFound):
            await world.desk.pause("nothing")


# --- cancel


async def test_a_cancelled_job_keeps_what_is_committed():
    worker = FakeWorker("a")
    worker.client.script.extend([worker.client.default, Hang()])
    async with running(worker) as world:
        job = await world.submit(8, 8, 8)
        cancelled = await world.desk.cancel(job)
        assert cancelled.record.state is JobState.CANCELLED
        assert world.statuses(job) == [STORED, CANCELLED, CANCELLED]
        assert world.store.groups[STORE].statuses == world.statuses(job)
        assert world.events(job)[-1] == events.JOB_CANCELLED
        worker.client.wake()
        await world.passes(10)
        assert len(worker.asked) == 2
        assert world.held_dumps == []
        assert world.pool.list()[0].dump_bytes == 0
        assert (await world.desk.cancel(job)).record.state is JobState.CANCELLED
        assert world.events(job).count(events.JOB_CANCELLED) == 1


async def test_a_job_can_be_cancelled_before_its_store_is_there():
    worker = FakeWorker("a")
    async with running(worker) as world:
        held(world, "prepare")
        job = await world.submit(8)
        assert (await world.desk.cancel(job)).record.state is JobState.CANCELLED
        assert world.statuses(job) == [CANCELLED]
        assert world.store.groups == {}
        assert worker.asked == []


async def test_a_job_can_be_cancelled_before_its_store_has_grown():
    worker = FakeWorker("a")
    async with running(worker) as world:
        await world.submit(8)
        before = world.store.groups[STORE].statuses
        held(world, "prepare")
        job = await world.submit(8)
        await world.desk.cancel(job)
        assert (await world.job(job)).state is JobState.CANCELLED
        assert world.store.groups[STORE].statuses == before


async def test_a_paused_job_can_be_cancelled():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker) as world:
        job = await world.submit(8, 8)
        await world.desk.pause(job)
        assert (await world.desk.cancel(job)).record.state is JobState.CANCELLED
        assert world.statuses(job) == [CANCELLED, CANCELLED]


async def test_a_unit_that_is_being_committed_when_its_job_is_cancelled_is_kept():
    worker = FakeWorker("a")
    async with running(worker) as world:
        gate, commit = asyncio.Event(), world.ledger.commit_unit

        async def commit_unit(*arguments, **named):
            counts = await commit(*arguments, **named)
            await gate.wait()
            return counts

        world.ledger.commit_unit = commit_unit
        job = await world.submit(8, 8)
        cancelled = await world.desk.cancel(job)
        assert cancelled.record.state is JobState.CANCELLING
        gate.set()
        await settle()
        record = await world.job(job)
        assert record.state is JobState.CANCELLED
        assert world.statuses(job).count(STORED) == record.counts.units_committed > 0
        assert world.logged(events.DISPATCH_FAILED) == []
        assert world.events(job).count(events.UNIT_COMMITTED) == record.counts.units_committed
        assert world.events(job).count(events.JOB_CANCELLED) == 1
        assert world.logged(events.DISPATCH_FAILED) == []
        world.assert_stored(job)


async def test_a_unit_that_is_being_written_when_its_job_is_cancelled_is_given_back():
    worker = FakeWorker("a")
    async with running(worker) as world:
        gate, write = asyncio.Event(), world.writer.write

        async def wait_first(unit):
            await gate.wait()
            return await write(unit)

        world.writer.write = wait_first
        job = await world.submit(8)
        assert (await world.desk.cancel(job)).record.state is JobState.CANCELLED
        gate.set()
        await settle()
        assert world.statuses(job) == [CANCELLED]
        assert world.ledger.jobs_by_id[job].objects == {}
        assert world.logged(events.UNIT_CRASHED) == []


async def test_cancelling_while_the_last_projection_is_written_finds_the_job_completed():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker) as world:
        job = await world.submit(8)
        gate = held(world, "write_samples")
        worker.client.wake()
        await settle()
        cancelling = asyncio.ensure_future(world.desk.cancel(job))
        await settle()
        gate.set()
        await settle()
        with pytest.raises(Refused, match="is completed: cannot cancel it"):
            await cancelling
        assert (await world.job(job)).state is JobState.COMPLETED


async def test_two_who_cancel_at_once_both_succeed():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker) as world:
        job = await world.submit(8)
        gate = held(world, "write_samples")
        both = [asyncio.ensure_future(world.desk.cancel(job)) for _ in range(2)]
        await settle()
        gate.set()
        states = [view.record.state for view in await asyncio.gather(*both)]
        assert states == [JobState.CANCELLED] * 2
        assert world.events(job).count(events.JOB_CANCELLED) == 1


# --- failure


async def test_a_store_that_cannot_be_made_fails_the_job_with_the_reason():
    async with running(FakeWorker("a")) as world:
        for _ in range(4):
            world.store.fail_once("prepare", StoreError("read-only file system"))
        job = await world.submit(8)
        assert (await world.job(job)).reason == "it could not be prepared: read-only file system; tried again every 1 s"
        await world.passes(40)
        record = await world.job(job)
        assert (record.state, record.reason) == (JobState.FAILED, "read-only file system")
        assert world.events(job)[-1] == events.JOB_FAILED
        with pytest.raises(Refused, match="is failed: cannot cancel it"):
            await world.desk.cancel(job)


async def test_what_goes_wrong_once_while_a_job_is_prepared_delays_it():
    async with running(FakeWorker("a")) as world:
        world.store.fail_once("prepare", StoreError("too many open files"))
        job = await world.submit(8)
        await world.passes(2)
        assert (await world.job(job)).state is JobState.COMPLETED


@pytest.mark.parametrize(("effect", "ends"), [("set_job_state", JobState.COMPLETED), ("cancel_pending", JobState.FAILED)])
async def test_a_ledger_that_cannot_be_written_for_a_while_leaves_no_job_behind(effect, ends):
    """Neither one that is ready, nor one that never can be."""
    async with running(FakeWorker("a")) as world:
        for _ in range(20 if ends is JobState.FAILED else 0):
            world.store.fail_once("prepare", StoreMismatch("dtype", "float16", "float32"))
        original, locked = getattr(world.ledger, effect), [True]

        async def write_unless_locked(*arguments, **named):
            if locked:
                raise OSError("database is locked")
            return await original(*arguments, **named)

        setattr(world.ledger, effect, write_unless_locked)
        job = await world.submit(8)
        await world.passes(100)
        assert (await world.job(job)).state is JobState.PLANNING
        locked.clear()
        await world.passes(100)
        assert (await world.job(job)).state is ends
        assert SampleStatus.PENDING not in world.statuses(job)


async def test_a_job_whose_end_could_not_be_recorded_is_ended_later():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker) as world:
        job = await world.submit(8)
        original, locked = world.ledger.set_job_state, [True]

        async def write_unless_locked(*arguments, **named):
            if locked:
                raise OSError("database is locked")
            return await original(*arguments, **named)

        world.ledger.set_job_state = write_unless_locked
        worker.client.wake()
        await world.passes(30)
        assert (await world.job(job)).state is JobState.RUNNING
        assert world.statuses(job) == [SampleStatus.STORED]
        locked.clear()
        await world.passes(20)
        assert (await world.job(job)).state is JobState.COMPLETED


# --- looking


async def test_progress_is_told_of_running_jobs_at_a_fixed_interval():
    worker = FakeWorker("a")
    worker.client.script.extend([worker.client.default, Hang()])
    async with running(worker, progress_seconds=10) as world:
        job = await world.submit(8, 8)
        await world.passes(10)
        (line,) = world.logged(events.JOB_PROGRESS)
        assert (line["job"], line["done"], line["total"], line["failed"]) == (job, 1, 2, 0)
        assert line["tokens_per_second"] == 0.8
        assert line["bytes_per_second"] == round(0.8 * ROW_BYTES)
        assert line["eta_seconds"] == 10
        await world.desk.pause(job)
        await world.passes(30)
        assert len(world.logged(events.JOB_PROGRESS)) == 1


async def test_progress_goes_on_after_an_error():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker, progress_seconds=10) as world:
        await world.submit(8)
        failures, errors = world.ledger.failures, [RuntimeError("database is locked")]

        async def failing(job):
            if errors:
                raise errors.pop()
            return await failures(job)

        world.ledger.failures = failing
        await world.passes(20)
        assert len(world.logged(events.JOB_PROGRESS)) == 1


async def test_a_view_says_what_there_is_to_know():
    worker = FakeWorker("a")
    worker.client.script.extend([Refuse(400, "no"), worker.client.default])
    async with running(worker) as world:
        job = await world.submit(8, 8, name="mine", priority=3)
        view = await world.desk.view(job)
        assert (view.record.name, view.record.priority, view.bytes_total) == ("mine", 3, 16 * ROW_BYTES)
        assert view.failures == {"request_failed": 1}
        assert (view.workers["a"].stored, view.workers["a"].attempts, view.workers["a"].lost) == (1, 2, 1)
        assert (view.tokens_per_second, view.eta_seconds) == (0.0, None)
        page = await world.desk.list(limit=10, cursor=None)
        assert [item.record.id for item in page.items] == [job]
