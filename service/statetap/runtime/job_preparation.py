"""Makes jobs ready to run: the store exists and has their rows and tokens. It takes as long as it takes, and never just stops.

A store without room is waited for without end; whatever else goes wrong is tried again a few times before it fails the job.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from statetap.core.job import PlanFailed, Planned
from statetap.core.records import JobState
from statetap.ports import Store, StoreFull, StoreMismatch
from statetap.runtime.job_states import JobStates
from statetap.runtime.open_datasets import OpenDatasets
from statetap.runtime.preparation import prepare
from statetap.runtime.projection import Projector
from statetap.runtime.run_ports import RunPorts
from statetap.telemetry import events

PAUSED_BY_DISK = "disk"
# An error that may pass (no descriptor is free, the ledger is locked) has passed by then, or is no such error.
PAUSES_SECONDS = (1.0, 5.0, 30.0)


class JobPreparation:
    """One task for each job in planning. `on_ready` hears of a job that runs now, `on_over` of one that never will."""

    def __init__(
        self,
        states: JobStates,
        datasets: OpenDatasets,
        store: Store,
        projector: Projector,
        ports: RunPorts,
        *,
        version: str,
        on_ready: Callable[[str], Awaitable[None]],
        on_over: Callable[[str], None],
    ) -> None:
        self._states = states
        self._datasets = datasets
        self._store = store
        self._projector = projector
        self._ports = ports
        self._version = version
        self._on_ready = on_ready
        self._on_over = on_over
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, job: str) -> None:
        """Unless it has begun already."""
        if job not in self._tasks:
            task = self._tasks[job] = asyncio.create_task(self._run(job), name=f"prepare {job}")
            task.add_done_callback(lambda _: self._tasks.pop(job, None))

    async def stop(self, job: str) -> None:
        """It is begun again at the next start, unless the job is cancelled."""
        if (task := self._tasks.get(job)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        for job in list(self._tasks):
            await self.stop(job)

    def _is_planning(self, job: str) -> bool:
        record = self._states.active.get(job)
        return record is not None and record.state is JobState.PLANNING

    async def _run(self, job: str) -> None:
        failures = 0
        while self._is_planning(job):
            try:
                failure = await self._try(job)
                if isinstance(failure, StoreFull):
                    reason, seconds = f"{PAUSED_BY_DISK}: {failure}", self._ports.settings.disk_probe_seconds
                elif failure is None:
                    await self._begin(job)
                    break
                elif isinstance(failure, StoreMismatch) or failures == len(PAUSES_SECONDS):
                    await self._fail(job, str(failure))
                    break
                else:
                    reason, seconds = f"it could not be prepared: {failure}", PAUSES_SECONDS[failures]
                    failures += 1
                await self._tell_of_waiting(job, f"{reason}; tried again every {seconds:g} s")
            except Exception:
                # The ledger itself cannot be written now: until it can, nothing follows from anything.
                self._ports.log.exception(events.DISPATCH_FAILED)
                seconds = PAUSES_SECONDS[-1]
            await self._ports.clock.sleep(seconds)

    async def _try(self, job: str) -> Exception | None:
        """None: the store is ready. Whatever it was else, it is tried again, or the job says so."""
        try:
            await self._make_ready(job)
        except Exception as error:
            if not isinstance(error, StoreFull):
                self._ports.log.exception(events.JOB_NOT_READY, job=job, reason=str(error))
            return error
        return None

    async def _make_ready(self, job: str) -> None:
        record, ledger = self._states.active[job], self._ports.ledger
        dataset = await ledger.dataset(record.spec.dataset)
        tokens = await self._datasets.get(dataset.id)
        before = await prepare(record, dataset, tokens, ledger, self._store, self._version)
        self._projector.mark(record)
        await self._projector.flush(job)
        if before is None:
            self._ports.log.info(events.STORE_CREATED, job=job, store=record.spec.store)
        else:
            self._ports.log.info(events.STORE_GROWN, job=job, store=record.spec.store)

    async def _tell_of_waiting(self, job: str, reason: str) -> None:
        if await self._states.explain(job, reason):
            await self._states.append_event(job, events.JOB_PAUSED, reason=reason)
            self._ports.log.warning(events.JOB_PAUSED, job=job, reason=reason)

    async def _begin(self, job: str) -> None:
        await self._states.move(job, Planned())
        await self._states.append_event(job, events.JOB_STARTED)
        self._ports.log.info(events.JOB_STARTED, job=job)
        await self._on_ready(job)

    async def _fail(self, job: str, reason: str) -> None:
        # No sample stays pending in a job that is over.
        await self._ports.ledger.cancel_pending(job, at=self._ports.clock.now())
        await self._states.move(job, PlanFailed(reason), reason)
        self._on_over(job)
        await self._states.append_event(job, events.JOB_FAILED, reason=reason)
        self._ports.log.error(events.JOB_FAILED, job=job, reason=reason)
