"""What a job has done lately and who did it: rates over the last minute of work, and each worker's share."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from statetap.core.records import SampleStatus, SampleVerdict
from statetap.runtime.views import WorkerTally

WINDOW_SECONDS = 60.0


class JobTally:
    """Of one job. What must survive a restart travels with the `unit.committed` events and is replayed from them."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerTally] = defaultdict(WorkerTally)
        self._unreported: dict[str, WorkerTally] = defaultdict(WorkerTally)
        self._commits: deque[tuple[float, int, int]] = deque()
        self._started: float | None = None

    def replay(self, data: Mapping[str, Any]) -> None:
        """Take in the `workers` of one recorded event."""
        for worker, counts in data.get("workers", {}).items():
            self._add(self.workers, worker, counts)

    def attempted(self, worker: str, what: str) -> None:
        """An attempt was made (`attempts`) or lost (`lost`)."""
        self._add(self.workers, worker, {what: 1})
        self._add(self._unreported, worker, {what: 1})

    def committed(self, verdicts: Iterable[SampleVerdict], tokens: int, nbytes: int, at: float) -> dict[str, dict[str, int]]:
        """Count a commit; returns what is to be recorded with it."""
        for verdict in verdicts:
            if verdict.status is SampleStatus.STORED and verdict.worker is not None:
                self._add(self.workers, verdict.worker, {"stored": 1})
                self._add(self._unreported, verdict.worker, {"stored": 1})
        self._commits.append((at, tokens, nbytes))
        report = {
            worker: {"stored": t.stored, "attempts": t.attempts, "lost": t.lost} for worker, t in sorted(self._unreported.items())
        }
        self._unreported.clear()
        return report

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

    @staticmethod
    def _add(tallies: dict[str, WorkerTally], worker: str, counts: Mapping[str, int]) -> None:
        before = tallies[worker]
        tallies[worker] = replace(before, **{key: getattr(before, key) + count for key, count in counts.items()})
