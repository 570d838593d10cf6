"""The durable record of jobs, units and samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from statetap.core.records import (
    DatasetRecord,
    EventRecord,
    JobCounts,
    JobRecord,
    JobState,
    SampleRecord,
    SampleStatus,
    SampleVerdict,
    ShardObject,
    UnitLease,
    UnitRecord,
    UnitState,
    WorkerRecord,
)
from statetap.ports.store import SampleColumns

T = TypeVar("T")


class LedgerError(Exception):
    """The ledger refused."""


class NotFound(LedgerError):
    """No such job, dataset or worker."""


class LeaseLost(LedgerError):
    """Somebody holds a higher fence, or the unit is no longer leased: what was done under the old lease does not count."""


class BadCursor(LedgerError):
    """A cursor that no list gave out."""


class IdempotencyConflict(LedgerError):
    """The key was used before, for another request."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list; `cursor` asks for the next one, None at the end."""

    items: list[T]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """A client's name for one submission, with a hash of what was submitted under it."""

    key: str
    request_hash: str


@dataclass(frozen=True, slots=True)
class NextUnit:
    """A unit that may be leased, and its samples in placement order."""

    index: int
    samples: list[SampleRecord]


@dataclass(frozen=True, slots=True)
class CommitEvent:
    """What a commit appends to the job's event log."""

    name: str
    data: Mapping[str, Any]


class Ledger(Protocol):
    """The durable record. Every method is one transaction; what it returned has survived."""

    async def open(self) -> None: ...
    async def close(self) -> None: ...

    async def add_dataset(self, record: DatasetRecord) -> None: ...
    async def dataset(self, dataset: str) -> DatasetRecord: ...
    async def datasets(self, *, limit: int, cursor: str | None) -> Page[DatasetRecord]: ...
    async def delete_dataset(self, dataset: str) -> None:
        """LedgerError: an unfinished job needs it."""
        ...

    async def add_job(
        self, job: JobRecord, units: Iterable[UnitRecord], samples: Iterable[SampleRecord], *, key: IdempotencyKey | None = None
    ) -> None:
        """Record a planned job whole, and the key that stands for it; counts are taken from `samples` and `units`."""
        ...

    async def job(self, job: str) -> JobRecord: ...
    async def jobs(self, *, limit: int, cursor: str | None, states: Sequence[JobState] = ()) -> Page[JobRecord]:
        """Newest first."""
        ...

    async def set_job_state(self, job: str, state: JobState, reason: str | None, *, at: float) -> JobRecord: ...

    async def append_units(
        self, job: str, units: Iterable[UnitRecord], samples: Iterable[SampleRecord], *, state: JobState, at: float
    ) -> JobRecord:
        """Retry: `samples` (failed ones) become pending again, in new units; their `row_start` moves, the job is `state`."""
        ...

    async def peek_unit(self, job: str, *, now: float) -> NextUnit | None:
        """The unit that `lease_unit` would lease now: room for its samples is reserved first."""
        ...

    async def lease_unit(self, job: str, owner: str, *, now: float, ttl_seconds: float) -> UnitLease | None:
        """The job's next unit that is pending, or leased and expired; its fence grows. None if there is none."""
        ...

    async def renew_leases(self, owner: str, *, now: float, ttl_seconds: float) -> None: ...

    async def take_over(self, owner: str) -> list[tuple[str, int]]:
        """At start, by the one service that owns the data folder: every lease of anybody else expires; (job, unit) of each."""
        ...

    async def give_back(self, lease: UnitLease) -> None:
        """The unit is pending again. LeaseLost is not raised: then there is nothing to give back."""
        ...

    async def commit_unit(
        self,
        lease: UnitLease,
        verdicts: Sequence[SampleVerdict],
        objects: Sequence[ShardObject],
        *,
        bytes_stored: int,
        at: float,
        event: CommitEvent | None = None,
    ) -> JobCounts:
        """Record a unit whole: verdicts, objects, the job's counts, an event. LeaseLost: the fence is not the current one."""
        ...

    async def cancel_pending(self, job: str, *, at: float) -> JobCounts:
        """Units that are not leased, and their samples, become cancelled."""
        ...

    async def units(self, job: str, state: UnitState | None = None) -> list[UnitRecord]: ...

    async def unit_samples(self, job: str, unit: int) -> list[SampleRecord]:
        """In placement order."""
        ...

    async def samples(self, job: str, *, status: SampleStatus | None, limit: int, cursor: str | None) -> Page[SampleRecord]: ...

    async def sample_columns(self, job: str, first: int, count: int) -> SampleColumns:
        """By dataset index, from `first` on, as many as there are: what the store tells of them."""
        ...

    async def failures(self, job: str) -> dict[str, int]:
        """Failed and skipped samples by the kind of their reason."""
        ...

    async def idempotent(self, key: IdempotencyKey) -> str | None:
        """The job recorded under `key`, None if the key is new. IdempotencyConflict: used for another request."""
        ...

    async def add_worker(self, worker: WorkerRecord) -> None:
        """Add or replace."""
        ...

    async def delete_worker(self, name: str) -> None: ...
    async def workers(self) -> list[WorkerRecord]: ...

    async def append_event(self, job: str | None, name: str, data: Mapping[str, Any], *, at: float) -> int: ...
    async def events(self, job: str, *, after: int, limit: int) -> list[EventRecord]: ...
