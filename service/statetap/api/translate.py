"""From the runtime's plain data to the API's bodies, and back. Enumerations cross as their values, validated on the way out."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime

from statetap_client.schemas import (
    Dataset,
    Event,
    Job,
    JobRequest,
    LayerNorms,
    Progress,
    Sample,
    SampleCounts,
    Worker,
    WorkerRequest,
)

from statetap.core.records import DatasetRecord, EventRecord, SampleRecord, SampleStatus, WorkerRecord
from statetap.core.spec import AUX_HIDDEN_STATES, Compression, Final, Identity
from statetap.core.worker import WorkerState
from statetap.runtime.views import JobSubmission, JobView, WorkerView


def instant(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def instant_or_none(seconds: float | None) -> datetime | None:
    return None if seconds is None else instant(seconds)


def dataset(record: DatasetRecord) -> Dataset:
    return Dataset(
        id=record.id,
        name=record.name,
        model=record.model,
        samples=record.samples,
        tokens=record.tokens,
        max_tokens=record.max_tokens,
        sha256=record.sha256,
        created_at=instant(record.created_at),
    )


def submission(request: JobRequest) -> JobSubmission:
    capture, placement = request.capture, request.placement
    return JobSubmission(
        dataset=request.dataset,
        store=request.store,
        name=request.name,
        priority=request.priority,
        preset=capture.preset,
        aux_layer_ids=None if capture.aux_layer_ids is None else tuple(capture.aux_layer_ids),
        final=None if capture.final is None else Final(capture.final),
        identity=None if capture.identity is None else Identity(capture.identity),
        order=placement.order,
        seed=placement.seed,
        rows_per_shard=placement.rows_per_shard,
        rows_per_chunk=placement.rows_per_chunk,
        compression=Compression(request.compression),
        on_over_long=request.on_over_long,
        ignore_space=request.ignore_space,
    )


def progress(view: JobView) -> Progress:
    counts = view.record.counts
    return Progress(
        samples=SampleCounts(
            total=counts.samples,
            pending=counts.pending,
            stored=counts.stored,
            failed=counts.failed,
            cancelled=counts.cancelled,
            skipped=counts.skipped,
        ),
        tokens_total=counts.tokens_total,
        tokens_stored=counts.tokens_stored,
        bytes_total=view.bytes_total,
        bytes_stored=counts.bytes_stored,
        units_total=counts.units_total,
        units_committed=counts.units_committed,
        tokens_per_second=view.tokens_per_second,
        bytes_per_second=view.bytes_per_second,
        eta_seconds=view.eta_seconds,
    )


def layer_norms(view: JobView) -> dict[str, list[LayerNorms]]:
    layers = view.record.spec.capture.aux_layer_ids
    by_array: dict[str, list[LayerNorms]] = {}
    for array, slot, kind, summary in view.norms:
        norms = LayerNorms(
            layer=layers[slot] if array == AUX_HIDDEN_STATES else None,
            rows=kind.value,
            count=summary.count,
            min=summary.least,
            mean=summary.mean,
            max=summary.largest,
        )
        by_array.setdefault(array, []).append(norms)
    return by_array


def job(view: JobView) -> Job:
    record, spec = view.record, view.record.spec
    return Job.model_validate(
        {
            "id": record.id,
            "name": record.name,
            "state": record.state.value,
            "reason": record.reason,
            "priority": record.priority,
            "dataset": spec.dataset,
            "store": spec.store,
            "model_path": spec.model.model_path,
            "model_fingerprint": spec.model.model_fingerprint,
            "aux_layer_ids": spec.capture.aux_layer_ids,
            "final": spec.capture.final.value,
            "dtype": spec.model.dtype,
            "identity": spec.identity.value,
            "compression": spec.compression.value,
            "progress": progress(view),
            "failures": view.failures,
            "workers": {name: asdict(tally) for name, tally in view.workers.items()},
            "layer_norms": layer_norms(view),
            "created_at": instant(record.created_at),
            "started_at": instant_or_none(record.started_at),
            "finished_at": instant_or_none(record.finished_at),
        }
    )


def sample(record: SampleRecord) -> Sample:
    return Sample.model_validate(
        {
            "index": record.sample,
            "id": record.id,
            "status": record.status.name.lower(),
            "reason": record.reason,
            "attempts": record.attempts,
            "worker": record.worker,
            "row_start": record.row_start,
            "length": record.length,
            "digest": f"{record.digest:016x}" if record.status is SampleStatus.STORED else None,
        }
    )


def sample_status(name: str) -> SampleStatus:
    return SampleStatus[name.upper()]


def event(record: EventRecord) -> Event:
    return Event(id=record.id, event=record.name, at=instant(record.at), data=record.data)


def worker(view: WorkerView) -> Worker:
    """A busy worker is a ready one with a request in flight."""
    state = WorkerState.READY if view.state is WorkerState.BUSY else view.state
    return Worker.model_validate(
        {
            "name": view.record.name,
            "url": view.record.url,
            "dumps": view.record.dumps,
            "requests_per_second": view.record.requests_per_second,
            "has_api_key": view.record.api_key is not None,
            "state": state.value,
            "reason": view.reason,
            "in_flight": view.in_flight,
            "requests": view.requests,
            "failures": view.failures,
            "model_path": None if view.model is None else view.model.model_path,
            "model_fingerprint": None if view.model is None else view.model.model_fingerprint,
            "context_length": view.context_length,
            "dump_bytes": view.dump_bytes,
            "budget_bytes": view.budget_bytes,
        }
    )


def worker_record(request: WorkerRequest) -> WorkerRecord:
    return WorkerRecord(
        name=request.name,
        url=request.url,
        dumps=request.dumps.model_dump(mode="json"),
        requests_per_second=request.requests_per_second,
        api_key=None if request.api_key is None else request.api_key.get_secret_value(),
    )
