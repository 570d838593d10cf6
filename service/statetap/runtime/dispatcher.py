"""Gives every free worker something to do: a unit that waits for a worker, or the next one of the most urgent job.

A unit's bytes are reserved in the worker's dump directory before it is leased, so that a started unit can always finish. While a
worker is at work, the next unit is leased ahead for it, where there is room for both: at the end of the one it goes on with the
other without waiting for the ledger. What nobody has begun is given back when its job is paused, or when no worker that may work
on it is left to hold its room. What somebody has begun comes before all else.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from math import inf

from structlog.typing import FilteringBoundLogger

from statetap.core.norms import JobNorms
from statetap.core.records import JobRecord, JobSpec, JobState, SampleRecord, SampleStatus, UnitLease
from statetap.core.reservation import unit_dump_bytes
from statetap.core.routing import UnitId
from statetap.runtime.driver import WorkerDriver
from statetap.runtime.open_datasets import OpenDatasets
from statetap.runtime.pool import WorkerPool
from statetap.runtime.run_ports import Ending, RunPorts
from statetap.runtime.turn import Turn
from statetap.runtime.unit_run import UnitRun
from statetap.telemetry import events

# A unit that was given back so often, one time after the other, is not to be tried on and on: its job is paused.
STRIKES = 3
PAUSE_AFTER_ERROR_SECONDS = 1.0
Wanted = Callable[[UnitRun, str, Callable[[Sequence[str]], bool]], Iterator[int]]
"""The samples of a run that a worker, by its name, may be asked for; the predicate is that of `Turn`."""


class Dispatcher:
    """Owns the runs. `jobs` are those that are not over.

    `on_ending` hears of each run that ended, `on_attempt` of (job, worker, `attempts` or `lost`), `on_strike` of a job to pause.
    """

    def __init__(
        self,
        owner: str,
        jobs: Mapping[str, JobRecord],
        pool: WorkerPool,
        datasets: OpenDatasets,
        ports: RunPorts,
        *,
        on_ending: Callable[[Ending], Awaitable[None]],
        norms_of: Callable[[str], Awaitable[JobNorms]],
        on_attempt: Callable[[str, str, str], None],
        on_strike: Callable[[str, str], Awaitable[None]],
    ) -> None:
        self._jobs = jobs
        self._owner = owner
        self._pool = pool
        self._datasets = datasets
        self._ports = ports
        self._on_ending = on_ending
        self._norms_of = norms_of
        self._on_attempt = on_attempt
        self._on_strike = on_strike
        self._runs: dict[UnitId, UnitRun] = {}
        self._turns: dict[str, UnitId] = {}
        # Workers for which nothing can be leased ahead until their turn is over, or they have more room.
        self._not_ahead: set[str] = set()
        self._withdrawn: set[UnitId] = set()
        # The jobs that were paused, and the workers that were not away, when it was last seen to.
        self._withdrawn_for: tuple[set[str], set[str]] = (set(), set())
        self._strikes: Counter[UnitId] = Counter()
        self._waiting: set[str] = set()
        self._endings: asyncio.Queue[Ending] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def _log(self) -> FilteringBoundLogger:
        return self._ports.log

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._dispatch(), name="dispatch"),
            asyncio.create_task(self._end_runs(), name="endings"),
            asyncio.create_task(self._renew(), name="leases"),
        ]
        self._pool.changed.set()

    async def stop(self, drain_seconds: float) -> None:
        """Lease no more; wait for what is in flight or being written, within the limit; leave the rest to the next start."""
        for task in self._tasks[:1]:
            task.cancel()
        for run in self._runs.values():
            run.close_to_workers()
        deadline = self._ports.clock.monotonic() + drain_seconds
        while (self._turns or any(run.finishing for run in self._runs.values())) and self._ports.clock.monotonic() < deadline:
            await self._ports.clock.sleep(0.05)
        for run in list(self._runs.values()):
            await run.stop()
        # What has ended is to be recorded whole: a commit's event is not made up for at the next start.
        await self._endings.join()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def forget(self, job: str) -> None:
        """A job is over: how often its units were given back does not matter any more."""
        for unit in [unit for unit in self._strikes if unit[0] == job]:
            del self._strikes[unit]

    def open_runs(self, job: str) -> list[UnitRun]:
        return [run for (of, _), run in self._runs.items() if of == job]

    # --- who does what --------------------------------------------------------------------------------------------------

    async def _dispatch(self) -> None:
        while True:
            await self._pool.changed.wait()
            self._pool.changed.clear()
            try:
                self._tell_who_waits()
                await self._withdraw()
                for driver in self._pool.drivers:
                    if driver.free and driver.turn is None and (run := await self._find_run(driver)) is not None:
                        self._give_turn(driver, run)
                # One at a time: a worker that has become free meanwhile comes first.
                if await self._lease_ahead():
                    self._pool.changed.set()
            except Exception:  # noqa: BLE001 - whatever it was, the next one must still be served
                self._log.exception(events.DISPATCH_FAILED)
                await self._ports.clock.sleep(PAUSE_AFTER_ERROR_SECONDS)
                self._pool.changed.set()

    def _tell_who_waits(self) -> None:
        """Once for each time that a job has no worker left."""
        barred = any(driver.machine.barred is not None for driver in self._pool.drivers)
        running = [job for job in self._jobs.values() if job.state is JobState.RUNNING] if barred else []
        reasons = {job.id: reason for job in running if (reason := self._pool.barred_from(job.spec)) is not None}
        for job in reasons.keys() - self._waiting:
            self._log.warning(events.JOB_WAITING, job=job, reason=reasons[job])
        self._waiting = set(reasons)

    def _give_turn(self, driver: WorkerDriver, run: UnitRun) -> None:
        """Let the worker work on the run, then on whatever is ready for it: it does not wait for others that are seen to."""

        async def turns(run: UnitRun | None) -> None:
            while run is not None:
                try:
                    await Turn(run, driver, self._elsewhere(run)).take()
                except Exception as error:  # noqa: BLE001 - a turn must not fail silently
                    self._log.exception(events.UNIT_CRASHED, job=run.id[0], unit=run.id[1], worker=driver.name)
                    await run.give_up(f"{type(error).__name__}: {error}")
                if (run := self._ready_run(driver)) is not None:
                    self._lend(driver, run)
                    self._pool.changed.set()

        def over(_: asyncio.Task[None]) -> None:
            driver.turn = None
            del self._turns[driver.name]
            self._pool.changed.set()

        self._lend(driver, run)
        driver.turn = asyncio.create_task(turns(run), name=f"turn {driver.name}")
        # Not at the turn's own end: a task that is cancelled before its first step has none.
        driver.turn.add_done_callback(over)

    def _lend(self, driver: WorkerDriver, run: UnitRun) -> None:
        self._turns[driver.name] = run.id
        self._not_ahead.discard(driver.name)

    def _elsewhere(self, run: UnitRun) -> Callable[[Sequence[str]], bool]:
        """A worker without room for the unit does not count: two units might wait for each other's room for ever."""
        return lambda excluded: any(
            driver.name not in excluded and driver.space.fits(run.id, run.dump_bytes(driver.chunk))
            for driver in self._pool.serving(run.spec)
        )

    async def _find_run(self, driver: WorkerDriver) -> UnitRun | None:
        """An open unit with samples that wait for a worker like this one, else a new lease: of a more urgent job than what was
        only leased ahead, if there is one.

        A worker on probation gets a sample that has not failed yet, if there is one: what fails at that says something.
        """
        on_probation = driver.machine.on_probation
        wanted = UnitRun.fresh_for if on_probation else UnitRun.waiting_for
        run = self._open_run(driver, wanted)
        if run is None or not run.begun:
            if (leased := await self._new_run(driver, instead_of=run)) is not None:
                return leased
            # Looked for again: meanwhile that one may have ended.
            run = self._open_run(driver, wanted)
        if run is None and on_probation:
            run = self._open_run(driver, UnitRun.waiting_for)
        # Without room, its turn still comes before any new unit, or it might wait for ever.
        return run if run is not None and self._reserve(driver, run) else None

    def _ready_run(self, driver: WorkerDriver) -> UnitRun | None:
        """What a free worker can go on with at once: an open unit, unless one that is more urgent might be leased."""
        if not driver.free or driver.machine.on_probation:
            return None
        run = self._open_run(driver, UnitRun.waiting_for)
        if run is None or not (run.begun or self._is_most_urgent(driver, run)):
            return None
        return run if self._reserve(driver, run) else None

    def _is_most_urgent(self, driver: WorkerDriver, run: UnitRun) -> bool:
        """Whether its job runs, and comes before all others that this worker may work on."""
        running = (job for job in self._jobs.values() if job.state is JobState.RUNNING and self._may_work_on(driver, job.spec))
        return run.id[0] == min((job.id for job in running), key=self._urgency, default=None)

    def _reserve(self, driver: WorkerDriver, run: UnitRun) -> bool:
        """Keep room for the run in the worker's dump directory. False: there is none."""
        if not driver.space.fits(run.id, need := run.dump_bytes(driver.chunk)):
            return False
        driver.space.reserve(run.id, need)
        return True

    def _open_run(self, driver: WorkerDriver, wanted: Wanted) -> UnitRun | None:
        """The first open unit that this worker may work on, has no other worker, and wants one for some of its samples.

        What the worker itself works on, or did a moment ago, is among them.
        """
        lent = {unit for name, unit in self._turns.items() if name != driver.name}
        waiting = (run for run in self._runs.values() if run.id not in lent and run.is_waiting)
        for run in sorted(waiting, key=lambda run: self._order(driver, run)):
            if not self._may_work_on(driver, run.spec):
                continue
            too_large = run.dump_bytes(driver.chunk) > driver.space.capacity_bytes
            if not too_large and next(wanted(run, driver.name, self._elsewhere(run)), None) is not None:
                return run
        return None

    def _order(self, driver: WorkerDriver, run: UnitRun) -> tuple[float, ...]:
        """First what is begun: its dumps take room until it ends. Then by job, and what was leased ahead for this very worker."""
        return (0,) if run.begun else (1, *self._urgency(run.id[0]), not driver.space.holds(run.id))

    def _urgency(self, job: str) -> tuple[float, float]:
        """Of two jobs, the one with the lesser comes first."""
        record = self._jobs.get(job)
        return (inf, inf) if record is None else (-record.priority, record.created_at)

    async def _new_run(self, driver: WorkerDriver, *, instead_of: UnitRun | None) -> UnitRun | None:
        """The next unit of the most urgent job that this worker may work on and has room for; of a more urgent one than that."""
        least = (inf, inf) if instead_of is None else self._urgency(instead_of.id[0])
        for job in sorted(self._jobs.values(), key=lambda job: self._urgency(job.id)):
            if self._urgency(job.id) >= least:
                break
            if job.state is JobState.RUNNING and self._may_work_on(driver, job.spec):
                leased = await self._lease(driver, job)
                if leased is not None:
                    return leased
        return None

    def _may_work_on(self, driver: WorkerDriver, spec: JobSpec) -> bool:
        return driver.tap is not None and self._pool.serves(driver.tap, spec)

    async def _lease_ahead(self) -> bool:
        """Lease the next unit for some worker that is at work, if it has none yet to go on with, or of a less urgent job."""
        for driver in self._pool.drivers:
            away = driver.machine.draining or driver.machine.is_held
            if driver.name not in self._turns or away or driver.name in self._not_ahead:
                continue
            self._not_ahead.add(driver.name)
            if await self._new_run(driver, instead_of=self._spare(driver)) is not None:
                return True
        return False

    async def _withdraw(self) -> None:
        """Give back what nobody has begun, nor will soon. That a unit comes back like this says nothing against it."""
        paused = {job.id for job in self._jobs.values() if job.state is JobState.PAUSED}
        at_work = {driver.name for driver in self._pool.at_work}
        if (paused, at_work) == self._withdrawn_for:
            return
        for run in list(self._runs.values()):
            # Asked anew each time: while one is given up, a worker may go on with another.
            if run.begun or run.id in self._withdrawn or run.id in self._turns.values():
                continue
            if run.id[0] in paused:
                reason = "its job is paused"
            elif not any(driver.space.holds(run.id) for driver in self._pool.serving(run.spec)):
                reason = "no worker that may work on it holds its room"
            else:
                continue
            self._withdrawn.add(run.id)
            await run.give_up(reason)
        self._withdrawn_for = (paused, at_work)

    def _spare(self, driver: WorkerDriver) -> UnitRun | None:
        """What was leased ahead for this worker and waits; of the most urgent job, if there are several."""
        lent = set(self._turns.values())
        held = (run for run in self._runs.values() if not run.begun and run.id not in lent and driver.space.holds(run.id))
        return min((run for run in held if run.is_waiting), key=lambda run: self._urgency(run.id[0]), default=None)

    async def _lease(self, driver: WorkerDriver, job: JobRecord) -> UnitRun | None:
        """Reserve the bytes of the job's next unit, then lease it. None: there is no unit, or no room for it now."""
        ledger, clock = self._ports.ledger, self._ports.clock
        unit = await ledger.peek_unit(job.id, now=clock.now())
        if unit is None or (job.id, unit.index) in self._runs:
            # Given back but not ended yet, or its lease ran out unrenewed: two runs of one unit would end each other.
            return None
        lengths = (s.length for s in unit.samples if s.status is SampleStatus.PENDING)
        need = unit_dump_bytes(lengths, job.spec.capture.hidden_arrays(job.spec.model), driver.chunk)
        key = (job.id, unit.index)
        if not driver.space.fits(key, need):
            return None
        driver.space.reserve(key, need)
        lease = await ledger.lease_unit(job.id, self._owner, now=clock.now(), ttl_seconds=self._ports.settings.lease_seconds)
        if lease is None or lease.unit.index != unit.index:
            driver.space.free(key)
            if lease is not None:
                await ledger.give_back(lease)
            return None
        try:
            run = await self._begin(lease, job, unit.samples)
        except Exception as error:
            # The lease must not outlive this, or it would be renewed for ever; and the unit must not fail for ever either.
            await ledger.give_back(lease)
            self._endings.put_nowait(Ending(key, reason=f"{type(error).__name__}: {error}"))
            raise
        self._log.info(
            events.UNIT_LEASED, job=job.id, unit=unit.index, worker=driver.name, fence=lease.fence, samples=len(unit.samples)
        )
        self._runs[key] = self._pool.inboxes.open[key] = run
        self._pool.inboxes.expected_back.discard(key)
        try:
            run.recall(self._pool.drivers)
        except Exception as error:
            await run.give_up(f"{type(error).__name__}: {error}")
            raise
        return run

    async def _begin(self, lease: UnitLease, job: JobRecord, samples: Sequence[SampleRecord]) -> UnitRun:
        return UnitRun(
            lease,
            job.spec,
            samples,
            await self._datasets.get(job.spec.dataset),
            await self._norms_of(job.id),
            self._ports,
            changed=self._pool.changed.set,
            attempted=lambda worker, what: self._on_attempt(job.id, worker, what),
            ended=self._endings.put_nowait,
            blaming=self._pool.blaming,
        )

    # --- what became of it ----------------------------------------------------------------------------------------------

    async def _end_runs(self) -> None:
        """One ending after the other, so that what is recorded of a job is recorded in order."""
        while True:
            ending = await self._endings.get()
            self._runs.pop(ending.unit, None)
            self._pool.inboxes.open.pop(ending.unit, None)
            self._pool.blaming.forget_unit(ending.unit)
            self._not_ahead -= {driver.name for driver in self._pool.drivers if driver.space.holds(ending.unit)}
            self._pool.free_everywhere(ending.unit)
            try:
                await self._on_ending(ending)
                await self._count_strike(ending)
            except Exception:  # noqa: BLE001 - whatever it was, the next one must still be served
                self._log.exception(events.DISPATCH_FAILED)
            self._pool.changed.set()
            self._endings.task_done()

    async def _count_strike(self, ending: Ending) -> None:
        if ending.unit in self._withdrawn:
            self._withdrawn.discard(ending.unit)
            return
        if ending.counts is not None or ending.unit[0] not in self._jobs:
            self._strikes.pop(ending.unit, None)
            return
        self._strikes[ending.unit] += 1
        if self._strikes[ending.unit] >= STRIKES:
            del self._strikes[ending.unit]
            await self._on_strike(ending.unit[0], ending.reason or "")

    async def _renew(self) -> None:
        while True:
            await self._ports.clock.sleep(self._ports.settings.lease_seconds / 3)
            try:
                await self._ports.ledger.renew_leases(
                    self._owner, now=self._ports.clock.now(), ttl_seconds=self._ports.settings.lease_seconds
                )
            except Exception:  # noqa: BLE001 - a lease outlasts two renewals that fail
                self._log.exception(events.DISPATCH_FAILED)
