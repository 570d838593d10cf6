"""What workers answered to units that are not committed yet."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """What a worker answered to one attempt by tokens of an open unit; with its dumps a restart needs no more."""

    rid: str
    sample: int
    worker: str
    next_token: int


class AnswerJournal(Protocol):
    """Answers of units that are not committed yet: like the dumps, they survive a kill of the service, not of the machine."""

    def record(self, job: str, unit: int, answer: RecordedAnswer) -> None: ...

    def recall(self, job: str, unit: int) -> list[RecordedAnswer]: ...

    def forget(self, job: str, unit: int) -> None: ...

    def keep_only(self, units: Collection[tuple[str, int]]) -> None:
        """Forget the answers of all other units, given as (job, unit)."""
        ...
