"""How a quarantined worker's probation can end otherwise than by its capture, and probation in strict mode."""

from dataclasses import replace

from statetap.core.records import SampleStatus
from statetap.core.spec import Identity
from statetap.core.strict import SHORTEST_FENCE
from statetap.core.worker import WorkerState
from statetap.telemetry import events

from tests.fakes.bad_worker import SETTINGS, BadWorker, reason, state, times
from tests.fakes.harness import TAP, FakeWorker, running
from tests.fakes.inference import Answer, Hang, Refuse

STORED, FAILED, PENDING = SampleStatus.STORED, SampleStatus.FAILED, SampleStatus.PENDING


async def test_a_probe_that_is_refused_for_what_the_sample_is_is_followed_by_another():
    worker = BadWorker("a")
    async with running(worker, **SETTINGS) as world:
        job = await world.submit(*[4] * 6)
        worker.client.script.extend([Refuse(400), Refuse(413), Answer()])
        worker.is_bad = False
        await world.passes(31)
        assert times(world, events.WORKER_PROBED) == 3
        assert times(world, events.WORKER_QUARANTINED) == 1
        await world.passes(10)
        assert sorted(world.statuses(job)) == [STORED] * 4 + [FAILED] * 2


async def test_a_probe_that_is_lost_for_want_of_room_is_followed_by_another():
    worker = BadWorker("a")
    async with running(worker, **SETTINGS) as world:
        job = await world.submit(*[4] * 4)
        lossy = [True]

        def lose_once(sample):
            if lossy:
                lossy.pop()
                worker.source.lose(sample.rid, "No space left on device", for_want_of_room=True)
            else:
                worker.put(sample)

        worker.publish = lose_once
        await world.passes(40)
        assert times(world, events.WORKER_QUARANTINED) == 1
        assert world.statuses(job) == [STORED] * 4


async def test_a_worker_that_is_taken_away_in_mid_probe_leaves_the_sample_its_budget():
    worker = BadWorker("a")
    async with running(worker, attempts_per_sample=1, quarantine_failures=2, **SETTINGS) as world:
        job = await world.submit(*[4] * 4)
        worker.is_bad = False
        worker.client.script.append(Hang())
        await world.passes(31)
        assert worker.client.hanging.is_set()
        await world.pool.remove("a")
        await world.pool.add(worker.record)
        await world.passes(10)
        assert sorted(world.statuses(job)) == [STORED] * 2 + [FAILED] * 2, "only what failed before the quarantine"


async def test_a_probe_whose_job_is_cancelled_is_followed_by_another():
    worker = BadWorker("a")
    async with running(worker, **SETTINGS) as world:
        job = await world.submit(*[4] * 4)
        worker.publish = worker.publish_nothing
        await world.passes(31)
        assert times(world, events.WORKER_PROBED) == 1
        await world.desk.cancel(job)
        worker.publish = worker.publish_whole
        other = await world.submit(*[4] * 4, store="other")
        await world.passes(10)
        assert world.statuses(other) == [STORED] * 4


async def test_a_hanging_probe_is_a_failed_one():
    worker = BadWorker("a")
    async with running(worker, **SETTINGS) as world:
        job = await world.submit(*[4] * 4)
        worker.is_bad = False
        worker.client.script.append(Hang())
        await world.passes(31)
        assert state(world, "a") is WorkerState.QUARANTINED, "while it is in flight"
        worker.client.expire()
        await world.passes(5)
        assert reason(world, "a").startswith("its attempt on probation failed: request_failed: worker a: no answer within")
        await world.passes(100)
        assert world.statuses(job) == [STORED] * 4


async def test_in_strict_mode_a_probation_begins_with_its_fence():
    tap = replace(TAP, tap="plain", identity=Identity.COUNT, chunked_prefill_size=None, boot="plain")
    worker = FakeWorker("a", tap)
    broken = [True]
    worker.publish = lambda sample: None if broken and len(sample.token_ids) < SHORTEST_FENCE else worker.put(sample)
    async with running(worker, capture_timeout_seconds=5.0, **SETTINGS) as world:
        job = await world.submit(3, 4, 5, 6)
        await world.passes(40)
        assert state(world, "a") is WorkerState.QUARANTINED
        broken.clear()
        await world.passes(60)
        assert world.statuses(job) == [STORED] * 4
        assert times(world, events.WORKER_PROBED) == 1


async def test_in_strict_mode_a_fence_that_fails_on_probation_is_a_failed_probe():
    tap = replace(TAP, tap="plain", identity=Identity.COUNT, chunked_prefill_size=None, boot="plain")
    worker = FakeWorker("a", tap)
    broken = [True]
    worker.publish = lambda sample: None if broken and len(sample.token_ids) < SHORTEST_FENCE else worker.put(sample)
    async with running(worker, capture_timeout_seconds=5.0, **SETTINGS) as world:
        job = await world.submit(3, 4, 5, 6)
        await world.passes(40)
        worker.publish = worker.publish_nothing
        await world.passes(30)
        assert reason(world, "a").startswith("its fence on probation failed: no dump of ")
        worker.publish = worker.publish_whole
        await world.passes(120)
        assert world.statuses(job) == [STORED] * 4
