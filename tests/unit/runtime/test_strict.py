"""Strict mode: workers whose dumps carry no names, told apart by their row counts, by fences, and by waiting."""

import asyncio
from dataclasses import replace
from zlib import crc32

from statetap.core.records import SampleStatus
from statetap.core.requests import RequestName
from statetap.core.spec import Identity
from statetap.core.strict import SHORTEST_FENCE
from statetap.runtime.driver import FENCE_LENGTHS
from statetap.telemetry import events

from tests.fakes.clock import settle
from tests.fakes.harness import TAP, FakeWorker, running
from tests.fakes.inference import Answer, Hang, Refuse

STORED, FAILED, PENDING = SampleStatus.STORED, SampleStatus.FAILED, SampleStatus.PENDING
PLAIN = replace(TAP, tap="a-plain", identity=Identity.COUNT)

# The first fence of a worker named "a".
FENCE = SHORTEST_FENCE + crc32(b"a") % FENCE_LENGTHS


def plain(name="a", **changes):
    return FakeWorker(name, replace(PLAIN, tap=f"{name}-plain", **changes))


def fences(worker):
    return [rid for rid in worker.asked if rid.startswith("st-fence-")]


async def test_a_fence_stands_at_the_start_and_between_equal_lengths():
    worker = plain()
    async with running(worker) as world:
        job = await world.submit(2, 2, 3)
        assert world.statuses(job) == [STORED] * 3
        world.assert_stored(job)
        # 3 is sent between the two samples of 2, so that no second fence is needed.
        assert worker.asked_lengths == [FENCE, 2, 3, 2]
        assert world.held_dumps == []


async def test_equal_lengths_alone_need_a_fence_of_another_length():
    worker = plain()
    async with running(worker) as world:
        job = await world.submit(2, 2)
        assert world.statuses(job) == [STORED] * 2
        assert worker.asked_lengths == [FENCE, 2, FENCE, 2]


async def test_the_next_request_waits_for_the_lifecycle_to_close():
    worker = plain()
    worker.quiet_period_seconds = 5.0
    async with running(worker) as world:
        job = await world.submit(2, 3)
        assert worker.asked_lengths == [FENCE, 2]
        await world.passes(4.9)
        assert worker.asked_lengths == [FENCE, 2]
        await world.passes(0.2)
        assert worker.asked_lengths == [FENCE, 2, 3]
        await world.passes(5)
        assert world.statuses(job) == [STORED, STORED]


async def test_the_next_request_is_ready_before_the_answer_is_in():
    worker = plain()
    worker.client.script.extend([Answer(), Hang()])
    async with running(worker) as world:
        await world.submit(2, 2, 3)
        assert worker.asked_lengths == [FENCE, 2]
        (prepared,) = worker.client.prepared[-1]
        assert len(prepared.token_ids) == 3, "two equal lengths do not follow each other"
        worker.client.wake()
        await settle()
        assert worker.asked[2] == prepared.rid


async def test_what_cannot_be_made_ready_is_not_swallowed():
    worker = plain()
    worker.client.script.extend([Answer(), Hang()])
    async with running(worker) as world:
        prepare = worker.client.prepare

        def fail_once(samples):
            worker.client.prepare = prepare
            raise RuntimeError("no memory")

        worker.client.prepare = fail_once
        job = await world.submit(2, 3, 5)
        worker.client.wake()
        await settle()
        assert worker.asked_lengths[:2] == [FENCE, 2]
        assert sorted(worker.asked_lengths[2:]) == [2, 3, 5, FENCE], "the unit was given back, and done anew"
        assert world.statuses(job) == [STORED] * 3


async def test_what_is_begun_comes_first_after_a_fence_that_did_not_hold():
    worker = plain()
    worker.client.script.extend([Answer(), Hang()])
    async with running(worker) as world:
        await world.submit(2, 2, 2, 2, 5, 3)
        worker.publish = lambda sample: None if sample.rid.startswith("st-fence-") else worker.put(sample)
        worker.client.wake()
        await world.passes(60)
        worker.publish = worker.publish_whole
        await world.passes(60)
        units = [RequestName.parse(rid).unit for rid in worker.asked if not rid.startswith("st-fence-")]
        assert units == [0, 0, 0, 0, 1, 1]


async def test_no_answer_is_recorded_that_could_not_be_taken_up_again():
    worker = plain()
    worker.client.script.extend([Answer(), Answer(), Hang()])
    async with running(worker) as world:
        await world.submit(2, 3)
        assert worker.asked_lengths == [FENCE, 2, 3]
        assert not any(world.answers.kept.values())


async def test_a_second_dump_within_the_quiet_period_is_another_reading():
    worker = plain()
    worker.quiet_period_seconds = 5.0
    async with running(worker, attempts_per_sample=1) as world:
        job = await world.submit(2)
        worker.put(worker.client.requests[1][0], add=1.0)
        await world.passes(6)
        assert world.statuses(job) == [FAILED]
        assert world.reasons(job)[0].startswith("ambiguous: ")
        assert world.held_dumps == []


async def test_a_dump_whose_event_was_lost_is_found_when_the_lifecycle_closes():
    worker = plain()
    worker.quiet_period_seconds = 5.0
    async with running(worker, attempts_per_sample=1) as world:
        job = await world.submit(2)
        worker.put(worker.client.requests[1][0], add=1.0, noticed=False)
        await world.passes(6)
        assert world.statuses(job) == [FAILED]


async def test_strays_of_other_lengths_are_dropped():
    worker = plain()

    def among_others(sample):
        worker.put(sample, 0, 1)
        worker.put(sample)
        worker.put(sample, 0, 1)

    worker.publish = among_others
    async with running(worker) as world:
        job = await world.submit(3, 5)
        assert world.statuses(job) == [STORED, STORED]
        world.assert_stored(job)
        assert world.held_dumps == []


async def test_a_chunked_prompt_is_put_together():
    worker = plain(chunked_prefill_size=16)
    worker.publish = lambda sample: [
        worker.put(sample, at, min(at + 16, len(sample.token_ids))) for at in range(0, len(sample.token_ids), 16)
    ]
    async with running(worker) as world:
        job = await world.submit(32, 40, rows_per_shard=64, rows_per_chunk=4)
        assert world.statuses(job) == [STORED, STORED]
        world.assert_stored(job)


async def test_after_a_failure_a_fence_comes_first():
    worker = plain()
    worker.publish = lambda sample: worker.put(sample) if len(worker.asked) != 2 else None
    async with running(worker, capture_timeout_seconds=10) as world:
        job = await world.submit(2, 3)
        assert worker.asked_lengths == [FENCE, 2]
        await world.passes(12)
        # Nothing of length 2 is sent before a fence has told that the lost dump will not come.
        assert worker.asked_lengths == [FENCE, 2, FENCE, 3, 2]
        assert world.statuses(job) == [STORED, STORED]
        world.assert_stored(job)


async def test_a_late_dump_of_the_lost_attempt_is_a_stray():
    worker = plain()
    late = []
    worker.publish = lambda sample: worker.put(sample) if len(worker.asked) != 2 else late.append(sample)

    async with running(worker, capture_timeout_seconds=10, retry_backoff_seconds=5) as world:
        job = await world.submit(2)
        await world.passes(10.5)
        dump = worker.put(late[0], add=1.0)
        assert dump.released
        await world.passes(10)
        assert world.statuses(job) == [STORED]
        world.assert_stored(job)


async def test_a_fence_that_does_not_appear_is_sent_again_after_a_rest():
    worker = plain()
    worker.publish = worker.publish_nothing
    async with running(worker, capture_timeout_seconds=10, probe_seconds=2) as world:
        job = await world.submit(2)
        assert worker.asked_lengths == [FENCE]
        await world.passes(10)
        assert f"no dump of {FENCE} rows appeared within 10 s" in world.logged(events.REQUEST_FAILED)[0]["reason"]
        assert worker.asked_lengths == [FENCE]
        worker.publish = worker.publish_whole
        await world.passes(2)
        assert worker.asked_lengths == [FENCE, FENCE, 2]
        assert world.statuses(job) == [STORED]


async def test_a_fence_that_is_refused_is_sent_again_after_a_rest():
    worker = plain()
    worker.client.script.append(Refuse(500))
    worker.publish = lambda sample: worker.put(sample) if len(worker.asked) > 1 else None
    async with running(worker) as world:
        job = await world.submit(2)
        assert len(fences(worker)) == 1
        await world.passes(2)
        assert world.statuses(job) == [STORED]


async def test_a_worker_without_a_length_for_a_fence_is_left_alone():
    worker = plain(chunked_prefill_size=4)
    async with running(worker) as world:
        job = await world.submit(2)
        assert worker.asked == []
        assert "cannot fence this worker" in world.logged(events.REQUEST_FAILED)[0]["reason"]
        assert world.statuses(job) == [PENDING]


async def test_a_worker_that_goes_away_in_an_open_lifecycle_loses_the_attempt():
    a, b = plain("a"), plain("b")
    b.client.up = False
    a.publish = lambda sample: a.put(sample) if sample.rid.startswith("st-fence") else None
    async with running(a, b, capture_timeout_seconds=1000) as world:
        job = await world.submit(2)
        assert a.asked_lengths == [FENCE, 2]
        a.client.up, b.client.up = False, True
        world.pool.drivers[0]._lose("it was started again")
        await world.passes(5)
        assert world.statuses(job) == [STORED]
        assert len(b.asked) == 2
        assert "worker a went away" in world.logged(events.CAPTURE_REFUSED)[0]["reason"]


async def test_a_worker_that_came_back_is_fenced_anew():
    worker = plain()
    async with running(worker) as world:
        await world.submit(2)
        worker.client.up = False
        world.pool.drivers[0]._lose("no answer")
        await world.passes(2)
        worker.client.up = True
        await world.passes(2)
        job = await world.submit(3)
        assert world.statuses(job) == [STORED]
        assert len(fences(worker)) == 2


async def test_a_request_that_timed_out_is_followed_by_a_fence():
    worker = plain()
    worker.client.script.extend([worker.client.default, Hang()])
    worker.publish = lambda sample: worker.put(sample) if len(worker.asked) != 2 else None
    async with running(worker) as world:
        job = await world.submit(2)
        await worker.client.hanging.wait()
        worker.client.expire()
        await world.passes(5)
        assert worker.asked_lengths == [FENCE, 2, FENCE, 2]
        assert world.statuses(job) == [STORED]


async def test_a_job_by_count_may_use_workers_that_name_their_dumps():
    a, b = plain("a"), FakeWorker("b")
    a.client.up = False
    async with running(a, b) as world:
        job = await world.submit(2, 3, identity=Identity.COUNT)
        assert world.statuses(job) == [STORED, STORED]
        assert fences(b) == []
        assert (await world.job(job)).spec.identity is Identity.COUNT


async def test_a_job_by_tokens_never_goes_to_a_worker_that_only_counts():
    a, b = plain("a"), FakeWorker("b")
    async with running(a, b) as world:
        b.client.up = False
        job = await world.submit(2)
        await settle()
        assert a.asked == []
        assert (await world.job(job)).spec.identity is Identity.TOKENS


def held_up(world):
    """Let no capture be looked at before the returned event is set."""
    inspect, gate = world.inspector.inspect, asyncio.Event()

    async def inspect_later(*arguments):
        await gate.wait()
        return await inspect(*arguments)

    world.inspector.inspect = inspect_later
    return gate


async def test_the_next_request_goes_out_while_values_are_looked_at():
    worker = plain()
    async with running(worker) as world:
        gate = held_up(world)
        job = await world.submit(2, 3, 4)
        # One at a time: the capture of 3 is chosen once that of 2 is known to be good.
        assert worker.asked_lengths == [FENCE, 2, 3]
        gate.set()
        await settle()
        assert worker.asked_lengths == [FENCE, 2, 3, 4]
        assert world.statuses(job) == [STORED] * 3
        world.assert_stored(job)
        assert world.held_dumps == []


async def test_what_was_asked_for_while_bad_values_were_looked_at_is_asked_for_again_behind_a_fence():
    worker = plain()
    async with running(worker, attempts_per_sample=1) as world:
        world.inspector.refuse_once("last_hidden_states: row 1 is not finite")
        gate = held_up(world)
        job = await world.submit(2, 3)
        assert worker.asked_lengths == [FENCE, 2, 3]
        gate.set()
        await world.passes(5)
        # It is not the fault of 3, which has one attempt only.
        assert worker.asked_lengths == [FENCE, 2, 3, FENCE, 3]
        assert world.statuses(job) == [FAILED, STORED]
        assert "the capture before it was refused" in world.logged(events.CAPTURE_REFUSED)[1]["reason"]
        world.assert_stored(job)
        assert world.held_dumps == []


async def test_a_refusal_that_comes_between_two_turns_is_followed_by_a_fence():
    worker = plain()
    async with running(worker, attempts_per_sample=1) as world:
        world.inspector.refuse_once("last_hidden_states: row 1 is not finite")
        gate = held_up(world)
        await world.submit(2)
        assert worker.asked_lengths == [FENCE, 2]
        assert world.pool.drivers[0].turn is None
        gate.set()
        await settle()
        job = await world.submit(3, store="other")
        assert worker.asked_lengths == [FENCE, 2, FENCE, 3]
        assert world.statuses(job) == [STORED]


async def test_cancelling_ends_a_turn_that_waits_for_its_lifecycle():
    worker = plain()
    worker.publish = lambda sample: worker.put(sample) if sample.rid.startswith("st-fence") else None
    async with running(worker, capture_timeout_seconds=1000) as world:
        job = await world.submit(2)
        assert world.pool.drivers[0].turn is not None
        await world.desk.cancel(job)
        await settle()
        assert world.pool.drivers[0].turn is None
        worker.publish = worker.publish_whole
        other = await world.submit(3, store="other")
        assert world.statuses(other) == [STORED]
