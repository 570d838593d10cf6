"""Jobs taken in or refused, once each; failed samples tried again; and stores that several jobs share."""

import asyncio

import pytest
from statetap.core.records import JobState, SampleStatus
from statetap.core.spec import Compression
from statetap.ports import IdempotencyConflict, StoreError
from statetap.runtime.views import JobSubmission, RefusalKind, Refused
from statetap.telemetry import events

from tests.fakes.clock import settle
from tests.fakes.harness import CONTEXT_LENGTH, STORE, FakeWorker, running
from tests.fakes.inference import Answer, Refuse

STORED, FAILED = SampleStatus.STORED, SampleStatus.FAILED


async def refusal(submitting):
    with pytest.raises(Refused) as caught:
        await submitting
    return caught.value


# --- once


async def test_the_same_request_under_the_same_key_is_one_job():
    async with running(FakeWorker("a")) as world:
        submission = JobSubmission(dataset=await world.dataset(8), store=STORE)
        first, new = await world.desk.submit(submission, idempotency_key="k", request_hash="h")
        again, new_again = await world.desk.submit(submission, idempotency_key="k", request_hash="h")
        assert (new, new_again) == (True, False)
        assert first.record.id == again.record.id
        assert len(world.ledger.jobs_by_id) == 1


async def test_the_same_key_at_the_same_time_is_one_job():
    async with running(FakeWorker("a")) as world:
        submission = JobSubmission(dataset=await world.dataset(8), store=STORE)
        describe = world.store.describe

        async def slow_describe(location):
            await settle(5)
            return await describe(location)

        world.store.describe = slow_describe
        asked = [world.desk.submit(submission, idempotency_key="k", request_hash="h") for _ in range(2)]
        both = await asyncio.gather(*asked)
        assert both[0][0].record.id == both[1][0].record.id
        assert len(world.ledger.jobs_by_id) == 1


async def test_another_request_under_the_same_key_is_a_conflict():
    async with running(FakeWorker("a")) as world:
        await world.submit(8, key="k", request_hash="h")
        with pytest.raises(IdempotencyConflict):
            await world.submit(8, key="k", request_hash="other", store="other")
        assert len(world.ledger.jobs_by_id) == 1


async def test_a_refused_request_does_not_use_its_key_up():
    async with running(FakeWorker("a")) as world:
        world.store.free = 1
        await refusal(world.submit(8, key="k", request_hash="h"))
        world.store.free = None
        job = await world.submit(8, key="k", request_hash="h")
        assert world.statuses(job) == [STORED]


# --- refused


async def test_an_unknown_dataset_is_refused():
    async with running(FakeWorker("a")) as world:
        refused = await refusal(world.submit(dataset="nothing"))
        assert (refused.kind, refused.field) == (RefusalKind.INVALID, "dataset")
        assert refused.detail == "there is no dataset 'nothing'; POST /v1/datasets takes one"
        assert world.logged(events.JOB_REFUSED)[0]["field"] == "dataset"
        assert world.ledger.jobs_by_id == {}


async def test_without_a_worker_nothing_is_taken():
    async with running() as world:
        refused = await refusal(world.submit(8))
        assert refused.kind is RefusalKind.CONFLICT
        assert "add one (POST /v1/workers" in refused.detail


async def test_a_sample_longer_than_the_workers_context_is_refused_with_its_line():
    async with running(FakeWorker("a")) as world:
        refused = await refusal(world.submit(8, CONTEXT_LENGTH, rows_per_shard=1024))
        assert (refused.field, refused.line) == ("on_over_long", 2)


async def test_a_store_made_for_something_else_is_refused():
    async with running(FakeWorker("a")) as world:
        await world.submit(8)
        world.store.groups[STORE].attributes["model_fingerprint"] = "of another model"
        refused = await refusal(world.submit(8))
        assert (refused.kind, refused.field) == (RefusalKind.CONFLICT, "store")
        assert "the store has model_fingerprint = 'of another model'" in refused.detail
        assert len(world.ledger.jobs_by_id) == 1


async def test_a_place_that_is_no_store_is_refused():
    async with running(FakeWorker("a")) as world:
        world.store.fail_once("describe", StoreError("store is not empty and no Statetap store: use another location"))
        refused = await refusal(world.submit(8))
        assert (refused.kind, refused.field) == (RefusalKind.CONFLICT, "store")


async def test_a_place_that_cannot_take_the_jobs_shards_is_refused_before_anything_is_there():
    async with running(FakeWorker("a")) as world:
        world.store.fail_once("check", StoreError("a shard may take 6 GiB, an object there 5 at most: submit the job with less"))
        refused = await refusal(world.submit(8))
        assert (refused.kind, refused.field) == (RefusalKind.CONFLICT, "store")
        assert "submit the job with less" in refused.detail
        assert not world.ledger.jobs_by_id


async def test_a_store_without_space_is_refused_with_figures_unless_that_is_to_be_ignored():
    async with running(FakeWorker("a")) as world:
        world.store.free = 100
        refused = await refusal(world.submit(8))
        assert (refused.kind, refused.field) == (RefusalKind.NO_SPACE, "store")
        assert "the job needs 424 bytes, store has 100 free" in refused.detail
        assert "ignore_space" in refused.detail
        job = await world.submit(8, ignore_space=True)
        assert world.statuses(job) == [STORED]


async def test_a_job_that_just_fits_beside_the_reserve_is_taken():
    async with running(FakeWorker("a"), disk_reserve_bytes=1000) as world:
        world.store.free = 1423
        refused = await refusal(world.submit(8))
        assert "1,000 are kept in reserve" in refused.detail
        world.store.free = 1424
        assert world.statuses(await world.submit(8)) == [STORED]


async def test_a_store_that_another_job_is_being_prepared_in_is_refused_for_a_moment():
    async with running(FakeWorker("a")) as world:
        gate, prepare = asyncio.Event(), world.store.prepare

        async def slow(*arguments):
            await gate.wait()
            await prepare(*arguments)

        world.store.prepare = slow
        first = await world.submit(8)
        refused = await refusal(world.submit(8))
        assert (refused.kind, refused.field) == (RefusalKind.CONFLICT, "store")
        assert "submit this one again in a moment" in refused.detail
        elsewhere = await world.submit(8, store="other")
        gate.set()
        await settle()
        second = await world.submit(8)
        assert [world.statuses(job) for job in (first, elsewhere, second)] == [[STORED]] * 3


# --- a store that grows


async def test_a_second_job_comes_after_the_first():
    async with running(FakeWorker("a")) as world:
        first = await world.submit(3, 20)
        second = await world.submit(5, 6, rows_per_shard=None, rows_per_chunk=None)
        spec = (await world.job(second)).spec
        assert (spec.first_row, spec.first_sample) == (32, 2)
        assert (spec.geometry.rows_per_shard, spec.geometry.rows_per_chunk) == (8, 4)
        group = world.store.groups[STORE]
        assert group.statuses == [STORED] * 4
        assert group.columns["id"].tolist() == ["s0", "s1", "s0", "s1"]
        assert len(group.attributes["datasets"]) == 2
        world.assert_stored(first)
        world.assert_stored(second)
        assert world.logged(events.STORE_GROWN)[0]["job"] == second


async def test_a_job_that_compresses_says_so_to_the_store_and_with_every_unit():
    async with running(FakeWorker("a")) as world:
        job = await world.submit(3, 20, compression=Compression.ZSTD)
        world.assert_stored(job)
        assert world.store.groups[STORE].compression is Compression.ZSTD
        assert {unit.compression for unit in world.writer.written} == {Compression.ZSTD}
        refused = await refusal(world.submit(5))
        assert (refused.kind, refused.field) == (RefusalKind.CONFLICT, "store")
        assert "the store has compression = 'zstd', the job needs 'none'; use another store, or make the job" in refused.detail


async def test_tokens_and_masks_are_written_before_the_first_unit():
    async with running(FakeWorker("a")) as world:
        world.workers["a"].client.up = False
        world.pool.drivers[0]._nudged.set()
        await world.passes(3)
        job = await world.submit(3, 5)
        group = world.store.groups[STORE]
        tokens = [world.datasets._datasets[(await world.job(job)).spec.dataset].input_ids(i).tolist() for i in (0, 1)]
        assert group.input_ids.tolist() == tokens[0] + tokens[1]
        assert group.loss_mask.tolist() == [1] * 8


async def test_a_job_of_which_nothing_is_left_is_completed_at_once():
    async with running(FakeWorker("a")) as world:
        job = await world.submit(CONTEXT_LENGTH, on_over_long="skip")
        record = await world.job(job)
        assert (record.state, record.counts.skipped) == (JobState.COMPLETED, 1)
        assert world.store.groups[STORE].statuses == [SampleStatus.SKIPPED]


# --- again


async def job_with_holes(world):
    """Five samples in three units of which 1 and 4 failed."""
    script = world.workers["a"].client.script
    script.extend([Answer(), Refuse(400), Answer(), Answer(), Refuse(400)])
    job = await world.submit(4, 4, 8, 2, 3)
    assert world.statuses(job) == [STORED, FAILED, STORED, STORED, FAILED]
    return job


async def test_failed_samples_are_tried_again_in_new_units_at_the_end():
    async with running(FakeWorker("a")) as world:
        job = await job_with_holes(world)
        before = dict(world.ledger.jobs_by_id[job].samples)
        objects = dict(world.store.groups[STORE].objects)
        await world.desk.retry(job)
        await settle()
        after = world.ledger.jobs_by_id[job].samples
        assert world.statuses(job) == [STORED] * 5
        assert [after[i] for i in (0, 2, 3)] == [before[i] for i in (0, 2, 3)]
        assert [(after[i].unit, after[i].row_start) for i in (1, 4)] == [(3, 24), (3, 28)]
        assert (await world.job(job)).state is JobState.COMPLETED
        group = world.store.groups[STORE]
        assert group.columns["row_start"].tolist() == [0, 24, 8, 16, 28]
        assert group.statuses == [STORED] * 5
        assert objects.items() <= group.objects.items()
        world.assert_stored(job)


async def test_a_retry_comes_after_what_another_job_put_into_the_store():
    async with running(FakeWorker("a")) as world:
        job = await job_with_holes(world)
        other = await world.submit(8)
        await world.desk.retry(job)
        await settle()
        assert world.ledger.jobs_by_id[job].samples[1].row_start == 32
        assert world.store.groups[STORE].statuses == [STORED] * 6
        world.assert_stored(job)
        world.assert_stored(other)


async def test_a_sample_may_be_tried_again_and_again():
    async with running(FakeWorker("a")) as world:
        job = await job_with_holes(world)
        world.workers["a"].client.script.extend([Refuse(400), Answer()])
        await world.desk.retry(job)
        await settle()
        assert world.statuses(job).count(FAILED) == 1
        await world.desk.retry(job)
        await settle()
        assert world.statuses(job) == [STORED] * 5
        world.assert_stored(job)


async def test_there_must_be_something_to_try_again():
    async with running(FakeWorker("a")) as world:
        job = await world.submit(8)
        refused = await refusal(world.desk.retry(job))
        assert refused.kind is RefusalKind.CONFLICT
        assert refused.detail == (
            f"job {job} is completed, with 0 failed samples; only a completed job's failed samples can be tried again"
        )


async def test_a_running_job_is_not_tried_again():
    async with running(FakeWorker("a")) as world:
        world.workers["a"].client.up = False
        world.pool.drivers[0]._lose("away")
        job = await world.submit(8)
        assert "is running" in (await refusal(world.desk.retry(job))).detail


async def test_what_was_refused_for_what_it_is_cannot_be_tried_again():
    async with running(FakeWorker("a")) as world:
        job = await job_with_holes(world)
        for index in (1, 4):
            world.ledger.jobs_by_id[job].samples[index] = _without_unit(world.ledger.jobs_by_id[job].samples[index])
        assert "each was refused for what it is" in (await refusal(world.desk.retry(job))).detail


async def test_nothing_is_tried_again_in_a_store_that_is_gone():
    async with running(FakeWorker("a")) as world:
        job = await job_with_holes(world)
        del world.store.groups[STORE]
        refused = await refusal(world.desk.retry(job))
        assert f"the store of job {job} is gone from store" in refused.detail
        assert (await world.job(job)).state is JobState.COMPLETED


def _without_unit(sample):
    from dataclasses import replace

    return replace(sample, unit=None, row_start=-1)
