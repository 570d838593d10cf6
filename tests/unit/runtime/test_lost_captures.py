"""Captures that a publisher lost, above all for lack of room: each has its reason, and its worker rests for a while."""

from statetap.core.records import JobState, SampleStatus
from statetap.runtime.loss_pause import LONGEST_PAUSE_SECONDS, LossPause
from statetap.telemetry import events

from tests.fakes.clock import HandClock, settle
from tests.fakes.harness import FakeWorker, running
from tests.fakes.inference import Refuse

STORED, FAILED, PENDING = SampleStatus.STORED, SampleStatus.FAILED, SampleStatus.PENDING
NO_SPACE = "/dev/shm/dumps/a: No space left on device"


class CrampedWorker(FakeWorker):
    """A worker whose tmpfs takes so many dumps, whatever its budget says."""

    def __init__(self, name, dumps):
        super().__init__(name)
        self.dumps = dumps
        self.publish = self.publish_where_there_is_room

    def publish_where_there_is_room(self, sample):
        if len(self.source.held) < self.dumps:
            self.put(sample)
        else:
            self.source.lose(sample.rid, NO_SPACE, for_want_of_room=True)


async def slow_writes(world, seconds):
    """Let every unit take so long to write: so long its dumps are held."""
    write = world.writer.write

    async def slowly(unit):
        await world.clock.sleep(seconds)
        return await write(unit)

    world.writer.write = slowly


async def test_a_job_over_a_tap_without_room_for_all_of_it_stores_every_sample():
    worker = CrampedWorker("a", dumps=3)
    async with running(worker, retry_backoff_seconds=1.0) as world:
        await slow_writes(world, 2.0)
        job = await world.submit(*[4] * 12)  # six units of two samples, of which one and a half have room
        await world.passes(300)
        assert world.statuses(job) == [STORED] * 12
        assert (await world.job(job)).state is JobState.COMPLETED
        world.assert_stored(job)
        lost = world.logged(events.DUMP_LOST)
        assert lost
        assert {line["reason"] for line in lost} == {NO_SPACE}
        assert {line["reason"] for line in world.logged(events.CAPTURE_REFUSED)} == {f"lost_by_publisher: {NO_SPACE}"}


async def test_every_lost_attempt_is_told_with_the_commit_of_its_unit():
    worker = CrampedWorker("a", dumps=0)
    async with running(worker, retry_backoff_seconds=1.0) as world:
        job = await world.submit(4)
        worker.dumps = 1
        await world.passes(60)
        (committed,) = [event for event in world.ledger.log if event.name == events.UNIT_COMMITTED]
        assert committed.data["lost"] == [{"rid": f"st-{job}-0-0-1-1", "worker": "a", "reason": f"lost_by_publisher: {NO_SPACE}"}]


async def test_after_a_loss_nobody_asks_the_worker_for_a_while():
    worker = CrampedWorker("a", dumps=0)
    async with running(worker, retry_backoff_seconds=1.0) as world:
        job = await world.submit(4, 4)
        assert len(worker.asked) == 1, "the other sample's attempt would be lost as well"
        worker.dumps = 9
        await world.passes(0.9)
        assert len(worker.asked) == 1
        await world.passes(0.2)
        assert world.statuses(job) == [STORED] * 2
        assert world.logged(events.DUMP_LOST)[0]["pause_seconds"] == 1.0


async def test_another_worker_goes_on_meanwhile():
    a, b = CrampedWorker("a", dumps=0), FakeWorker("b")
    async with running(a, b, retry_backoff_seconds=1.0) as world:
        job = await world.submit(*[4] * 8)
        assert len(a.asked) == 1
        await world.passes(1.0)
        assert world.statuses(job) == [STORED] * 8


async def test_a_loss_of_somebody_elses_capture_is_no_reason_to_rest():
    worker = FakeWorker("a")
    async with running(worker) as world:
        worker.source.lose("HEALTH_CHECK_1", "over budget")
        worker.source.lose("st-gone-0-0-1-1", "over budget")
        assert [line["pause_seconds"] for line in world.logged(events.DUMP_LOST)] == [0.0, 0.0]
        job = await world.submit(2)
        assert world.statuses(job) == [STORED]


async def test_other_failures_do_not_make_a_worker_rest():
    worker = FakeWorker("a")
    worker.client.script.append(Refuse(500))
    async with running(worker, retry_backoff_seconds=1.0) as world:
        await world.submit(4, 4)
        assert len(worker.asked) == 2


async def test_want_of_room_fails_no_sample_and_blames_no_worker():
    worker = CrampedWorker("a", dumps=0)
    async with running(worker, attempts_per_sample=1) as world:
        job = await world.submit(4, 4, 4)
        await world.passes(600)
        assert len(worker.asked) > 12
        assert world.statuses(job) == [PENDING] * 3
        assert world.logged(events.WORKER_QUARANTINED) == []
        worker.dumps = 2
        await world.passes(120)
        assert world.statuses(job) == [STORED] * 3


async def test_without_a_back_off_each_loss_for_want_of_room_still_has_its_pause():
    worker = CrampedWorker("a", dumps=0)
    async with running(worker, retry_backoff_seconds=0.0) as world:
        await world.submit(4)
        await world.passes(60)
        # After 0.125 s, 0.25 s, …, 16 s, 30 s: the last but one at 31.875 s.
        assert len(worker.asked) == 9


async def test_a_publisher_that_fails_for_another_reason_uses_up_attempts():
    worker = FakeWorker("a")
    worker.publish = lambda sample: worker.source.lose(sample.rid, "the pass has token ids of shape (3,)")
    async with running(worker, attempts_per_sample=3) as world:
        job = await world.submit(4)
        await world.passes(300)
        assert world.statuses(job) == [FAILED]
        assert world.reasons(job) == ["lost_by_publisher: the pass has token ids of shape (3,)"]
        assert len(worker.asked) == 3


async def test_a_pause_doubles_until_a_dump_comes_through():
    clock, ends = HandClock(), []
    pause = LossPause(1.0, clock, lambda: ends.append(clock.monotonic()))
    lasted = []
    for _ in range(7):
        assert not pause.is_on
        lasted.append(pause.lost())
        await settle()
        assert pause.is_on
        clock.advance(lasted[-1])
        await settle()
    assert lasted == [1.0, 2.0, 4.0, 8.0, 16.0, LONGEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS]
    assert len(ends) == 7
    pause.published()
    assert pause.lost() == 1.0
    await pause.close()


async def test_a_directory_that_is_full_for_days_is_paused_for():
    clock = HandClock()
    pause = LossPause(1.0, clock, lambda: None)
    for _ in range(2000):
        lasted = pause.lost()
        await settle(2)
        clock.advance(lasted)
    assert lasted == LONGEST_PAUSE_SECONDS
    await pause.close()


async def test_what_is_lost_during_a_pause_does_not_prolong_it():
    clock = HandClock()
    pause = LossPause(1.0, clock, lambda: None)
    pause.lost()
    await settle()
    clock.advance(0.75)
    assert pause.lost() == 0.25
    clock.advance(0.25)
    assert not pause.is_on
    assert pause.lost() == 2.0
    await pause.close()
