"""Captures that are out of all proportion to what their job has seen, and what its report tells of the others."""

import asyncio

import numpy as np
from statetap.core.norms import RowKind
from statetap.core.records import JobState, SampleStatus
from statetap.telemetry import events

from tests.fakes.harness import ARRAYS, FakeWorker, World, hidden_rows, running

STORED, FAILED = SampleStatus.STORED, SampleStatus.FAILED
GOOD = 70
# Every value of the fake model is in the thousands for these tokens.
TOKENS = [[400 + (7 * sample + row) % 200 for row in range(2)] for sample in range(GOOD + 1)]
FAR_TOO_LARGE = 1000.0


class Distorting(FakeWorker):
    """Gives its last sample so many times too large, as often as it is told to."""

    def __init__(self, name, *by):
        super().__init__(name)
        self.by = list(by)
        self.publish = self._publish

    def _publish(self, sample):
        last = sample.token_ids.tolist() == TOKENS[-1]
        self.put(sample, times=self.by.pop(0) if last and self.by else 1.0)


async def run_job(world):
    job = await world.submit(dataset=await world.dataset(tokens=TOKENS))
    await world.passes(100)
    return job


def reasons(world):
    return [line["reason"] for line in world.logged(events.CAPTURE_REFUSED)]


async def test_a_capture_that_is_far_too_large_is_refused_and_made_good():
    async with running(Distorting("a", FAR_TOO_LARGE)) as world:
        job = await run_job(world)
        assert world.statuses(job) == [STORED] * len(TOKENS)
        world.assert_stored(job)
        (reason,) = reasons(world)
        assert reason.startswith("bad_values: aux_hidden_states: row 0 has a norm of ")
        assert " in layer 1 of 2, the job has seen " in reason
        assert world.metric("capture_refusals_total", reason="bad_values") == 1
        assert world.held_dumps == []


async def test_what_a_worker_gives_twice_is_what_its_model_computes():
    worker = Distorting("a", *[FAR_TOO_LARGE] * 9)
    async with running(worker) as world:
        job = await run_job(world)
        assert (await world.job(job)).state is JobState.COMPLETED
        assert world.statuses(job) == [STORED] * len(TOKENS)
        assert len(reasons(world)) == 1
        assert len(worker.by) == 7
        largest = max(summary.largest for *_, summary in (await world.desk.view(job)).norms)
        assert largest > 1000 * 8 * min(map(min, TOKENS)), "what is stored is told"


async def test_what_never_comes_twice_uses_up_the_attempts():
    async with running(Distorting("a", 1e3, 1e4, 1e5), attempts_per_sample=3) as world:
        job = await run_job(world)
        assert world.statuses(job) == [STORED] * GOOD + [FAILED]
        assert len(reasons(world)) == 3
        assert world.reasons(job)[-1].startswith("bad_values: aux_hidden_states: row 0 has a norm of ")


async def test_what_was_seen_survives_a_restart():
    worker = Distorting("a", FAR_TOO_LARGE)
    world = World(worker)
    await world.start()
    held = asyncio.get_running_loop().create_future()
    distort = worker._publish

    def nothing_of_the_last(sample):
        if sample.token_ids.tolist() != TOKENS[-1]:
            distort(sample)
        elif not held.done():
            held.set_result(None)

    worker.publish = nothing_of_the_last
    job = await world.submit(dataset=await world.dataset(tokens=TOKENS))
    assert held.done()
    assert world.statuses(job)[-1] is SampleStatus.PENDING
    await world.kill()
    worker.publish = distort
    await world.start()
    await world.passes(100)
    assert world.statuses(job) == [STORED] * len(TOKENS)
    world.assert_stored(job)
    (reason,) = reasons(world)
    assert reason.startswith("bad_values: aux_hidden_states: row 0 has a norm of ")
    await world.stop()


async def test_the_report_is_of_what_is_stored_and_the_same_after_a_restart():
    world = World(Distorting("a", FAR_TOO_LARGE))
    await world.start()
    job = await run_job(world)
    view = await world.desk.view(job)
    told = {(array, slot, kind): summary for array, slot, kind, summary in view.norms}
    assert len(told) == 6
    tokens = np.array(TOKENS, np.int32)
    for array in ARRAYS:
        rows = np.stack([hidden_rows(array, sample) for sample in tokens]).astype(np.float64)
        norms = np.linalg.norm(rows, axis=-1).reshape(len(TOKENS), 2, -1)
        for slot in range(norms.shape[2]):
            for row, kind in enumerate((RowKind.FIRST, RowKind.LATER)):
                summary, wanted = told[array.name, slot, kind], norms[:, row, slot]
                assert summary.count == len(TOKENS)
                np.testing.assert_allclose(
                    (summary.least, summary.mean, summary.largest), (wanted.min(), wanted.mean(), wanted.max()), rtol=1e-5
                )
    (listed,) = (await world.desk.list(limit=10, cursor=None)).items
    assert listed.norms == ()
    await world.stop()
    await world.start()
    assert (await world.desk.view(job)).norms == view.norms
    await world.stop()
