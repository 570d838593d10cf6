"""What the runs of a host and its workers' drivers are given, and how a run ends."""

from __future__ import annotations

from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from statetap.core.records import JobCounts, SampleVerdict
from statetap.core.routing import UnitId
from statetap.ports import AnswerJournal, CaptureInspector, Clock, DumpSource, InferenceClient, Ledger, ShardWriter
from statetap.runtime.tally import CommitReport
from statetap.settings import Runtime
from statetap.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class RunPorts:
    """What every run of a host shares."""

    clock: Clock
    settings: Runtime
    ledger: Ledger
    writer: ShardWriter
    inspector: CaptureInspector
    answers: AnswerJournal
    metrics: Metrics
    log: FilteringBoundLogger


@dataclass(frozen=True, slots=True)
class WorkerPorts:
    """One worker's connections, made by `main`. `requests_per_second` limits it, if set."""

    client: InferenceClient
    source: DumpSource
    quiet_period_seconds: float
    requests_per_second: float | None


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended: with a commit (`counts` are the job's after it, `report` is what its event says), else for `reason`.

    Endings may come in another order than their commits were recorded in.
    """

    unit: UnitId
    counts: JobCounts | None = None
    verdicts: tuple[SampleVerdict, ...] = ()
    report: CommitReport | None = None
    reason: str | None = None
