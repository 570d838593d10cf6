"""Whose fault failed attempts are: the sample's or the worker's.

Attempts of one request count as one failure of its worker.

A failure alone says nothing. A sample that failed at a second worker is at fault itself, and so is one that failed again at a
worker which captured another sample in between. A worker is at fault when so many attempts failed there in a row, at two samples
at least, that it can hardly be the samples. Attempts stand in the order in which they were sent: what was asked for before a
capture and fails after it (a dump that is overdue) says nothing of the worker now.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from statetap.core.routing import UnitId

# One bad sample alone must never look like a bad worker.
LEAST_SAMPLES = 2


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt at a sample (dataset index) of a unit that failed, and why. `costs`: it used up some of the sample's budget."""

    unit: UnitId
    sample: int
    reason: str
    costs: bool = True


@dataclass(slots=True)
class _Record:
    """What is known of one boot of a worker. `streak` has (number of the request, failure) since the newest captured attempt."""

    asked: int = 0
    captures: int = 0
    newest_capture: int = 0
    streak: list[tuple[int, Failure]] = field(default_factory=list)
    convicted: bool = False


@dataclass(frozen=True, slots=True)
class _Asked:
    """An attempt under way: the `number` of its request at its worker, and how many captures that one had brought by then."""

    sample: int
    worker: str
    record: _Record
    number: int
    captures_before: int


class Blame:
    """Of all workers and open units of a host. A worker that took `failures` in a row is convicted, until `acquit`."""

    def __init__(self, failures: int) -> None:
        self._failures = failures
        self._records: dict[str, _Record] = defaultdict(_Record)
        self._asked: dict[UnitId, dict[str, _Asked]] = {}
        self._failed_at: dict[UnitId, dict[int, set[tuple[str, int]]]] = {}

    def asked(self, unit: UnitId, rid: str, sample: int, worker: str, *, in_company: bool = False) -> None:
        """An attempt begins; `in_company`: in one request with the last one at this worker."""
        record = self._records[worker]
        record.asked += not in_company
        asked = _Asked(sample, worker, record, record.asked, record.captures)
        self._asked.setdefault(unit, {})[rid] = asked

    def captured(self, unit: UnitId, rid: str) -> None:
        """Whatever failed at this worker before, and was asked for before, does not count any more."""
        asked = self._over(unit, rid)
        if asked is None:
            return
        self._failed_at.get(unit, {}).pop(asked.sample, None)
        record = asked.record
        record.captures += 1
        record.newest_capture = max(record.newest_capture, asked.number)
        record.streak = [(number, failure) for number, failure in record.streak if number > asked.number]

    def excused(self, unit: UnitId, rid: str) -> None:
        """The attempt is over and is nobody's fault that is to be found out here."""
        self._over(unit, rid)

    def failed(self, unit: UnitId, rid: str, reason: str, *, costs: bool = True) -> tuple[Failure, ...]:
        """The failures that turn out to be the worker's: all that convict it, each one that follows, else none."""
        asked = self._over(unit, rid)
        if asked is None or asked.record is not self._records.get(asked.worker):
            # It was another boot of the worker that failed.
            return ()
        failed_at = self._failed_at.setdefault(unit, {}).setdefault(asked.sample, set())
        if costs:
            # What befell a whole request says something of its worker, and nothing of any of its samples.
            failed_at.add((asked.worker, asked.captures_before))
        if len(failed_at) > 1:
            self._clear(unit, asked.sample)
            return ()
        record, failure = asked.record, Failure(unit, asked.sample, reason, costs)
        if record.convicted:
            return (failure,)
        if asked.number <= record.newest_capture:
            return ()
        record.streak.append((asked.number, failure))
        samples = {(failure.unit, failure.sample) for _, failure in record.streak}
        requests = {number for number, _ in record.streak}
        if len(requests) < self._failures or len(samples) < LEAST_SAMPLES:
            return ()
        blamed = tuple(failure for _, failure in record.streak)
        record.convicted, record.streak = True, []
        return blamed

    def acquit(self, worker: str) -> None:
        """The worker has shown that it is well again."""
        self._records[worker].convicted = False

    def forget_worker(self, worker: str) -> None:
        """It is gone, or was started again: what comes next is another one."""
        self._records.pop(worker, None)

    def forget_unit(self, unit: UnitId) -> None:
        """Nothing more will be heard of its attempts. What they say of their workers stays."""
        self._asked.pop(unit, None)
        self._failed_at.pop(unit, None)

    def _over(self, unit: UnitId, rid: str) -> _Asked | None:
        return self._asked.get(unit, {}).pop(rid, None)

    def _clear(self, unit: UnitId, sample: int) -> None:
        """No worker is to blame for this sample."""
        for record in self._records.values():
            record.streak = [(number, f) for number, f in record.streak if (f.unit, f.sample) != (unit, sample)]
