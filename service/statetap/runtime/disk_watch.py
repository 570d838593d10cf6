"""Watches the room that stores have: jobs whose store runs out of it are paused, and go on by themselves once there is some.

A unit whose shard meets a full disk all the same is not lost: it is written again, after a pause, from dumps that are still held.
"""

from __future__ import annotations

from statetap.core.records import JobRecord, JobState
from statetap.ports import Store, StoreError
from statetap.runtime.job_course import JobCourse
from statetap.runtime.job_preparation import PAUSED_BY_DISK
from statetap.runtime.job_states import JobStates
from statetap.runtime.run_ports import RunPorts
from statetap.telemetry import events

# A job goes on only with so much more than the reserve free, or it would be paused again at once.
ROOM_TO_RESUME = 1.25


class DiskWatch:
    """Looks at every job that runs, and at those that it paused itself, at a fixed interval."""

    def __init__(self, states: JobStates, course: JobCourse, store: Store, ports: RunPorts) -> None:
        self._states = states
        self._course = course
        self._store = store
        self._ports = ports

    async def run(self) -> None:
        while True:
            await self._ports.clock.sleep(self._ports.settings.disk_probe_seconds)
            for job in list(self._states.active.values()):
                try:
                    await self._look(job)
                except Exception:
                    self._ports.log.exception(events.DISPATCH_FAILED)

    async def _look(self, job: JobRecord) -> None:
        waits = job.state is JobState.PAUSED and (job.reason or "").startswith(f"{PAUSED_BY_DISK}: ")
        if not waits and job.state is not JobState.RUNNING:
            return
        reserve = self._ports.settings.disk_reserve_bytes
        try:
            free = await self._store.free_bytes(job.spec.store)
        except StoreError:
            return  # Whoever writes there says what is wrong.
        if free is None:
            return
        if waits and free >= reserve * ROOM_TO_RESUME:
            await self._course.resume(job.id)
        elif not waits and free < reserve:
            await self._course.pause(
                job.id,
                f"{PAUSED_BY_DISK}: {job.spec.store} has {free:,} bytes free, less than the reserve of {reserve:,} "
                f"(runtime.disk_reserve_bytes); the job goes on by itself once {int(reserve * ROOM_TO_RESUME):,} are free",
            )
