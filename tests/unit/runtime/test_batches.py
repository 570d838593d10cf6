"""Requests that carry several samples: what they hold, and that what befalls one sample does not befall its neighbours."""

from dataclasses import replace

import pytest
from statetap.core.batching import WANTED_SHARE, WINDOW_REQUESTS
from statetap.core.records import JobState, SampleStatus
from statetap.core.requests import RequestName
from statetap.core.spec import Identity
from statetap.core.worker import WorkerState
from statetap.telemetry import events

from tests.fakes.bad_worker import SETTINGS, BadWorker, state
from tests.fakes.clock import settle
from tests.fakes.harness import TAP, FakeWorker, running
from tests.fakes.inference import Answer, AnswerSome, Hang, Refuse, Unreachable

STORED, FAILED = SampleStatus.STORED, SampleStatus.FAILED


def asked_together(worker):
    """The samples (dataset indices) of each of its requests, in order."""
    return [[RequestName.parse(sample.rid).sample for sample in request] for request in worker.client.requests]


async def test_a_request_takes_samples_of_its_unit_in_placement_order_until_they_fill_it():
    worker = FakeWorker("a")
    async with running(worker, max_batch_tokens=6) as world:
        job = await world.submit(2, 3, 1, 5, 2, 8, 1, 1)
        # Units of 8 rows: 0 to 2, 3 and 4, 5, 6 and 7.
        assert asked_together(worker) == [[0, 1, 2], [3], [4], [5], [6, 7]]
        assert world.statuses(job) == [STORED] * 8
        world.assert_stored(job)
        assert world.held_dumps == []
        assert world.metric("request_samples_sum", worker="a") == 8
        assert world.metric("request_samples_count", worker="a") == 5
        assert world.metric("request_tokens_total", worker="a") == 23
        assert world.metric("batch_tokens", worker="a") == 6


async def test_without_tokens_it_is_one_sample_a_request():
    worker = FakeWorker("a")
    async with running(worker, max_batch_tokens=0) as world:
        await world.submit(2, 2, 2)
        assert asked_together(worker) == [[0], [1], [2]]


async def test_a_batch_is_one_request_with_time_for_all_its_tokens():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    settings = {"request_timeout_base_seconds": 1.0, "request_timeout_seconds_per_1k_tokens": 1000.0}
    async with running(worker, max_batch_tokens=100, **settings) as world:
        await world.submit(2, 3)
        (driver,) = world.pool.drivers
        assert asked_together(worker) == [[0, 1]]
        assert (driver.machine.state, driver.machine.in_flight) == (WorkerState.BUSY, worker.asked[0])
        assert worker.client.timeouts == [6.0]
        assert [view.in_flight for view in world.pool.list()] == [1]
        worker.client.wake()
        await settle()
        assert driver.machine.state is WorkerState.READY


async def test_strict_mode_never_batches():
    worker = FakeWorker("a", replace(TAP, identity=Identity.COUNT))
    async with running(worker, max_batch_tokens=1000) as world:
        job = await world.submit(2, 3, 2, 3)
        await world.passes(5)
        assert world.statuses(job) == [STORED] * 4
        assert {len(request) for request in worker.client.requests} == {1}


async def test_on_probation_it_is_one_sample():
    worker = BadWorker("a")
    async with running(worker, max_batch_tokens=8, **SETTINGS) as world:
        await world.submit(*[2] * 24)
        await world.passes(29)
        assert state(world, "a") is WorkerState.QUARANTINED
        before = len(worker.client.requests)
        worker.publish = worker.publish_whole
        worker.client.script.append(Hang())
        await world.passes(3)
        assert [len(request) for request in worker.client.requests[before:]] == [1]
        worker.client.wake()
        await world.passes(5)
        assert max(len(request) for request in worker.client.requests[before:]) > 1


async def test_one_failing_capture_among_many_fails_alone():
    worker = FakeWorker("a")
    bad = []

    def publish(sample):
        if RequestName.parse(sample.rid).sample == 1:
            bad.append(sample.rid)
            worker.put(sample, 0, 1)
        else:
            worker.put(sample)

    worker.publish = publish
    async with running(worker, max_batch_tokens=8, attempts_per_sample=2, capture_timeout_seconds=5.0) as world:
        job = await world.submit(2, 2, 2, 2)
        await world.passes(60)
        assert world.statuses(job) == [STORED, FAILED, STORED, STORED]
        assert asked_together(worker) == [[0, 1, 2, 3], [1]]
        assert len(bad) == 2
        world.assert_stored(job)


@pytest.mark.parametrize("status", [503, 502])
async def test_one_answer_that_is_missing_fails_its_attempt_alone(status):
    worker = FakeWorker("a")
    worker.client.script.append(AnswerSome((0, 2), status))
    async with running(worker, max_batch_tokens=8) as world:
        job = await world.submit(2, 2, 2)
        await world.passes(2)
        assert world.statuses(job) == [STORED] * 3
        assert asked_together(worker) == [[0, 1, 2], [1]]
        samples = world.ledger.jobs_by_id[job].samples
        assert [samples[n].attempts for n in range(3)] == [1, 2, 1]
        assert world.metric("requests_total", worker="a", outcome="answered") == 2
        world.assert_stored(job)


async def test_one_sample_that_is_refused_for_good_leaves_a_hole_and_its_neighbours_alone():
    worker = FakeWorker("a")
    worker.client.script.append(AnswerSome((0, 2), 400))
    async with running(worker, max_batch_tokens=8) as world:
        job = await world.submit(2, 2, 2)
        assert world.statuses(job) == [STORED, FAILED, STORED]
        assert asked_together(worker) == [[0, 1, 2]]
        world.assert_stored(job)


async def test_a_batch_that_is_refused_for_good_is_sent_again_one_by_one_and_costs_no_attempt():
    worker = FakeWorker("a")
    worker.client.script.extend([Refuse(400, "too long"), Answer(), Refuse(400, "too long"), Answer()])
    async with running(worker, max_batch_tokens=8, attempts_per_sample=1) as world:
        job = await world.submit(2, 2, 2)
        await world.passes(2)
        assert asked_together(worker) == [[0, 1, 2], [0], [1], [2]]
        assert world.statuses(job) == [STORED, FAILED, STORED]
        assert world.reasons(job)[1] == "request_failed: worker a: HTTP 400: too long"
        world.assert_stored(job)
        assert (await world.job(job)).state is JobState.COMPLETED


@pytest.mark.parametrize("fault", [Refuse(500, "boom"), Unreachable(), Hang()])
async def test_a_batch_that_is_lost_is_sent_again_one_by_one_and_costs_its_samples_nothing(fault):
    worker = FakeWorker("a")
    worker.client.script.append(fault)
    async with running(worker, max_batch_tokens=8, attempts_per_sample=1) as world:
        job = await world.submit(2, 2, 2)
        if isinstance(fault, Hang):
            worker.client.expire()
        await world.passes(5)
        assert asked_together(worker) == [[0, 1, 2], [0], [1], [2]]
        assert world.statuses(job) == [STORED] * 3
        world.assert_stored(job)


async def test_after_a_time_out_every_sample_is_aborted():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker, max_batch_tokens=8) as world:
        await world.submit(2, 2, 2)
        first = worker.asked[:3]
        worker.client.expire()
        await world.passes(5)
        assert worker.client.aborted == first
        (line,) = world.logged(events.WORKER_SUSPECT)
        assert (line["rid"], line["samples"]) == (first[0], 3)


async def test_batches_that_all_fail_are_three_failures_and_then_the_workers_fault():
    bad, good = FakeWorker("bad"), FakeWorker("good")
    bad.client.default = Refuse(500)
    async with running(bad, good, max_batch_tokens=8, **SETTINGS) as world:
        job = await world.submit(*[2] * 40)
        await world.passes(20)
        assert world.statuses(job) == [STORED] * 40
        assert [len(request) for request in bad.client.requests] == [4, 4, 4]
        assert state(world, "bad") is WorkerState.QUARANTINED


async def test_a_foreign_token_id_keeps_its_neighbours_company_no_longer():
    worker = FakeWorker("a")
    async with running(worker, max_batch_tokens=8) as world:
        job = await world.submit(dataset=await world.dataset(tokens=[[1, 2], [3, 5000], [4, 5]]))
        assert asked_together(worker) == [[0, 2]]
        assert world.statuses(job) == [STORED, FAILED, STORED]


async def test_the_next_request_is_ready_before_the_answer_is_in():
    worker = FakeWorker("a")
    worker.client.script.extend([Hang(), Hang()])
    async with running(worker, max_batch_tokens=4) as world:
        job = await world.submit(2, 2, 2, 1)
        assert [[sample.rid for sample in request] for request in worker.client.requests] == [worker.asked[:2]]
        prepared = [sample.rid for sample in worker.client.prepared[-1]]
        worker.client.wake()
        await settle()
        assert worker.asked[2:] == prepared
        worker.client.wake()
        await settle()
        assert world.statuses(job) == [STORED] * 4


async def test_a_worker_taken_away_in_mid_batch_costs_no_attempt():
    a, b = FakeWorker("a"), FakeWorker("b")
    a.client.script.append(Hang())
    b.client.up = False
    async with running(a, b, max_batch_tokens=8, attempts_per_sample=1) as world:
        job = await world.submit(2, 2)
        b.client.up = True
        await world.pool.remove("a")
        await world.passes(5)
        assert asked_together(b) == [[0], [1]]
        assert world.statuses(job) == [STORED] * 2


class Engine:
    """Stamps for the passes of a worker that idles for so long after each request, and runs a token a millisecond."""

    def __init__(self, worker, idle_ms):
        self.now_ms, self.idle_ms, self.request = 1, idle_ms, None
        worker.stamps = self.stamps
        self.worker = worker

    def stamps(self, sample):
        request = self.worker.client.in_flight
        if request is not self.request:
            self.request = request
            self.begin_ms = self.now_ms
            self.end_ms = self.begin_ms + sum(len(sample.token_ids) for sample in request)
            self.now_ms = self.end_ms + self.idle_ms
        return self.begin_ms * 1_000_000, self.end_ms * 1_000_000


async def test_the_batch_size_is_tuned_from_the_stamps_of_the_dumps():
    worker = FakeWorker("a")
    Engine(worker, idle_ms=1)
    async with running(worker) as world:
        job = await world.submit(*[2] * 1600, rows_per_shard=800, rows_per_chunk=4)
        assert world.statuses(job) == [STORED] * 1600
        sizes = [len(request) for request in worker.client.requests]
        assert sizes[:WINDOW_REQUESTS] == [1] * WINDOW_REQUESTS
        assert sizes[WINDOW_REQUESTS] == 8
        tuned = world.logged(events.WORKER_BATCH_TUNED)
        assert max(sizes) == 42
        assert tuned[0]["busy_share"] == pytest.approx(16 / 23, abs=1e-3)
        assert world.metric("batch_tokens", worker="a") == tuned[-1]["max_batch_tokens"] == 84
        assert world.metric("engine_busy_share", worker="a") >= WANTED_SHARE


async def test_want_of_room_makes_requests_smaller():
    worker = FakeWorker("a")
    Engine(worker, idle_ms=1)
    async with running(worker) as world:
        await world.submit(*[2] * 200, rows_per_shard=400, rows_per_chunk=4)
        (driver,) = world.pool.drivers
        before = driver.meter.tuner.tokens
        assert before > 4

        def crowded(sample):
            worker.source.lose(sample.rid, "over budget", for_want_of_room=True)
            worker.publish = worker.publish_whole

        worker.publish = crowded
        await world.submit(*[2] * 8, store="other")
        await world.passes(60)
        assert 0 < driver.meter.tuner.tokens < before


async def test_requests_that_are_too_large_for_whoever_takes_them_become_smaller():
    worker = FakeWorker("a")
    generate = worker.client.generate

    async def limited(samples, *, timeout_seconds):
        if len(samples) > 16:
            worker.client.script.append(Refuse(413, "request entity too large"))
        return await generate(samples, timeout_seconds=timeout_seconds)

    worker.client.generate = limited
    async with running(worker, retry_backoff_seconds=0.001) as world:
        (driver,) = world.pool.drivers
        driver.meter.tuner.tokens = 64
        job = await world.submit(*[1] * 640, rows_per_shard=320, rows_per_chunk=4)
        await world.passes(30)
        assert world.statuses(job) == [STORED] * 640
        sizes = [len(request) for request in worker.client.requests]
        assert [size for size in sizes if size > 16] == [64, 32]
        assert driver.meter.tuner.tokens == 16
