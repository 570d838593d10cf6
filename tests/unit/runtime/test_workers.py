"""Workers as they come, go and come back: their states as probes see them, and what the pool does with them."""

import asyncio
from dataclasses import replace

import pytest
from statetap.core.records import SampleStatus
from statetap.core.worker import WorkerState
from statetap.ports import DumpSourceError, NotFound, RequestRefused
from statetap.runtime.views import RefusalKind, Refused
from statetap.telemetry import events

from tests.fakes.clock import settle
from tests.fakes.harness import CONTEXT_LENGTH, MODEL, TAP, FakeWorker, World, running
from tests.fakes.inference import FACTS, Hang

STORED, PENDING = SampleStatus.STORED, SampleStatus.PENDING


def view(world, name="a"):
    return next(view for view in world.pool.list() if view.record.name == name)


# --- states


async def test_a_worker_that_answers_and_has_a_tap_is_ready():
    async with running(FakeWorker("a")) as world:
        assert (view(world).state, view(world).reason) == (WorkerState.READY, None)
        assert (view(world).model, view(world).context_length, view(world).in_flight) == (MODEL, CONTEXT_LENGTH, 0)
        assert world.metric("worker_up", worker="a") == 1


async def test_a_worker_that_does_not_answer_is_unreachable_until_it_does():
    worker = FakeWorker("a")
    worker.client.up = False
    async with running(worker) as world:
        assert (view(world).state, view(world).reason) == (WorkerState.UNREACHABLE, "http://a does not answer")
        await world.passes(10)
        assert len(world.logged(events.WORKER_UNREACHABLE)) == 1
        worker.client.up = True
        await world.passes(2)
        assert view(world).state is WorkerState.READY


async def test_without_a_tap_a_worker_is_refused_until_one_announces_itself():
    worker = FakeWorker("a", announced=False)
    async with running(worker) as world:
        assert view(world).state is WorkerState.REFUSED
        assert "no tap has announced itself in its dump directory" in view(world).reason
        await world.passes(10)
        assert len(world.logged(events.WORKER_REFUSED)) == 1
        worker.source.announce(TAP)
        await settle()
        assert view(world).state is WorkerState.READY


async def test_a_dead_taps_beacon_does_not_count():
    worker = FakeWorker("a", replace(TAP, alive=False))
    async with running(worker) as world:
        assert view(world).state is WorkerState.REFUSED


async def test_a_server_with_another_model_than_its_tap_is_refused():
    worker = FakeWorker("a")
    worker.client.facts = replace(FACTS, model_path="org/other")
    async with running(worker) as world:
        assert view(world).state is WorkerState.REFUSED
        assert view(world).reason == (
            "the server at http://a serves 'org/other', its dumps are of 'org/model': one of the two is not this worker's"
        )


@pytest.mark.parametrize(("server", "tap", "known"), [(100, 90, 90), (None, 90, 90), (100, None, 100), (None, None, None)])
async def test_the_shorter_context_counts(server, tap, known):
    worker = FakeWorker("a", replace(TAP, context_length=tap))
    worker.client.facts = replace(worker.facts, context_length=server)
    async with running(worker) as world:
        assert view(world).context_length == known


async def test_a_restarted_worker_is_identified_anew():
    worker = FakeWorker("a")
    async with running(worker) as world:
        worker.client.facts = replace(worker.facts, context_length=64)
        worker.restart()
        await settle()
        assert view(world).context_length == 64
        assert view(world).state is WorkerState.READY
        assert [line["tap"] for line in world.logged(events.WORKER_READY)] == ["boot1-0", "boot2-0"]


async def test_a_request_that_timed_out_is_aborted_before_the_worker_is_used_again():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker, retry_backoff_seconds=0) as world:
        job = await world.submit(2)
        assert view(world).in_flight == 1
        worker.client.expire()
        await world.passes(1)
        assert worker.client.aborted == [worker.asked[0]]
        assert len(world.logged(events.WORKER_SUSPECT)) == 1
        assert view(world).state is WorkerState.READY
        assert world.statuses(job) == [STORED]
        assert (view(world).requests, view(world).failures) == (2, 1)
        assert world.metric("requests_total", worker="a", outcome="timed_out") == 1
        assert world.metric("requests_total", worker="a", outcome="answered") == 1


async def test_a_suspect_worker_that_cannot_be_asked_is_unreachable():
    worker = FakeWorker("a")
    worker.client.script.append(Hang())
    async with running(worker) as world:
        await world.submit(2)
        worker.client.up = False
        worker.client.expire()
        await settle()
        assert view(world).state is WorkerState.UNREACHABLE


async def test_a_probe_that_fails_by_a_bug_is_not_the_last():
    worker = FakeWorker("a")
    async with running(worker) as world:
        up = worker.client.is_up

        async def bug():
            raise KeyError("model_path")

        worker.client.is_up = bug
        await world.passes(5)
        assert view(world).state is WorkerState.UNREACHABLE
        assert "KeyError" in view(world).reason
        worker.client.is_up = up
        await world.passes(2)
        assert view(world).state is WorkerState.READY


async def test_a_probe_that_is_refused_makes_the_worker_unreachable():
    worker = FakeWorker("a")
    async with running(worker) as world:

        async def refused():
            raise RequestRefused(404, "no such path")

        worker.client.is_up = refused
        await world.passes(2)
        assert (view(world).state, view(world).reason) == (WorkerState.UNREACHABLE, "HTTP 404: no such path")


# --- strays


async def test_dumps_of_nobody_are_released_and_counted():
    worker = FakeWorker("a")
    async with running(worker) as world:
        await world.submit(2)
        again = worker.client.requests[0][0]
        warm_up = worker.put(replace(again, rid="HEALTH_CHECK_1"))
        late = worker.put(again)
        assert warm_up.released
        assert late.released
        assert world.metric("strays_total", worker="a") == 2
        reasons = [line["reason"] for line in world.logged(events.DUMP_STRAY)]
        assert reasons == ["not a request of this service", "its unit is not open"]


async def test_a_stray_that_cannot_be_removed_does_not_end_the_watch():
    worker = FakeWorker("a")
    async with running(worker) as world:
        await world.submit(2)
        forget = worker.source._forget
        read_only = [True]

        def forget_if_writable(dump):
            if read_only:
                raise OSError("read-only file system")
            forget(dump)

        worker.source._forget = forget_if_writable
        worker.put(replace(worker.client.requests[0][0], rid="HEALTH_CHECK_1"))
        read_only.clear()
        assert "cannot be removed: read-only" in world.logged(events.DUMP_REJECTED)[0]["reason"]
        assert world.held_dumps != []
        await world.passes(1)
        assert world.held_dumps == []


async def test_what_is_no_dump_is_told():
    worker = FakeWorker("a")
    async with running(worker) as world:
        worker.source.reject("req_9.safetensors", "torn")
        assert world.logged(events.DUMP_REJECTED) == [
            {"event": events.DUMP_REJECTED, "log_level": "warning", "worker": "a", "dump": "req_9.safetensors", "reason": "torn"}
        ]


# --- the pool


async def test_a_worker_may_be_added_while_jobs_wait():
    world = World()
    await world.start()
    worker = world.workers["a"] = FakeWorker("a")
    added = await world.pool.add(worker.record)
    await settle()
    assert added.record.name == "a"
    job = await world.submit(2)
    assert world.statuses(job) == [STORED]
    assert [w.name for w in await world.ledger.workers()] == ["a"]
    await world.stop()


async def test_a_name_is_taken_once_even_at_the_same_time():
    async with running(FakeWorker("a")) as world:
        worker = world.workers["b"] = FakeWorker("b")
        start, starts = worker.source.start, []

        async def slow_start(post):
            starts.append(post)
            await settle(5)
            await start(post)

        worker.source.start = slow_start
        results = await asyncio.gather(world.pool.add(worker.record), world.pool.add(worker.record), return_exceptions=True)
        refused = [result for result in results if isinstance(result, Refused)]
        assert len(starts) == len(refused) == 1
        assert (refused[0].kind, refused[0].field) == (RefusalKind.CONFLICT, "name")


async def test_adding_a_worker_whose_dump_directory_cannot_be_used_is_refused_and_leaves_nothing():
    async with running(FakeWorker("a")) as world:
        worker = world.workers["b"] = FakeWorker("b")
        worker.source.broken = DumpSourceError("/dumps is open to others: chmod 700 it")
        with pytest.raises(Refused, match="open to others") as caught:
            await world.pool.add(worker.record)
        assert (caught.value.kind, caught.value.field) == (RefusalKind.INVALID, "dumps")
        assert worker.client.closed
        assert [w.record.name for w in world.pool.list()] == ["a"]
        assert [w.name for w in await world.ledger.workers()] == ["a"]


async def test_a_known_worker_whose_dump_directory_cannot_be_used_yet_is_tried_again():
    worker = FakeWorker("a")
    worker.source.broken = DumpSourceError("/dumps is missing: make it")
    async with running(worker) as world:
        assert (view(world).state, view(world).reason) == (WorkerState.REFUSED, "/dumps is missing: make it")
        await world.passes(10)
        assert len(world.logged(events.WORKER_REFUSED)) == 1
        worker.source.broken = None
        await world.passes(2)
        assert view(world).state is WorkerState.READY


async def test_a_removed_workers_attempt_is_made_elsewhere():
    a, b = FakeWorker("a"), FakeWorker("b")
    a.client.script.append(Hang())
    async with running(a, b) as world:
        job = await world.submit(2)
        await world.pool.remove("a")
        await world.passes(2)
        assert world.statuses(job) == [STORED]
        assert len(b.asked) == 1
        assert a.client.closed
        assert [w.name for w in await world.ledger.workers()] == ["b"]
        with pytest.raises(NotFound, match="no worker named 'a'; there are b"):
            await world.pool.remove("a")


async def test_what_a_removed_worker_published_stays_usable():
    a, b = FakeWorker("a"), FakeWorker("b")
    a.client.script.extend([a.client.default, Hang()])
    async with running(a, b) as world:
        job = await world.submit(2, 3)
        await world.pool.remove("a")
        await world.passes(2)
        assert world.statuses(job) == [STORED, STORED]
        assert b.asked_lengths == [3]
        world.assert_stored(job)


async def test_a_worker_removed_while_its_unit_was_leased_is_not_asked():
    a = FakeWorker("a")
    async with running(a) as world:
        lease_unit = world.ledger.lease_unit

        async def removed_meanwhile(*arguments, **named):
            await world.pool.remove("a")
            return await lease_unit(*arguments, **named)

        world.ledger.lease_unit = removed_meanwhile
        job = await world.submit(2)
        assert a.asked == []
        assert world.logged(events.UNIT_CRASHED) == []
        world.ledger.lease_unit = lease_unit
        b = world.workers["b"] = FakeWorker("b")
        await world.pool.add(b.record)
        await settle()
        assert world.statuses(job) == [STORED]


async def test_a_draining_worker_ends_what_is_in_flight_and_gets_nothing_more():
    a = FakeWorker("a")
    a.client.script.append(Hang())
    async with running(a) as world:
        job = await world.submit(2, 3)
        drained = await world.pool.drain("a")
        assert drained.state is WorkerState.BUSY
        a.client.wake()
        await world.passes(10)
        assert view(world).state is WorkerState.DRAINING
        assert len(a.asked) == 1
        assert world.statuses(job) == [PENDING, PENDING]
        assert (await world.ledger.workers())[0].draining
        assert world.pool.taps() == []


async def test_a_worker_that_was_added_and_drained_stays_so_after_a_restart():
    async with running() as world:
        worker = world.workers["a"] = FakeWorker("a")
        await world.pool.add(worker.record)
        await world.pool.drain("a")
        await world.stop()
        await world.start()
        assert view(world).state is WorkerState.DRAINING


async def test_requests_are_measured():
    async with running(FakeWorker("a")) as world:
        await world.submit(2, 3)
        assert world.metric("requests_total", worker="a", outcome="answered") == 2
        assert world.metric("request_seconds_count", worker="a") == 2
        assert world.metric("worker_in_flight", worker="a") == 0
        assert world.metric("samples_total", outcome="stored") == 2
        assert world.metric("tokens_stored_total") == 5
        assert world.metric("units_committed_total") == 1
        await world.pool.remove("a")
        assert world.metrics.registry.get_sample_value("statetap_worker_up", {"worker": "a"}) is None
