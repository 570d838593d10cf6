"""Whose fault failed attempts are, and what follows: bad workers are taken out of use and tried again, bad samples fail alone."""

from dataclasses import replace

from statetap.core.records import JobState, SampleStatus
from statetap.core.spec import Identity
from statetap.core.worker import WorkerState
from statetap.telemetry import events

from tests.fakes.bad_worker import SETTINGS, BadWorker, reason, state, times
from tests.fakes.clock import settle
from tests.fakes.harness import TAP, FakeWorker, World, running
from tests.fakes.inference import Answer, Hang, Refuse, Unreachable

STORED, FAILED, PENDING = SampleStatus.STORED, SampleStatus.FAILED, SampleStatus.PENDING


async def test_a_bad_worker_is_quarantined_and_the_other_one_stores_everything():
    bad, good = BadWorker("bad"), FakeWorker("good")
    async with running(bad, good, attempts_per_sample=2, **SETTINGS) as world:
        job = await world.submit(*[4] * 40)
        await world.passes(20)
        assert world.statuses(job) == [STORED] * 40
        world.assert_stored(job)
        assert len(bad.asked) == 4, "the fourth had left when the answer to the third was looked at"
        assert state(world, "bad") is WorkerState.QUARANTINED
        (line,) = world.logged(events.WORKER_QUARANTINED)
        assert line["reason"].startswith("3 attempts in a row at 3 samples failed, the last: wrong_tokens: ")
        assert reason(world, "bad") == line["reason"]
        assert (line["worker"], line["seconds"], line["times"]) == ("bad", 30.0, 1)
        assert world.metric("quarantines_total", worker="bad") == 1
        assert world.metric("worker_up", worker="bad") == 0
        assert (await world.job(job)).state is JobState.COMPLETED


async def test_a_single_worker_that_is_bad_for_a_while_is_quarantined_probed_and_back():
    worker = BadWorker("a")
    async with running(worker, attempts_per_sample=2, **SETTINGS) as world:
        job = await world.submit(*[4] * 12)
        await world.passes(29)
        assert len(worker.asked) == 4
        assert [line["job"] for line in world.logged(events.JOB_WAITING)] == [job]
        assert "worker a is quarantined: 3 attempts in a row" in world.logged(events.JOB_WAITING)[0]["reason"]
        await world.passes(4)
        assert len(worker.asked) == 5, "one probe"
        assert reason(world, "a").startswith("its attempt on probation failed: wrong_tokens: ")
        assert [line["seconds"] for line in world.logged(events.WORKER_QUARANTINED)] == [30.0, 60.0]
        worker.is_bad = False
        await world.passes(56)
        assert len(worker.asked) == 5
        await world.passes(60)
        assert world.statuses(job) == [STORED] * 12
        world.assert_stored(job)
        assert len(set(worker.asked)) == len(worker.asked) == 5 + 12
        assert state(world, "a") is WorkerState.READY
        assert reason(world, "a") is None
        assert times(world, events.WORKER_BACK) == 1
        assert times(world, events.WORKER_PROBED) == 2
        assert times(world, events.JOB_WAITING) == 1
        assert world.metric("worker_up", worker="a") == 1


async def test_what_was_a_workers_fault_leaves_the_samples_their_whole_budget():
    worker = BadWorker("a")
    async with running(worker, attempts_per_sample=2, **SETTINGS) as world:
        job = await world.submit(4, 4, 4, 4)
        assert times(world, events.WORKER_QUARANTINED) == 1
        worker.is_bad = False
        worker.client.script.extend(
            [Answer(), *[Refuse(500)] * 3]
        )  # the probe, then one further failure of each of the other three
        await world.passes(60)
        assert [sample.attempts for sample in world.ledger.jobs_by_id[job].samples.values()] == [2, 3, 3, 3]
        assert world.statuses(job) == [STORED] * 4


async def test_a_worker_that_stays_bad_is_dead_and_a_second_one_goes_on():
    worker = BadWorker("a")
    async with running(worker, attempts_per_sample=2, quarantines_until_dead=3, **SETTINGS) as world:
        job = await world.submit(*[4] * 12)
        await world.passes(500)
        assert state(world, "a") is WorkerState.DEAD
        assert [line["seconds"] for line in world.logged(events.WORKER_QUARANTINED)] == [30.0, 60.0, 120.0]
        (dead,) = world.logged(events.WORKER_DEAD)
        assert dead["reason"] == reason(world, "a")
        assert dead["reason"].startswith(
            "dead after 3 quarantines without one capture, the last because its attempt on probation"
        )
        assert dead["reason"].endswith("mend the worker and start it anew, or remove it and add it again")
        assert len(worker.asked) == 4 + 3
        await world.passes(5000)
        assert len(worker.asked) == 7
        assert world.statuses(job) == [PENDING] * 12
        world.workers["b"] = FakeWorker("b")
        await world.pool.add(world.workers["b"].record)
        await world.passes(60)
        assert world.statuses(job) == [STORED] * 12
        world.assert_stored(job)
        assert state(world, "a") is WorkerState.DEAD


async def test_a_dead_worker_is_used_again_once_it_was_started_anew():
    worker = BadWorker("a")
    async with running(worker, quarantines_until_dead=1, **SETTINGS) as world:
        job = await world.submit(*[4] * 4)
        await world.passes(100)
        assert state(world, "a") is WorkerState.DEAD
        worker.client.up = False
        await world.passes(10)
        worker.client.up = True
        await world.passes(100)
        assert state(world, "a") is WorkerState.DEAD, "the same boot"
        assert times(world, events.WORKER_READY) == 1
        worker.is_bad = False
        worker.source.announce(replace(worker.tap, alive=False))
        worker.restart()
        await world.passes(40)
        assert world.statuses(job) == [STORED] * 4
        assert [line["reason"] for line in world.logged(events.WORKER_BACK)] == ["it was started anew"]


async def test_a_dead_worker_is_used_again_once_it_was_removed_and_added():
    worker = BadWorker("a")
    async with running(worker, quarantines_until_dead=1, **SETTINGS) as world:
        job = await world.submit(*[4] * 4)
        await world.passes(100)
        worker.is_bad = False
        await world.pool.remove("a")
        await world.pool.add(worker.record)
        await world.passes(40)
        assert world.statuses(job) == [STORED] * 4


async def test_one_bad_sample_on_two_good_workers_fails_alone():
    a, b = (BadWorker(name, is_bad=False, bad_lengths=[5]) for name in "ab")
    async with running(a, b, attempts_per_sample=4, **SETTINGS) as world:
        job = await world.submit(4, 4, 5, 4, 4)
        await world.passes(300)
        assert world.statuses(job) == [STORED, STORED, FAILED, STORED, STORED]
        assert times(world, events.WORKER_QUARANTINED) == 0
        assert world.ledger.jobs_by_id[job].samples[2].attempts == 4


async def test_bad_samples_on_a_single_good_worker_fail_alone():
    worker = BadWorker("a", is_bad=False, bad_lengths=[5])
    async with running(worker, attempts_per_sample=3, **SETTINGS) as world:
        job = await world.submit(4, 5, 4, 5, 5, 5, 5, 4)
        await world.passes(600)
        bad = [1, 3, 4, 5, 6]
        assert world.statuses(job) == [FAILED if index in bad else STORED for index in range(8)]
        assert (await world.job(job)).state is JobState.COMPLETED
        assert state(world, "a") is WorkerState.READY


async def test_a_probe_is_a_sample_that_has_not_failed_yet():
    worker = BadWorker("a", is_bad=False, bad_lengths=[5])
    async with running(worker, quarantine_seconds=30.0, retry_backoff_seconds=1.0) as world:
        job = await world.submit(5, 5, 5, 4)
        await world.passes(31)
        assert worker.asked_lengths[:4] == [5, 5, 5, 4]
        assert times(world, events.WORKER_QUARANTINED) == 1
        assert times(world, events.WORKER_BACK) == 1
        await world.passes(100)
        assert world.statuses(job) == [FAILED] * 3 + [STORED]


async def test_samples_of_a_quarantined_worker_wait_for_no_other_than_a_good_one():
    a, b = BadWorker("a"), BadWorker("b")
    async with running(a, b, **SETTINGS) as world:
        job = await world.submit(*[4] * 40)
        await world.passes(10)
        assert state(world, "a") is state(world, "b") is WorkerState.QUARANTINED
        b.is_bad = False
        await world.passes(60)
        assert world.statuses(job) == [STORED] * 40


async def test_refusals_for_what_a_sample_is_are_not_blamed_on_its_worker():
    worker = FakeWorker("a")
    worker.client.script.extend([Refuse(400)] * 6)
    async with running(worker, **SETTINGS) as world:
        job = await world.submit(*[4] * 8)
        assert world.statuses(job) == [FAILED] * 6 + [STORED] * 2
        assert times(world, events.WORKER_QUARANTINED) == 0


async def test_a_worker_whose_requests_break_is_quarantined_in_whatever_state_that_leaves_it():
    worker = FakeWorker("a")
    worker.client.script.extend([Unreachable("reset"), Hang(), Refuse(500)])
    async with running(worker, **SETTINGS) as world:
        job = await world.submit(*[4] * 4)
        await world.passes(10)
        worker.client.expire()
        await world.passes(10)
        assert len(worker.asked) == 3
        assert state(world, "a") is WorkerState.QUARANTINED
        await world.passes(60)
        assert world.statuses(job) == [STORED] * 4


async def test_in_strict_mode_a_worker_whose_fences_fail_is_quarantined_before_it_is_asked_for_a_sample():
    worker = FakeWorker("a", replace(TAP, tap="plain", identity=Identity.COUNT, chunked_prefill_size=None, boot="plain"))
    worker.publish = worker.publish_nothing
    async with running(worker, capture_timeout_seconds=5.0, **SETTINGS) as world:
        job = await world.submit(3, 4, 5, 6)
        await world.passes(30)
        assert reason(world, "a").startswith("3 fences in a row failed, the last: no dump of ")
        worker.publish = worker.publish_whole
        await world.passes(60)
        assert world.statuses(job) == [STORED] * 4


async def test_a_restart_in_between_loses_nothing():
    worker = BadWorker("a")
    world = World(worker, attempts_per_sample=4, **SETTINGS)
    await world.start()
    job = await world.submit(*[4] * 12)
    await world.passes(40)
    assert state(world, "a") is WorkerState.QUARANTINED
    await world.kill()
    await world.start()
    await world.passes(5)
    assert state(world, "a") is WorkerState.QUARANTINED, "found out once more"
    worker.is_bad = False
    await world.stop()
    await world.start()
    await world.passes(60)
    assert world.statuses(job) == [STORED] * 12
    world.assert_stored(job)
    assert world.held_dumps == []
    await world.stop()


async def test_what_a_killed_server_still_owed_is_not_blamed_on_its_next_boot():
    worker = FakeWorker("a")
    owed = []
    worker.publish = owed.append
    async with running(worker, capture_timeout_seconds=20.0, **SETTINGS) as world:
        job = await world.submit(*[1] * 8)
        assert len(owed) == 8
        worker.source.announce(replace(worker.tap, alive=False))
        worker.restart()
        worker.publish = worker.publish_whole
        await world.passes(60)
        assert world.statuses(job) == [STORED] * 8
        assert times(world, events.WORKER_QUARANTINED) == 0


async def test_a_unit_whose_dumps_were_lost_in_one_go_blames_nobody_who_works_on():
    worker = FakeWorker("a")
    lost = [True] * 4
    worker.publish = lambda sample: lost.pop() if lost else worker.put(sample)
    async with running(worker, capture_timeout_seconds=20.0, **SETTINGS) as world:
        job = await world.submit(*[1] * 8)
        await world.passes(60)
        await settle()
        assert world.statuses(job) == [STORED] * 8
        assert times(world, events.WORKER_QUARANTINED) == 0
