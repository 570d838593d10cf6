"""What a job has done lately, who did it, and what it saw: rates over the last minute of work, each worker's share, norms."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from statetap.core.norms import JobNorms
from statetap.core.records import SampleStatus, SampleVerdict
from statetap.runtime.views import WorkerTally

WINDOW_SECONDS = 60.0
# Of a unit's lost attempts, how many its event names; `workers` has the count of all.
MOST_LOST_TOLD = 100


@dataclass(frozen=True, slots=True)
class LostAttempt:
    """An attempt that brought no capture, and why."""

    rid: str
    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class CommitReport:
    """What a unit's commit stored, and what each worker did for it. It is recorded with the commit, as one event.

    `norms` are those of the captures that it stored, as `NormTable` gives them.
    """

    stored: int
    failed: int
    tokens: int
    nbytes: int
    workers: Mapping[str, WorkerTally]
    lost: tuple[LostAttempt, ...] = ()
    norms: Mapping[str, Any] = field(default_factory=dict)

    def as_line(self, unit: int) -> dict[str, Any]:
        """For the log: all but the norms, which are for machines."""
        workers = {worker: asdict(tally) for worker, tally in sorted(self.workers.items())}
        return {
            "unit": unit,
            "stored": self.stored,
            "failed": self.failed,
            "tokens": self.tokens,
            "bytes": self.nbytes,
            "workers": workers,
            "lost": [asdict(attempt) for attempt in self.lost[:MOST_LOST_TOLD]],
        }

    def as_event(self, unit: int) -> dict[str, Any]:
        """For the job's recorded events, from which a tally is replayed."""
        return {**self.as_line(unit), "norms": self.norms}


class UnitWork:
    """What each worker has done for one unit so far, since its lease."""

    def __init__(self) -> None:
        self._workers: dict[str, Counter[str]] = defaultdict(Counter)
        self._lost: list[LostAttempt] = []

    def attempted(self, worker: str) -> None:
        self._count(worker, "attempts")

    def lost(self, attempt: LostAttempt) -> None:
        self._count(attempt.worker, "lost")
        self._lost.append(attempt)

    def report(
        self, verdicts: Sequence[SampleVerdict], lengths: Mapping[int, int], row_bytes: int, norms: Mapping[str, Any]
    ) -> CommitReport:
        """What the unit's commit stores; `lengths` are those of its samples, `norms` as `NormTable` gives them."""
        stored = [verdict for verdict in verdicts if verdict.status is SampleStatus.STORED]
        for verdict in stored:
            self._count(verdict.worker or "", "stored")
        tokens = sum(lengths[verdict.sample] for verdict in stored)
        failed = len(verdicts) - len(stored)
        workers = {worker: WorkerTally(**counts) for worker, counts in self._workers.items()}
        return CommitReport(len(stored), failed, tokens, tokens * row_bytes, workers, tuple(self._lost), norms)

    def _count(self, worker: str, what: str) -> None:
        self._workers[worker][what] += 1


class JobTally:
    """Of one job. What must survive a restart is in the `unit.committed` events, and is replayed from them."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerTally] = defaultdict(WorkerTally)
        self.norms = JobNorms()
        self._commits: deque[tuple[float, int, int]] = deque()
        self._started: float | None = None

    def replay(self, data: Mapping[str, Any]) -> None:
        """Take in one recorded event."""
        for worker, counts in data.get("workers", {}).items():
            self._add(worker, counts)
        self.norms.replay(data.get("norms", {}))

    def attempted(self, worker: str, what: str) -> None:
        """An attempt was made (`attempts`) or lost (`lost`) just now."""
        self._add(worker, {what: 1})

    def committed(self, report: CommitReport, at: float) -> None:
        """Count a commit. Its attempts were counted when they were made."""
        self.norms.committed(report.norms)
        for worker, tally in report.workers.items():
            self._add(worker, {"stored": tally.stored})
        self._commits.append((at, report.tokens, report.nbytes))

    def began(self, at: float) -> None:
        """Work on the job began, or went on: rates are measured from here at most."""
        self._started = at
        self._commits.clear()

    def rates(self, now: float) -> tuple[float, float]:
        """(tokens/s, bytes/s) over the last minute of work, in monotonic seconds."""
        while self._commits and self._commits[0][0] < now - WINDOW_SECONDS:
            self._commits.popleft()
        if not self._commits or self._started is None:
            return 0.0, 0.0
        seconds = max(now - max(self._started, now - WINDOW_SECONDS), 1e-3)
        return sum(c[1] for c in self._commits) / seconds, sum(c[2] for c in self._commits) / seconds

    def _add(self, worker: str, counts: Mapping[str, int]) -> None:
        before = self.workers[worker]
        self.workers[worker] = replace(before, **{key: getattr(before, key) + count for key, count in counts.items()})
