"""What becomes of the requests for one sample: answers, refusals, losses, other workers, and the back-off in between."""

from dataclasses import replace

from statetap.core.records import JobState, SampleStatus
from statetap.core.spec import CaptureSpec
from statetap.telemetry import events

from tests.fakes.clock import settle
from tests.fakes.harness import CAPTURE, MODEL, TAP, FakeWorker, World, running
from tests.fakes.inference import Answer, Hang, Refuse, Unreachable

STORED, FAILED = SampleStatus.STORED, SampleStatus.FAILED


async def test_a_job_runs_to_its_end_and_leaves_no_dump():
    worker = FakeWorker("a")
    async with running(worker) as world:
        job = await world.submit(3, 5, 2, 6, 20)
        assert (await world.job(job)).state is JobState.COMPLETED
        assert world.statuses(job) == [STORED] * 5
        world.assert_stored(job)
        assert world.held_dumps == []
        assert worker.asked_lengths == [3, 5, 2, 6, 20]


async def test_rows_of_several_dumps_stand_one_after_the_other():
    worker = FakeWorker("a")

    def in_pieces(sample):
        worker.put(sample, 4, 6)
        worker.put(sample, 0, 3)
        worker.put(sample, 3, 4)

    worker.publish = in_pieces
    async with running(worker) as world:
        job = await world.submit(6, 6)
        assert world.statuses(job) == [STORED, STORED]
        world.assert_stored(job)


async def test_the_next_request_leaves_while_a_capture_is_still_collected():
    worker = FakeWorker("a")
    published = []
    worker.publish = published.append
    async with running(worker) as world:
        job = await world.submit(2, 2)
        assert len(worker.asked) == 2
        assert world.statuses(job) == [SampleStatus.PENDING] * 2
        for sample in published:
            worker.put(sample)
        await settle()
        assert world.statuses(job) == [STORED, STORED]


async def test_a_refused_request_is_the_samples_own_fault_and_leaves_a_hole():
    worker = FakeWorker("a")
    worker.client.script.extend([Answer(), Refuse(400, "too long"), Answer()])
    async with running(worker) as world:
        job = await world.submit(2, 3, 2)
        assert len(worker.asked) == 3
        assert world.statuses(job) == [STORED, FAILED, STORED]
        assert world.reasons(job)[1] == "request_failed: worker a: HTTP 400: too long"
        world.assert_stored(job)
        record = await world.job(job)
        assert (record.state, record.counts.failed, record.counts.tokens_stored) == (JobState.COMPLETED, 1, 4)
        assert [line["sample"] for line in world.logged(events.SAMPLE_FAILED)] == [1]


async def test_other_errors_are_tried_again_until_the_attempts_are_used_up():
    worker = FakeWorker("a")
    worker.client.default = Refuse(500, "boom")
    async with running(worker, attempts_per_sample=3, retry_backoff_seconds=1.0) as world:
        job = await world.submit(2)
        assert len(worker.asked) == 1
        await world.passes(100)
        assert len(set(worker.asked)) == len(worker.asked) == 3
        sample = world.ledger.jobs_by_id[job].samples[0]
        assert (sample.status, sample.attempts, sample.worker) == (FAILED, 3, "a")
        assert sample.reason == "request_failed: worker a: HTTP 500: boom"
        assert (await world.job(job)).state is JobState.COMPLETED


async def test_the_back_off_doubles_and_is_kept():
    worker = FakeWorker("a")
    worker.client.default = Refuse(503)
    async with running(worker, retry_backoff_seconds=1.0) as world:
        await world.submit(2)
        asked = []
        for _ in range(16):
            asked.append(len(worker.asked))
            await world.passes(0.5)
        assert asked == [1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3, 4, 4]


async def test_a_sample_that_failed_at_one_worker_goes_to_another():
    a, b = FakeWorker("a"), FakeWorker("b")
    a.publish = a.publish_nothing
    a.client.default = Refuse(500)
    b.client.default = Refuse(500)
    async with running(a, b, attempts_per_sample=2, retry_backoff_seconds=1.0) as world:
        await world.submit(2)
        await world.passes(10)
        assert (len(a.asked), len(b.asked)) == (1, 1)


async def test_a_sample_that_failed_everywhere_may_be_tried_anywhere():
    a, b = FakeWorker("a"), FakeWorker("b")
    a.client.default = b.client.default = Refuse(500)
    async with running(a, b, attempts_per_sample=4) as world:
        job = await world.submit(2)
        await world.passes(100)
        assert len(a.asked) + len(b.asked) == 4
        assert world.statuses(job) == [FAILED]


async def test_a_sample_does_not_wait_for_a_worker_that_could_never_take_its_unit():
    a, tiny = FakeWorker("a"), FakeWorker("b", replace(TAP, budget_bytes=1000))
    a.client.script.append(Hang())
    async with running(a) as world:
        job = await world.submit(2)
        world.workers["b"] = tiny
        await world.pool.add(tiny.record)
        await settle()
        a.client.expire()
        await world.passes(60)
        assert tiny.asked == []
        assert world.statuses(job) == [STORED]


async def test_a_worker_lost_in_mid_request_leaves_the_run_to_the_other():
    a, b = FakeWorker("a"), FakeWorker("b")
    a.client.script.append(Hang())
    b.client.up = False
    async with running(a, b) as world:
        job = await world.submit(2, 3)
        await a.client.hanging.wait()
        b.client.up = True
        await world.passes(2)
        assert b.asked == []
        a.client.up = False
        a.client.expire()
        await world.passes(10)
        assert len(b.asked) == 2
        assert world.statuses(job) == [STORED, STORED]
        view = await world.desk.view(job)
        assert (view.workers["a"].attempts, view.workers["a"].lost, view.workers["a"].stored) == (1, 1, 0)
        assert (view.workers["b"].attempts, view.workers["b"].stored) == (2, 2)


async def test_an_unreachable_worker_is_used_again_when_it_comes_back():
    a = FakeWorker("a")
    a.client.script.append(Unreachable("connection reset"))
    async with running(a) as world:
        job = await world.submit(2)
        assert world.statuses(job) == [SampleStatus.PENDING]
        await world.passes(5)
        assert world.statuses(job) == [STORED]
        assert world.ledger.jobs_by_id[job].samples[0].attempts == 2


async def test_a_token_that_the_model_does_not_have_is_never_sent():
    worker = FakeWorker("a")
    async with running(worker) as world:
        dataset = await world.dataset(tokens=[[1, 2], [1, MODEL.vocab_size], [3, -1], [4, 5]])
        job = await world.submit(dataset=dataset)
        assert len(worker.asked) == 2
        assert world.statuses(job) == [STORED, FAILED, FAILED, STORED]
        assert world.reasons(job)[1:3] == [
            "outside_vocabulary: the model has no token id 1000",
            "outside_vocabulary: the model has no token id -1",
        ]


async def test_a_lost_capture_is_asked_for_again_at_once_by_its_name():
    worker = FakeWorker("a")

    def lose_the_first(sample):
        if len(worker.asked) == 1:
            worker.source.lose(sample.rid, "over budget")
        else:
            worker.put(sample)

    worker.publish = lose_the_first
    async with running(worker, retry_backoff_seconds=1.0) as world:
        job = await world.submit(2)
        await world.passes(1)
        assert len(worker.asked) == 2
        assert world.statuses(job) == [STORED]
        assert world.logged(events.CAPTURE_REFUSED)[0]["reason"] == "lost_by_publisher: over budget"


async def test_an_overdue_capture_is_given_up_and_its_late_dump_released():
    worker = FakeWorker("a")
    first = []
    worker.publish = lambda sample: worker.put(sample) if first else first.append(sample)
    async with running(worker, capture_timeout_seconds=10, retry_backoff_seconds=5.0) as world:
        job = await world.submit(2)
        await world.passes(9.9)
        assert world.logged(events.CAPTURE_REFUSED) == []
        await world.passes(0.2)
        assert [line["reason"] for line in world.logged(events.CAPTURE_REFUSED)] == [
            "missing_rows: rows 0 to 2 of 2 did not appear in time"
        ]
        late = worker.put(first[0])
        await settle()
        assert late.released
        assert world.statuses(job) == [SampleStatus.PENDING]
        await world.passes(5)
        assert world.statuses(job) == [STORED]
        world.assert_stored(job)


async def test_refused_values_are_tried_again():
    worker = FakeWorker("a")
    async with running(worker) as world:
        world.inspector.refuse_once("last_hidden_states: row 1 is not finite")
        job = await world.submit(2)
        await world.passes(1)
        assert world.statuses(job) == [STORED]
        assert world.ledger.jobs_by_id[job].samples[0].attempts == 2
        assert world.logged(events.CAPTURE_REFUSED)[0]["reason"] == "bad_values: last_hidden_states: row 1 is not finite"
        assert world.held_dumps == []


async def test_two_different_readings_are_refused_and_equal_ones_are_one():
    worker = FakeWorker("a")

    def twice(sample):
        worker.put(sample)
        worker.put(sample, add=1.0 if len(worker.asked) == 1 else 0.0)

    worker.publish = twice
    async with running(worker) as world:
        job = await world.submit(2)
        await world.passes(1)
        assert world.statuses(job) == [STORED]
        assert len(worker.asked) == 2
        assert world.logged(events.CAPTURE_REFUSED)[0]["reason"].startswith("ambiguous: ")
        assert world.held_dumps == []


async def test_a_dump_let_go_before_its_digest_was_asked_for_costs_an_attempt_and_not_the_unit():
    worker = FakeWorker("a")

    def twice_then_lost(sample):
        if len(worker.asked) > 2:
            worker.put(sample)

    worker.publish = twice_then_lost
    async with running(worker) as world:
        job = await world.submit(2, 2)
        first, second = (request[0] for request in worker.client.requests)
        worker.put(second)
        worker.put(first, 0, 1)
        worker.put(first, 0, 1)  # DigestDumps follows, and before it is begun:
        worker.source.lose(first.rid, "over budget")
        await world.passes(1)
        assert world.logged(events.UNIT_CRASHED) == []
        assert world.statuses(job) == [STORED, STORED]
        assert len(worker.asked) == 3


async def test_a_prefix_from_the_cache_is_a_refused_capture():
    worker = FakeWorker("a")
    worker.client.script.append(Answer(cached_tokens=1))

    def rest_only(sample):
        worker.put(sample, 1 if len(worker.asked) == 1 else 0)

    worker.publish = rest_only
    async with running(worker) as world:
        job = await world.submit(3)
        await world.passes(1)
        assert world.logged(events.CAPTURE_REFUSED)[0]["reason"].startswith("prefix_cached: 1 of 3 tokens")
        assert world.statuses(job) == [STORED]


async def test_an_error_that_nobody_foresaw_leaves_the_worker_usable():
    worker = FakeWorker("a")
    broken = [RuntimeError("a bug")]

    def crash_once(sample):
        if broken:
            raise broken.pop()
        worker.put(sample)

    worker.publish = crash_once
    async with running(worker) as world:
        job = await world.submit(2)
        assert [line["worker"] for line in world.logged(events.UNIT_CRASHED)] == ["a"]
        await world.passes(5)
        assert worker.client.aborted == [worker.asked[0]]
        assert world.statuses(job) == [STORED]


async def test_a_worker_that_went_away_while_it_was_paced_is_not_asked():
    worker = FakeWorker("a")
    ports = worker.connect()
    worker.connect = lambda: replace(ports, requests_per_second=1e9)
    async with running(worker) as world:
        (driver,) = world.pool.drivers

        async def pace():
            driver._lose("gone meanwhile")

        driver.pace = pace
        job = await world.submit(2)
        assert worker.asked == []
        assert world.logged(events.UNIT_CRASHED) == []
        del driver.pace
        await world.passes(3)
        assert world.statuses(job) == [STORED]


async def test_an_answer_that_cannot_be_journalled_costs_the_unit_and_not_the_service():
    worker = FakeWorker("a")
    world = World(worker)
    await world.start()
    world.answers.broken = OSError(28, "No space left on device")
    job = await world.submit(2)
    assert world.logged(events.UNIT_GIVEN_BACK)
    world.answers.broken = None
    if (await world.job(job)).state is JobState.PAUSED:
        await world.desk.resume(job)
    await world.passes(10)
    assert world.statuses(job) == [STORED]
    await world.stop()


async def test_rows_of_other_layers_are_refused_though_they_have_the_same_shape():
    worker = FakeWorker("a")

    def by_another_tap_at_first(sample):
        worker.tap = replace(TAP, capture=CaptureSpec((2, 4), CAPTURE.final)) if len(worker.asked) == 1 else TAP
        worker.put(sample)

    worker.publish = by_another_tap_at_first
    async with running(worker) as world:
        job = await world.submit(2)
        await world.passes(1)
        assert world.logged(events.CAPTURE_REFUSED)[0]["reason"].startswith("wrong_capture: ")
        assert world.statuses(job) == [STORED]
        assert len(worker.asked) == 2
