"""A service that runs for months has had any number of jobs: it holds nothing for those that are over, and still answers."""

from collections import deque
from collections.abc import Mapping
from dataclasses import fields, is_dataclass

import pytest
from statetap.core.records import JobState
from statetap.ports import StoreError, StoreFull, StoreMismatch
from statetap.runtime import job_states
from statetap.runtime.dispatcher import STRIKES
from statetap.runtime.views import WorkerTally
from statetap.telemetry import events

from tests.fakes.harness import FakeWorker, running
from tests.fakes.inference import Hang

OURS = ("statetap.runtime.", "statetap.core.")
HISTORIES = 20


@pytest.fixture
def few_tallies(monkeypatch):
    monkeypatch.setattr(job_states, "TALLIES_KEPT", 2)


def held(world):
    """How many things the runtime's parts hold in all their containers together, but for the last few requests of each worker."""
    count, seen = 0, {id(driver.meter.tuner) for driver in world.pool.drivers}
    stack = [world.service, world.states, world.course, world.admission, world.desk, world.pool]
    while stack:
        found = stack.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, Mapping):
            count += len(found)
            stack += [*found.keys(), *found.values()]
        elif isinstance(found, list | set | deque | tuple | frozenset):
            count += len(found)
            stack += found
        elif type(found).__module__.startswith(OURS):
            names = [field.name for field in fields(found)] if is_dataclass(found) else vars(found)
            stack += [getattr(found, name) for name in names]
    return count


async def complete(world):
    job = await world.submit(8, 8, store="whole")
    assert (await world.job(job)).state is JobState.COMPLETED
    await world.desk.wait_for_event(job, 0, timeout_seconds=60)


async def fail(world):
    """While it was prepared, after the projection knew of it."""
    world.store.fail_once("write_samples", StoreMismatch("dtype", "float16", "float32"))
    job = await world.submit(8, store="failing")
    assert (await world.job(job)).state is JobState.FAILED


async def cancel(world):
    """While it waited for room."""
    world.store.fail_once("prepare", StoreFull("no space left"))
    job = await world.submit(8, store="full")
    assert (await world.desk.cancel(job)).record.state is JobState.CANCELLED


async def give_back(world):
    """While its unit had come back twice, and was under way once more."""
    client = world.workers["a"].client
    before = len(world.logged(events.UNIT_GIVEN_BACK))
    client.script.extend([client.default, client.default, Hang()])
    for _ in range(STRIKES - 1):
        world.writer.fail_once("write", RuntimeError("a bug"))
    job = await world.submit(8, store="returned")
    assert len(world.logged(events.UNIT_GIVEN_BACK)) - before == STRIKES - 1
    assert (await world.desk.cancel(job)).record.state is JobState.CANCELLED
    client.wake()
    await world.passes(10)


@pytest.mark.parametrize("course", [complete, fail, cancel, give_back])
async def test_nothing_is_held_for_a_job_that_is_over(few_tallies, course):
    async with running(FakeWorker("a")) as world:
        for _ in range(HISTORIES):
            await course(world)
        before = held(world)
        for _ in range(3):
            await course(world)
        assert held(world) == before


async def test_what_was_counted_of_a_job_can_be_told_long_after(few_tallies):
    async with running(FakeWorker("a")) as world:
        first = await world.submit(8, 8)
        told = (await world.desk.view(first)).workers
        for _ in range(3):
            await world.submit(8)
        assert first not in world.states._tallies
        assert (await world.desk.view(first)).workers == told == {"a": WorkerTally(stored=2, attempts=2)}


async def test_the_store_of_a_job_that_failed_is_left_alone():
    async with running(FakeWorker("a"), projection_seconds=5) as world:
        world.store.fail_once("write_samples", StoreMismatch("dtype", "float16", "float32"))
        await world.submit(8)
        world.store.fail_once("write_samples", StoreError("read-only file system"))
        await world.passes(20)
        assert world.logged(events.PROJECTION_FAILED) == []
