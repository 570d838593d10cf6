"""One worker whose captures fail: left alone for a while, tried with one attempt, and used again or left alone for longer.

What its state is, the worker machine knows; here it is timed, counted and told.
"""

from __future__ import annotations

from collections.abc import Callable

from structlog.typing import FilteringBoundLogger

from statetap.core.worker import Condemned, Proven, Quarantined, Readmitted, WorkerMachine, WorkerState
from statetap.ports import Clock
from statetap.settings import Runtime
from statetap.telemetry import events
from statetap.telemetry.metrics import Metrics

# A quarantine lasts at most so many times as long as the first.
LONGEST_QUARANTINE = 16
WAY_OUT = "mend the worker and start it anew, or remove it and add it again"


class Quarantine:
    """`changed` is called when the worker may be asked again. `probe` is the rid of the one attempt that may prove it well."""

    def __init__(
        self,
        worker: str,
        machine: WorkerMachine,
        changed: Callable[[], None],
        *,
        clock: Clock,
        settings: Runtime,
        metrics: Metrics,
        log: FilteringBoundLogger,
    ) -> None:
        self.probe: str | None = None
        self._worker = worker
        self._machine = machine
        self._changed = changed
        self._clock = clock
        self._settings = settings
        self._metrics = metrics
        self._log = log
        self._times = 0
        self._until = 0.0
        self._fences_failed = 0

    def impose(self, reason: str) -> None:
        """Its captures fail: quarantine it, longer each time, or call it dead after so many times in a row."""
        self.probe = None
        if self._times == self._settings.quarantines_until_dead:
            reason = f"dead after {self._times} quarantines without one capture, the last because {reason}; {WAY_OUT}"
            self._machine.handle(Condemned(reason))
            self._log.error(events.WORKER_DEAD, reason=reason)
        else:
            seconds = self._settings.quarantine_seconds * min(2**self._times, LONGEST_QUARANTINE)
            self._times += 1
            self._until = self._clock.monotonic() + seconds
            self._machine.handle(Quarantined(reason))
            self._metrics.quarantines_total.labels(worker=self._worker).inc()
            self._log.warning(events.WORKER_QUARANTINED, reason=reason, seconds=seconds, times=self._times)
        self._tell()

    def readmit_if_served(self) -> None:
        """Once its time is over and nothing else is wrong with it, it may be asked for one sample."""
        over = self.probe is None and self._clock.monotonic() >= self._until
        if over and self._machine.state is WorkerState.QUARANTINED:
            self._machine.handle(Readmitted())
            self._tell()

    def probe_with(self, rid: str) -> None:
        """This attempt is the one of its probation."""
        self.probe = rid
        self._log.info(events.WORKER_PROBED, rid=rid)

    def probe_said_nothing(self) -> None:
        """The probe ended in a way that is not the worker's doing: another one may follow."""
        self.probe = None
        self.readmit_if_served()

    def prove(self) -> None:
        """The probe brought a capture: it is used as before."""
        self._machine.handle(Proven())
        self._lift("it captured a sample on probation")

    def lift_for_new_boot(self) -> None:
        """Another boot serves now. The machine has seen so."""
        self._lift("it was started anew")

    def fence_failed(self, reason: str) -> None:
        """Strict mode: a fence that does not hold is no sample's fault. On probation it is a probe that failed."""
        self._fences_failed += 1
        if self._machine.on_probation:
            self.impose(f"its fence on probation failed: {reason}")
        elif self._machine.barred is None and self._fences_failed >= self._settings.quarantine_failures:
            self.impose(f"{self._fences_failed} fences in a row failed, the last: {reason}")

    def fence_held(self) -> None:
        self._fences_failed = 0

    def _lift(self, reason: str) -> None:
        self.probe, self._times, self._until, self._fences_failed = None, 0, 0.0, 0
        self._log.info(events.WORKER_BACK, reason=reason)
        self._tell()

    def _tell(self) -> None:
        may_be_asked = self._machine.state in (WorkerState.READY, WorkerState.BUSY) and not self._machine.is_held
        self._metrics.worker_up.labels(worker=self._worker).set(may_be_asked)
        self._changed()
