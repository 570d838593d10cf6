"""What the ledger keeps: jobs, units, samples and what was said about them. Times are seconds since the epoch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

from statetap.core.placement import Geometry
from statetap.core.spec import CaptureSpec, Compression, Identity, ModelFacts


class SampleStatus(IntEnum):
    """The values of the store's `samples/status`."""

    PENDING = 0
    STORED = 1
    FAILED = 2
    CANCELLED = 3
    SKIPPED = 4


class JobState(StrEnum):
    PLANNING = "planning"
    RUNNING = "running"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


class UnitState(StrEnum):
    PENDING = "pending"
    LEASED = "leased"
    COMMITTED = "committed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetRecord:
    """A submitted dataset. `sha256` is over its canonical (id, ids, mask) records."""

    id: str
    name: str
    model: str
    samples: int
    tokens: int
    max_tokens: int
    sha256: str
    tokenizer: str
    chat_template_sha256: str
    created_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """All that was decided at submission; nothing in it changes afterwards.

    The job owns rows `[first_row, …)` and samples `[first_sample, first_sample + samples)` of its store; `order` is
    `dataset` or `permutation` (by `seed`).
    """

    dataset: str
    store: str
    capture: CaptureSpec
    model: ModelFacts
    identity: Identity
    geometry: Geometry
    order: str
    seed: int
    on_over_long: str
    first_row: int
    first_sample: int
    compression: Compression = Compression.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCounts:
    """Of one job: samples by status, and the tokens and bytes that are stored."""

    pending: int = 0
    stored: int = 0
    failed: int = 0
    cancelled: int = 0
    skipped: int = 0
    tokens_total: int = 0
    tokens_stored: int = 0
    bytes_stored: int = 0
    units_total: int = 0
    units_committed: int = 0

    @property
    def samples(self) -> int:
        return self.pending + self.stored + self.failed + self.cancelled + self.skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    id: str
    name: str
    priority: int
    state: JobState
    reason: str | None
    spec: JobSpec
    counts: JobCounts
    created_at: float
    started_at: float | None = None
    finished_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRecord:
    """`samples` are dataset indexes, in placement order; `row_start` is a row of the store."""

    job: str
    index: int
    row_start: int
    rows: int
    samples: tuple[int, ...]
    state: UnitState = UnitState.PENDING


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitLease:
    """The right to write one unit, until `expires_at` or until somebody holds a higher `fence`."""

    unit: UnitRecord
    owner: str
    fence: int
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """One sample of a job. `sample` is its dataset index, `length` the tokens that are captured (after truncation)."""

    job: str
    sample: int
    id: str
    unit: int | None
    row_start: int
    length: int
    status: SampleStatus
    reason: str | None = None
    attempts: int = 0
    worker: str | None = None
    next_token: int = -1
    digest: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleVerdict:
    """How a sample of a unit ended: `status` is STORED or FAILED (with a `reason`), `worker` the last that was asked."""

    sample: int
    status: SampleStatus
    reason: str | None
    attempts: int
    worker: str | None
    next_token: int = -1
    digest: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardObject:
    """An object as it stands in the store: its key below the store's root, and its size.

    What is in it the verdicts say, sample by sample.
    """

    key: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """A registered worker. `dumps` is its dump configuration (contract §5), as validated at the edge; `api_key` a secret."""

    name: str
    url: str
    dumps: dict[str, Any]
    requests_per_second: float | None = None
    draining: bool = False
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """A line of the append-only event log: `id` only grows; `data` is JSON."""

    id: int
    job: str | None
    name: str
    at: float
    data: dict[str, Any] = field(default_factory=dict)
