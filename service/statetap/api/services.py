"""What the handlers need of the rest of the service. `main` fills it in; nothing here knows how the parts are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from statetap.api.gate import Gate
from statetap.ports import Datasets, Ledger
from statetap.runtime.views import Jobs, Workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on bodies, in bytes as sent. `dataset_bytes` None: as large as the disk takes."""

    json_bytes: int = 1 << 20
    dataset_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """`readiness` says whether work can be taken and, if not, why; `render_metrics` gives Prometheus' text format,
    `gate` says who may call."""

    jobs: Jobs
    workers: Workers
    datasets: Datasets
    ledger: Ledger
    readiness: Callable[[], tuple[bool, str]]
    render_metrics: Callable[[], bytes]
    log: FilteringBoundLogger
    limits: Limits = Limits()
    gate: Gate
