"""What goes into the runtime from its edges, and what comes out: plain data, so that the API only has to translate."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from statetap.core.norms import NormSummary, RowKind
from statetap.core.records import JobRecord, WorkerRecord
from statetap.core.spec import Compression, Final, Identity, ModelFacts
from statetap.core.worker import WorkerState
from statetap.ports import Page


class RefusalKind(StrEnum):
    """Why something asked for was not done: the request is wrong, the present state forbids it, or space is missing."""

    INVALID = "invalid"
    CONFLICT = "conflict"
    NO_SPACE = "no_space"


class Refused(Exception):
    """A request that the runtime refuses. `detail` names the thing, the reason and the way out; `field` the part at fault,
    `line` the dataset's sample (1-based) where there is one."""

    def __init__(self, kind: RefusalKind, detail: str, *, field: str | None = None, line: int | None = None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.field = field
        self.line = line


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmission:
    """A job as asked for. None means: whatever the workers are configured to capture, or the default."""

    dataset: str
    store: str
    name: str | None = None
    priority: int = 0
    preset: str | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    final: Final | None = None
    identity: Identity | None = None
    order: str = "dataset"
    seed: int = 0
    rows_per_shard: int | None = None
    rows_per_chunk: int | None = None
    compression: Compression = Compression.NONE
    on_over_long: str = "fail"
    ignore_space: bool = False


@dataclass(frozen=True, slots=True)
class WorkerTally:
    """What one worker did for one job: samples it stored, attempts it was asked for, and attempts that were lost."""

    stored: int = 0
    attempts: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A job now. Rates are over the last minute of work; `bytes_total` is what the whole job will store.

    `norms` are of what is stored: (array, layer slot, kind of row, summary). Jobs in a list come without.
    """

    record: JobRecord
    bytes_total: int
    tokens_per_second: float
    bytes_per_second: float
    eta_seconds: float | None
    failures: dict[str, int] = field(default_factory=dict)
    workers: dict[str, WorkerTally] = field(default_factory=dict)
    norms: tuple[tuple[str, int, RowKind, NormSummary], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A worker now. `dump_bytes` are held by its dumps or reserved for what is to come."""

    record: WorkerRecord
    state: WorkerState
    reason: str | None
    in_flight: int
    requests: int
    failures: int
    model: ModelFacts | None
    context_length: int | None
    dump_bytes: int
    budget_bytes: int | None


class Jobs(Protocol):
    """What the API may ask about jobs. An unknown id raises `ports.NotFound`; a refusal raises `Refused`."""

    async def submit(self, submission: JobSubmission, *, idempotency_key: str | None, request_hash: str) -> tuple[JobView, bool]:
        """Plan and record a job; the flag is False where the idempotency key had been used for the same request before."""
        ...

    async def view(self, job: str) -> JobView: ...
    async def list(self, *, limit: int, cursor: str | None) -> Page[JobView]: ...
    async def pause(self, job: str) -> JobView: ...
    async def resume(self, job: str) -> JobView: ...
    async def cancel(self, job: str) -> JobView: ...
    async def retry(self, job: str) -> JobView: ...

    async def wait_for_event(self, job: str, after: int, *, timeout_seconds: float) -> None:
        """Return when the job may have an event newer than `after`, or after the time-out."""
        ...


class Workers(Protocol):
    """What the API may ask about workers."""

    def list(self) -> list[WorkerView]: ...
    async def add(self, record: WorkerRecord) -> WorkerView: ...
    async def remove(self, name: str) -> None: ...
    async def drain(self, name: str) -> WorkerView: ...
