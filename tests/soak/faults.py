"""Faults that go on and on: a small share of all requests, each with one that costs little time."""

from __future__ import annotations

from collections import Counter
from random import Random

from tests.chaos.proxy import FAULTS, Schedule

# These wait for time-outs of seconds, or fail the sample for good: `make chaos` has them.
NOT_HERE = ("request hangs", "dump too late", "error 400")
STEADY_FAULTS = tuple(name for name in FAULTS if name not in NOT_HERE)


class SteadyFaults(Schedule):
    """One request in so many is disturbed, by its number over all workers: the same seed disturbs the same numbers alike."""

    def __init__(self, seed: int, share: float) -> None:
        super().__init__()
        self.by_kind: Counter[str] = Counter()
        self.requests = 0
        self._random = Random(f"soak {seed}")
        self._share = share

    def next(self, sample: int) -> str | None:
        """Nothing is kept of each sample: several jobs have a sample of that number."""
        self.requests += 1
        if self._random.random() >= self._share:
            return None
        fault = self._random.choice(STEADY_FAULTS)
        self.by_kind[fault] += 1
        return fault
