"""Starts and stops the runtime: recovery before work, and nothing lost on the way down."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from statetap.core.records import WorkerRecord
from statetap.ports import AnswerJournal, Ledger
from statetap.runtime.disk_watch import DiskWatch
from statetap.runtime.job_course import JobCourse
from statetap.runtime.pool import WorkerPool


class Service:
    """The running whole. `owner` is what its leases are held under."""

    def __init__(
        self, owner: str, ledger: Ledger, answers: AnswerJournal, pool: WorkerPool, course: JobCourse, disk: DiskWatch
    ) -> None:
        self._course = course
        self._disk = disk
        self._pool = pool
        self._owner = owner
        self._ledger = ledger
        self._answers = answers
        self._tasks: list[asyncio.Task[None]] = []
        self.ready = False

    async def start(self, workers: Sequence[WorkerRecord]) -> None:
        """Take over what an earlier run left, then look at the dump directories, then go on."""
        open_units = await self._ledger.take_over(self._owner)
        self._pool.inboxes.expected_back.update(open_units)
        # A kill between a unit's commit and its end leaves answers that nobody will ask for.
        self._answers.keep_only(open_units)
        await self._pool.start(workers)
        await self._course.recover()
        self._course.dispatcher.start()
        self._tasks = [
            asyncio.create_task(self._course.projector.run(), name="projection"),
            asyncio.create_task(self._course.report_progress(), name="progress"),
            asyncio.create_task(self._course.tend(), name="jobs"),
            asyncio.create_task(self._disk.run(), name="disk"),
        ]
        self.ready = True

    async def stop(self, drain_seconds: float) -> None:
        """Finish what is in flight within the limit; leave leases, dumps and answers to the next start."""
        self.ready = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._course.stop(drain_seconds)
        await self._pool.close()
