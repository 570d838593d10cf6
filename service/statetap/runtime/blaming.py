"""What follows from whose fault failed attempts are: workers are quarantined, and samples get back what was not their fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from statetap.core import unit_messages as msg
from statetap.core.blame import Blame, Failure
from statetap.core.requests import RequestName
from statetap.core.routing import UnitId
from statetap.runtime.driver import WorkerDriver
from statetap.runtime.dump_intake import UnitInbox


class Blaming:
    """Hears of every attempt of every open unit of this host. `drivers` and `open_units` are those of the pool."""

    def __init__(self, blame: Blame, drivers: Mapping[str, WorkerDriver], open_units: Mapping[UnitId, UnitInbox]) -> None:
        self._blame = blame
        self._drivers = drivers
        self._open_units = open_units

    def is_probation(self, worker: str) -> bool:
        """Whether the next attempt at this worker is the one of its probation."""
        driver = self._drivers.get(worker)
        return driver is not None and driver.machine.on_probation

    def asked(self, unit: UnitId, request: msg.SendRequest, *, in_company: bool) -> None:
        self._blame.asked(unit, request.rid, request.sample, request.worker, in_company=in_company)
        if self.is_probation(request.worker):
            self._drivers[request.worker].quarantine.probe_with(request.rid)

    def captured(self, unit: UnitId, capture: msg.CaptureAccepted) -> None:
        self._blame.captured(unit, capture.rid)
        driver = self._drivers.get(capture.worker)
        if driver is not None and driver.quarantine.probe == capture.rid:
            self._blame.acquit(driver.name)
            driver.quarantine.prove()

    def failed(self, unit: UnitId, failure: msg.AttemptFailed) -> None:
        driver = self._drivers.get(failure.worker)
        costs = failure.fault is msg.Fault.ATTEMPT
        is_open = costs or failure.fault is msg.Fault.COMPANY
        if driver is not None and driver.quarantine.probe == failure.rid:
            self._blame.excused(unit, failure.rid)
            if is_open:
                driver.quarantine.impose(f"its attempt on probation failed: {failure.reason}")
            else:
                driver.quarantine.probe_said_nothing()
        elif driver is None or not is_open:
            self._blame.excused(unit, failure.rid)
        elif blamed := self._blame.failed(unit, failure.rid, failure.reason, costs=costs):
            if driver.machine.barred is None:
                driver.quarantine.impose(_reason(blamed))
            self._forgive(blamed)

    def forget_unit(self, unit: UnitId) -> None:
        """A unit ended, whatever became of its attempts."""
        self._blame.forget_unit(unit)
        for driver in self._drivers.values():
            if driver.quarantine.probe is not None and _unit_of(driver.quarantine.probe) == unit:
                driver.quarantine.probe_said_nothing()

    def _forgive(self, blamed: Sequence[Failure]) -> None:
        paid = Counter((failure.unit, failure.sample) for failure in blamed if failure.costs)
        for (unit, sample), failures in paid.items():
            if unit in self._open_units:
                self._open_units[unit].forgive(sample, failures)


def _unit_of(rid: str) -> UnitId | None:
    name = RequestName.parse(rid)
    return None if name is None else (name.job, name.unit)


def _reason(blamed: Sequence[Failure]) -> str:
    samples = len({(failure.unit, failure.sample) for failure in blamed})
    return f"{len(blamed)} attempts in a row at {samples} samples failed, the last: {blamed[-1].reason}"
