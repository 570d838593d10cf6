"""The store's `samples/*` arrays: a projection of the ledger, written by the service alone, every few seconds and at the end.

Written in runs of consecutive samples, so that a commit touches only the runs that its samples are in. Rebuilt at start for
every job that is not over.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

from structlog.typing import FilteringBoundLogger

from statetap.core.records import JobRecord
from statetap.ports import Clock, Ledger, Store
from statetap.telemetry import events

SAMPLES_PER_RUN = 1 << 14
# Of the time, what projecting may take: a job whose runs are all dirty is projected less often.
SHARE_OF_TIME = 0.1


class Projector:
    """Keeps `samples/*` of every running job's store close behind the ledger. `on_flushed` hears of each job that `run` wrote."""

    def __init__(
        self,
        ledger: Ledger,
        store: Store,
        clock: Clock,
        interval_seconds: float,
        log: FilteringBoundLogger,
        *,
        on_flushed: Callable[[str], Awaitable[None]],
    ) -> None:
        self._ledger = ledger
        self._store = store
        self._clock = clock
        self._interval_seconds = interval_seconds
        self._log = log
        self._on_flushed = on_flushed
        self._dirty: dict[str, set[int]] = defaultdict(set)
        self._jobs: dict[str, JobRecord] = {}
        self._lock = asyncio.Lock()

    def mark(self, job: JobRecord, samples: Iterable[int] | None = None) -> None:
        """These samples (dataset indexes; None: all) are no longer what the store says."""
        self._jobs[job.id] = job
        runs = range(-(-job.counts.samples // SAMPLES_PER_RUN)) if samples is None else (s // SAMPLES_PER_RUN for s in samples)
        self._dirty[job.id].update(runs)

    def forget(self, job: str) -> None:
        """Nothing more is written of a job that is over: a store that could not be made for it would be tried for ever."""
        self._dirty.pop(job, None)
        self._jobs.pop(job, None)

    async def flush(self, job: str) -> None:
        """Write what is dirty of a job. On any error it stays dirty."""
        async with self._lock:
            dirty = self._dirty.pop(job, set())
            record = self._jobs.get(job)
            if record is None:
                return
            while dirty:
                run = min(dirty)
                try:
                    await self._write(record, run)
                except BaseException:
                    self._dirty[job] |= dirty
                    raise
                dirty.discard(run)
            self._log.debug(events.PROJECTION_WRITTEN, job=job)

    async def try_flush(self, job: str) -> bool:
        """The same, but an error is only told: what stays dirty is tried again by `run`, or rebuilt at the next start."""
        try:
            await self.flush(job)
        except Exception as error:  # noqa: BLE001 - whatever it was, it is tried again
            self._log.exception(events.PROJECTION_FAILED, job=job, reason=str(error))
            return False
        return True

    async def _write(self, job: JobRecord, run: int) -> None:
        columns = await self._ledger.sample_columns(job.id, run * SAMPLES_PER_RUN, SAMPLES_PER_RUN)
        if columns.ids:
            # The job's sample 0 is sample `first_sample` of the store.
            await self._store.write_samples(job.spec.store, replace(columns, first=job.spec.first_sample + columns.first))

    async def run(self) -> None:
        """Project until cancelled."""
        pause = self._interval_seconds
        while True:
            await self._clock.sleep(pause)
            began = self._clock.monotonic()
            for job in list(self._dirty):
                if await self.try_flush(job):
                    await self._on_flushed(job)
            pause = max(self._interval_seconds, (self._clock.monotonic() - began) / SHARE_OF_TIME)
