"""Where one sample of a unit stands."""

from __future__ import annotations

from dataclasses import dataclass

from statetap.core.attempt import Attempt
from statetap.core.capture import Expected
from statetap.core.records import SampleStatus, SampleVerdict


@dataclass(slots=True)
class Progress:
    """`attempts` counts requests, `losses` those that brought no capture, `failures` those losses that use up the budget."""

    sample: int
    expected: Expected
    attempts: int = 0
    losses: int = 0
    failures: int = 0
    live: Attempt | None = None
    captured: Attempt | None = None
    reason: str | None = None
    worker: str | None = None
    failed_on: tuple[str, ...] = ()

    @property
    def waits(self) -> bool:
        """Whether a worker may be asked for it now."""
        return self.live is None and not self.settled

    @property
    def settled(self) -> bool:
        return self.captured is not None or self.failed

    @property
    def failed(self) -> bool:
        return self.captured is None and self.live is None and self.reason is not None

    def lost(self, worker: str, *, uses_budget: bool) -> None:
        """An attempt at this worker brought no capture."""
        self.losses += 1
        self.failures += uses_budget
        if worker not in self.failed_on:
            self.failed_on = (*self.failed_on, worker)

    def verdict(self) -> SampleVerdict:
        """How it ended; meaningful once it is settled."""
        return SampleVerdict(
            sample=self.sample,
            status=SampleStatus.STORED if self.captured else SampleStatus.FAILED,
            reason=None if self.captured else self.reason,
            attempts=self.attempts,
            worker=self.worker,
            next_token=self.captured.next_token if self.captured else -1,
            digest=self.captured.digest if self.captured else 0,
        )
