"""The workers of this host: added, probed, drained, removed; and the bytes that their dump directories may still take."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from structlog.typing import FilteringBoundLogger

from statetap.core.blame import Blame
from statetap.core.records import JobSpec, WorkerRecord
from statetap.core.routing import UnitId
from statetap.core.spec import Identity
from statetap.ports import Clock, DumpSourceError, Ledger, NotFound, TapSeen
from statetap.runtime.blaming import Blaming
from statetap.runtime.driver import WorkerDriver
from statetap.runtime.dump_intake import Inboxes
from statetap.runtime.run_ports import WorkerPorts
from statetap.runtime.views import RefusalKind, Refused, WorkerView
from statetap.settings import Runtime
from statetap.telemetry import events
from statetap.telemetry.metrics import Metrics

ConnectWorker = Callable[[WorkerRecord], WorkerPorts]


class WorkerPool:
    """All drivers of this host. `changed` is set whenever a worker may have become free."""

    def __init__(
        self,
        connect: ConnectWorker,
        ledger: Ledger,
        *,
        clock: Clock,
        settings: Runtime,
        metrics: Metrics,
        log: FilteringBoundLogger,
    ) -> None:
        self.inboxes = Inboxes(open={}, expected_back=set())
        self.changed = asyncio.Event()
        self._connect = connect
        self._ledger = ledger
        self._clock = clock
        self._settings = settings
        self._metrics = metrics
        self._log = log
        self._drivers: dict[str, WorkerDriver] = {}
        self._blame = Blame(settings.quarantine_failures)
        self.blaming = Blaming(self._blame, self._drivers, self.inboxes.open)
        self._membership = asyncio.Lock()

    async def start(self, configured: Sequence[WorkerRecord]) -> None:
        """Start the configured workers and those added before. One whose dump directory cannot be used yet stands refused."""
        draining = {record.name for record in await self._ledger.workers() if record.draining}
        for record in configured:
            await self._ledger.add_worker(replace(record, draining=record.name in draining))
        for record in await self._ledger.workers():
            try:
                driver = self._drivers[record.name] = self._new_driver(record)
            except ValueError as error:
                # Recorded by another version, perhaps: one worker's configuration must not keep the service from starting.
                self._log.error(events.WORKER_REFUSED, worker=record.name, reason=str(error))
                continue
            with suppress(DumpSourceError):
                await driver.start()
            self._log.info(events.WORKER_ADDED, worker=record.name, url=record.url)

    async def close(self) -> None:
        await asyncio.gather(*(driver.close() for driver in self._drivers.values()))

    def _new_driver(self, record: WorkerRecord) -> WorkerDriver:
        return WorkerDriver(
            record,
            self._connect(record),
            self.inboxes,
            self.changed,
            self._blame,
            clock=self._clock,
            settings=self._settings,
            metrics=self._metrics,
            log=self._log,
        )

    # --- what the dispatcher and the planner ask --------------------------------------------------------------------------

    @property
    def drivers(self) -> list[WorkerDriver]:
        return list(self._drivers.values())

    def taps(self) -> list[TapSeen]:
        """What each worker that has announced itself captures."""
        return [driver.tap for driver in self._drivers.values() if driver.tap is not None and not driver.machine.draining]

    def context_length(self, spec_fits: Callable[[TapSeen], bool]) -> int | None:
        """The shortest context of the workers that fit, in tokens; None if none tells."""
        known = [d.context_length for d in self._drivers.values() if d.tap is not None and spec_fits(d.tap)]
        return min((length for length in known if length is not None), default=None)

    @staticmethod
    def serves(tap: TapSeen, spec: JobSpec) -> bool:
        """Whether a worker with this tap may work on the job: same model, same spec, and evidence at least as strong."""
        same = tap.model.model_fingerprint == spec.model.model_fingerprint and tap.model.dtype == spec.model.dtype
        identified = tap.identity is Identity.TOKENS or spec.identity is Identity.COUNT
        return same and identified and tap.capture == spec.capture

    def serving(self, spec: JobSpec) -> Iterator[WorkerDriver]:
        """The workers that are at work and may work on the job."""
        return (driver for driver in self.at_work if driver.tap is not None and self.serves(driver.tap, spec))

    @property
    def at_work(self) -> Iterator[WorkerDriver]:
        """The workers that are ready or busy, and will go on: what is busy and barred, or drained, will not."""
        for driver in self._drivers.values():
            if (driver.ready or driver.busy) and not driver.machine.draining and not driver.machine.is_held:
                yield driver

    def barred_from(self, spec: JobSpec) -> str | None:
        """Why no worker works on the job, if that is because all that may are quarantined or dead."""
        able = [driver for driver in self._drivers.values() if not driver.machine.draining]
        fit = [driver for driver in able if driver.tap is not None and self.serves(driver.tap, spec)]
        if not fit or not all(driver.machine.barred is not None for driver in fit):
            return None
        return "; ".join(f"worker {d.name} is {d.machine.barred}: {d.machine.barred_because}" for d in fit)

    def forget_job(self, job: str) -> None:
        """Its units will not come back: release what is parked for them."""
        self.inboxes.expected_back -= {unit for unit in self.inboxes.expected_back if unit[0] == job}
        for driver in self._drivers.values():
            driver.intake.release_parked(self.inboxes.expected_back)
        self.changed.set()

    def free_everywhere(self, unit: UnitId) -> None:
        """Give back what is reserved for a unit, wherever it is."""
        for driver in self._drivers.values():
            driver.space.free(unit)

    # --- what the API asks --------------------------------------------------------------------------------------------------

    def list(self) -> list[WorkerView]:
        return [self._view(driver) for driver in self._drivers.values()]

    async def add(self, record: WorkerRecord) -> WorkerView:
        """Refused: the name is taken, or its dump directory cannot be used."""
        async with self._membership:
            if record.name in self._drivers:
                raise Refused(
                    RefusalKind.CONFLICT,
                    f"a worker named {record.name!r} exists; remove it first, or choose another name",
                    field="name",
                )
            driver = self._new_driver(record)
            try:
                await driver.start()
                await self._ledger.add_worker(record)
            except DumpSourceError as error:
                await driver.close()
                raise Refused(RefusalKind.INVALID, str(error), field="dumps") from error
            except BaseException:
                await driver.close()
                raise
            self._drivers[record.name] = driver
        self._log.info(events.WORKER_ADDED, worker=record.name, url=record.url)
        self.changed.set()
        return self._view(driver)

    async def remove(self, name: str) -> None:
        """Its attempts in flight are lost and made again elsewhere; what it has published stays usable."""
        async with self._membership:
            driver = self._driver(name)
            await self._ledger.delete_worker(name)
            del self._drivers[name]
            self._blame.forget_worker(name)
            await driver.close()
        self._metrics.forget_worker(name)
        self._log.info(events.WORKER_REMOVED, worker=name)
        self.changed.set()

    async def drain(self, name: str) -> WorkerView:
        driver = self._driver(name)
        driver.record = replace(driver.record, draining=True)
        await self._ledger.add_worker(driver.record)
        driver.drain()
        return self._view(driver)

    def _driver(self, name: str) -> WorkerDriver:
        if name not in self._drivers:
            raise NotFound(f"no worker named {name!r}; there are {', '.join(self._drivers) or 'none'}")
        return self._drivers[name]

    @staticmethod
    def _view(driver: WorkerDriver) -> WorkerView:
        tap = driver.tap
        return WorkerView(
            record=driver.record,
            state=driver.machine.standing,
            reason=driver.machine.reason,
            in_flight=int(driver.machine.in_flight is not None),
            requests=driver.meter.requests,
            failures=driver.meter.failures,
            model=tap.model if tap is not None else None,
            context_length=driver.context_length,
            dump_bytes=driver.space.held_bytes,
            budget_bytes=tap.budget_bytes if tap is not None else None,
        )
