"""Seeded schedules of faults in virtual time: the whole runtime over fakes, no disk, no process, a clock of its own."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from random import Random

from statetap.core.capture import reason_kind
from statetap.core.job import JobState
from statetap.core.records import SampleStatus
from statetap.core.spec import Identity
from statetap.ports import StoreError, StoreFull
from statetap.telemetry import events

from tests.chaos.outcome import Outcome
from tests.chaos.virtual_world import DOOMS, REQUEST_FAULTS, TOKEN_FAULTS, ChaosWorld
from tests.fakes.harness import TAP, FakeWorker

LONGEST_SECONDS = 600.0
STEP_SECONDS = 30.0
# What a clock that counts seconds since 1970 can tell apart.
SHORTEST_SECONDS = 1e-6
OVER = (JobState.COMPLETED, JobState.CANCELLED, JobState.FAILED)


@dataclass(frozen=True)
class Spell:
    """A fault that comes at a time and goes again. `unforeseen`: errors that the service logs as such are explained by it."""

    begin: Callable[[ChaosWorld], Awaitable[None] | None]
    end: Callable[[ChaosWorld], Awaitable[None] | None] | None = None
    longest_seconds: float = 20.0
    unforeseen: bool = False


def _set(where: str, name: str, value: object) -> Callable[[ChaosWorld], None]:
    return lambda world: setattr(getattr(world, where), name, value)


async def _kill(world: ChaosWorld) -> None:
    """At any step of what the next moment brings; workers run on, and may publish what nobody waits for any more."""
    if not world.running:
        return
    if (due := world.clock.next_waking) is not None:
        world.clock.advance(max(due, 0.0))
    for _ in range(world.random.randrange(40)):
        await asyncio.sleep(0)
    running = [(worker, sample) for worker in world.workers.values() for sample in worker.client.in_flight]
    await world.kill()
    for worker, sample in running:
        if world.random.random() < 0.5:
            worker.put(sample)


async def _stop(world: ChaosWorld) -> None:
    if world.running:
        stopping = asyncio.create_task(world.stop(drain_seconds=1.0))
        while not stopping.done():
            await world.passes(0.1)
        await stopping


async def _start(world: ChaosWorld) -> None:
    if not world.running:
        await world.start()


def _a_worker(world: ChaosWorld) -> FakeWorker:
    return world.random.choice(list(world.workers.values()))


def _go_away(world: ChaosWorld) -> None:
    worker = _a_worker(world)
    worker.client.up = False
    world.unreachable.add(worker.name)


def _come_back(world: ChaosWorld) -> None:
    for name in world.unreachable:
        world.workers[name].client.up = True
    world.unreachable.clear()


def _jump(world: ChaosWorld) -> None:
    world.clock.offset += world.random.choice((-86400.0, -90.0, 90.0, 86400.0))


def _some(method: str, error: Exception, fakes: str) -> Callable[[ChaosWorld], None]:
    def begin(world: ChaosWorld) -> None:
        for _ in range(world.random.randint(1, 2)):
            getattr(world, fakes).fail_once(method, error)

    return begin


async def _pause(world: ChaosWorld) -> None:
    for job in list(world.states.active.values()):
        if world.running and job.state is JobState.RUNNING:
            await world.desk.pause(job.id)


async def _resume(world: ChaosWorld) -> None:
    for job in list(world.states.active.values()):
        if world.running and job.state is JobState.PAUSED:
            await world.desk.resume(job.id)


SPELLS: dict[str, Spell] = {
    "service killed": Spell(_kill, _start),
    "service stopped": Spell(_stop, _start),
    "worker away": Spell(_go_away, _come_back),
    "worker started again": Spell(lambda world: _a_worker(world).restart()),
    "ledger locked": Spell(_set("ledger", "locked", True), _set("ledger", "locked", False), unforeseen=True),
    "commit's answer lost": Spell(_set("ledger", "lost_answers", 1), unforeseen=True),
    "disk full in mid-shard": Spell(_some("write", StoreFull("no space left"), "writer")),
    "store fails": Spell(_some("write", StoreError("Input/output error"), "writer")),
    "projection fails": Spell(_some("write_samples", StoreError("Input/output error"), "store"), unforeseen=True),
    "disk below its reserve": Spell(_set("store", "free", 1000), _set("store", "free", 1 << 50)),
    "inspection crashes": Spell(_some("inspect", MemoryError("no memory"), "inspector"), unforeseen=True),
    "answers' disk full": Spell(
        _set("answers", "broken", OSError(28, "No space left on device")), _set("answers", "broken", None), 3.0, unforeseen=True
    ),
    "clock jumps": Spell(_jump),
    "paused by hand": Spell(_pause, _resume),
}


class VirtualSchedule:
    """One seed: what it draws, and what came of it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random = Random(seed)
        self.strict = random.random() < 0.3
        tap = replace(TAP, identity=Identity.COUNT) if self.strict else TAP
        # Drawn apart, so that the same seed still means the same faults.
        batch_tokens = Random(-seed - 1).choice((None, 0, 6, 12, 100))
        self.world = ChaosWorld(random, *[tap] * random.choice((1, 2, 2, 3)), max_batch_tokens=batch_tokens)
        # By count, samples of one row are nobody's; equal lengths stand in a row as they come.
        self.lengths = [random.randint(2, 8) for _ in range(random.randint(8, 24))]
        self.spells: list[str] = []
        self.paused_by_strikes = 0
        self._draw()

    def _draw(self) -> None:
        random, world = self.random, self.world
        known = [*REQUEST_FAULTS, *([] if self.strict else TOKEN_FAULTS)]
        for _ in range(random.choice((0, 1, 1, 2, 3))):
            world.request_faults[random.randrange(len(self.lengths))] = random.choice(known)
        if random.random() < 0.2:
            world.doomed[random.randrange(len(self.lengths))] = random.choice(list(DOOMS))
        for _ in range(random.choice((0, 1, 1, 2))):
            name = random.choice(list(SPELLS))
            self.spells.append(name)
            spell = SPELLS[name]
            begin = random.uniform(0.0, 6.0)
            world.later(begin, lambda begins=spell.begin: begins(world))
            if spell.end is not None:
                lasts = random.uniform(0.2, spell.longest_seconds)
                world.later(begin + lasts, lambda ends=spell.end: ends(world))

    async def run(self) -> Outcome:
        began = time.monotonic()
        world = self.world
        tasks_before = asyncio.all_tasks()
        await world.start()
        job = await world.submit(*self.lengths)
        problems = await self._until_over(job)
        if not problems:
            problems = self._judge(job)
            await world.stop()
            problems += [f"a task leaked: {task}" for task in asyncio.all_tasks() - tasks_before]
        samples = world.ledger.jobs_by_id[job].samples.values()
        failed = Counter(reason_kind(s.reason or "") for s in samples if s.status is SampleStatus.FAILED)
        return Outcome(
            level="virtual",
            seed=self.seed,
            faults=(*self.spells, *world.took_effect),
            samples=len(self.lengths),
            stored=sum(sample.status is SampleStatus.STORED for sample in samples),
            failed=dict(failed),
            asked_again=world.requests - len(self.lengths),
            seconds=time.monotonic() - began,
            problems=tuple(problems),
        )

    async def _until_over(self, job: str) -> list[str]:
        """Let time pass until the job is over and every fault has come and gone; what is wrong if it never is."""
        world = self.world
        while world.actions or not world.running or (await world.job(job)).state not in OVER:
            if world.clock.monotonic() > LONGEST_SECONDS:
                record = world.ledger.jobs_by_id[job].record
                workers = {worker.record.name: (worker.state, worker.reason) for worker in world.pool.list()}
                return [f"after {LONGEST_SECONDS:g} s the job is still {record.state} ({record.reason}); workers: {workers}"]
            world.actions.sort(key=lambda action: action[0])
            now = world.clock.monotonic()
            until = min(world.actions[0][0] if world.actions else now + STEP_SECONDS, now + STEP_SECONDS)
            await world.passes(max(until - now, SHORTEST_SECONDS))
            while world.actions and world.actions[0][0] <= world.clock.monotonic():
                done = world.actions.pop(0)[1]()
                if inspect.isawaitable(done):
                    await done
            await self._look_after(job)
        # What the last dumps and the last endings bring.
        await world.passes(STEP_SECONDS)
        return []

    async def _look_after(self, job: str) -> None:
        """A unit that failed again and again pauses its job, for a person to look: here, one who says go on."""
        if not self.world.running or self.world.actions:
            return
        record = await self.world.job(job)
        if record.state is JobState.PAUSED and self._expects_errors:
            self.paused_by_strikes += 1
            await self.world.desk.resume(job)

    @property
    def _expects_errors(self) -> bool:
        return any(SPELLS[name].unforeseen or name == "store fails" for name in self.spells)

    def _judge(self, job: str) -> list[str]:
        """Everything that is not as it must be."""
        world = self.world
        problems: list[str] = []
        record = world.ledger.jobs_by_id[job]
        if record.record.state is not JobState.COMPLETED:
            problems.append(f"the job is {record.record.state}: {record.record.reason}")
        for sample in record.samples.values():
            problems += self._unexplained(sample.sample, sample.status, sample.reason)
        try:
            world.assert_stored(job)
        except AssertionError as error:
            problems.append(f"stored bytes differ: {error}")
        column = [status.name for status in world.store.groups["store"].statuses]
        if column != [status.name for status in world.statuses(job)]:
            problems.append(f"the store says {column}, the ledger {world.statuses(job)}")
        committed = [event.data["unit"] for event in world.ledger.log if event.name == events.UNIT_COMMITTED]
        if sorted(committed) != sorted(record.units):
            problems.append(f"units {committed} were committed, of {sorted(record.units)}")
        problems += [f"a dump was left: {dump}" for dump in world.held_dumps]
        problems += [f"answers were left: {unit}" for unit in world.answers.kept]
        problems += [f"{d.name} holds {d.space.held_bytes} reserved bytes" for d in world.pool.drivers if d.space.held_bytes]
        if not self._expects_errors:
            crashes = [*world.logged(events.UNIT_CRASHED), *world.logged(events.DISPATCH_FAILED)]
            problems += [f"an error that nobody foresaw: {line.get('exception') or line}" for line in crashes]
        return problems

    def _unexplained(self, sample: int, status: SampleStatus, reason: str | None) -> list[str]:
        world = self.world
        hits = [str(hit) for hit in world.hits.get(sample, [])]
        if status is SampleStatus.STORED:
            return [f"sample {sample} is stored, although no worker could capture it"] if sample in world.doomed else []
        if status is not SampleStatus.FAILED:
            return [f"sample {sample} ended as {status.name}: {reason}"]
        enough = sample in world.doomed or len(hits) >= world.settings.attempts_per_sample
        if reason_kind(reason or "") in hits and enough:
            return []
        return [f"sample {sample} failed ({reason}), which {hits or 'nothing'} does not explain"]


def run_virtual(seed: int) -> Outcome:
    """One schedule in an event loop of its own."""
    return asyncio.run(VirtualSchedule(seed).run())
