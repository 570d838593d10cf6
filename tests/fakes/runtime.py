"""The runtime as the API sees it, in memory: jobs that go only where a test sends them, workers that are only listed.

Datasets are read for real (NDJSON, gzip), so that streaming and refusals are those of a server.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from statetap.core.norms import NormSummary, RowKind
from statetap.core.placement import Geometry
from statetap.core.records import (
    DatasetRecord,
    EventRecord,
    JobCounts,
    JobRecord,
    JobSpec,
    JobState,
    SampleRecord,
    SampleStatus,
    WorkerRecord,
)
from statetap.core.spec import CaptureSpec, Final, Identity, ModelFacts
from statetap.core.worker import WorkerState
from statetap.ports import DatasetRefused, IdempotencyConflict, LedgerError, NotFound, Page
from statetap.runtime.views import JobSubmission, JobView, RefusalKind, Refused, WorkerTally, WorkerView

T = TypeVar("T")

NOW = 1_760_000_000.0
ROW_BYTES = 4608
# Of jobs that are over.
NORMS = (
    *(
        ("aux_hidden_states", slot, kind, NormSummary(4, 10.0 * (slot + 1), 4000.0, 8000.0))
        for slot in range(3)
        for kind in (RowKind.FIRST, RowKind.LATER)
    ),
    ("last_hidden_states", 0, RowKind.FIRST, NormSummary(4, 1.5, 2.5, 8.0)),
)
MODEL = ModelFacts("org/model", "fingerprint", 30, 576, 49152, "bfloat16")


def page(items: Sequence[T], limit: int, cursor: str | None) -> Page[T]:
    first = 0 if cursor is None else int(cursor)
    rest = first + limit
    return Page(list(items[first:rest]), str(rest) if rest < len(items) else None)


class MemoryLedger:
    """The part of the ledger that the API reads, and the events that wake its streams."""

    def __init__(self) -> None:
        self.dataset_records: dict[str, DatasetRecord] = {}
        self.job_records: dict[str, JobRecord] = {}
        self.sample_records: dict[str, list[SampleRecord]] = {}
        self.event_records: list[EventRecord] = []
        self.grown = asyncio.Condition()
        self.broken: Exception | None = None

    async def add_dataset(self, record: DatasetRecord) -> None:
        self.dataset_records[record.id] = record

    async def dataset(self, dataset: str) -> DatasetRecord:
        if dataset not in self.dataset_records:
            raise NotFound(f"no dataset {dataset!r}")
        return self.dataset_records[dataset]

    async def datasets(self, *, limit: int, cursor: str | None) -> Page[DatasetRecord]:
        return page(list(self.dataset_records.values()), limit, cursor)

    async def delete_dataset(self, dataset: str) -> None:
        await self.dataset(dataset)
        for job in self.job_records.values():
            if job.spec.dataset == dataset and job.finished_at is None:
                raise LedgerError(f"job {job.id} still needs dataset {dataset}; cancel it first")
        del self.dataset_records[dataset]

    async def job(self, job: str) -> JobRecord:
        if self.broken is not None:
            raise self.broken
        if job not in self.job_records:
            raise NotFound(f"no job {job!r}")
        return self.job_records[job]

    async def samples(self, job: str, *, status: SampleStatus | None, limit: int, cursor: str | None) -> Page[SampleRecord]:
        return page([s for s in self.sample_records[job] if status in (None, s.status)], limit, cursor)

    async def events(self, job: str, *, after: int, limit: int) -> list[EventRecord]:
        return [e for e in self.event_records if e.job == job and e.id > after][:limit]

    async def append_event(self, job: str | None, name: str, data: Mapping[str, Any], *, at: float) -> int:
        async with self.grown:
            self.event_records.append(EventRecord(id=len(self.event_records) + 1, job=job, name=name, at=at, data=dict(data)))
            self.grown.notify_all()
        return len(self.event_records)


class FakeDatasets:
    """Reads NDJSON of `input_ids`; keeps nothing but the count."""

    def __init__(self, ledger: MemoryLedger, root: Path) -> None:
        self.root = root
        self.deleted: list[str] = []
        self.received_gzipped = False
        self._ledger = ledger
        self._count = 0

    async def ingest(
        self, body: AsyncIterator[bytes], *, name: str, model: str | None, gzipped: bool, allow_empty_mask: bool
    ) -> DatasetRecord:
        self.received_gzipped = gzipped
        inflate: Callable[[bytes], bytes] = zlib.decompressobj(wbits=31).decompress if gzipped else bytes
        lengths: list[int] = []
        rest = b""
        async for chunk in body:
            *lines, rest = (rest + inflate(chunk)).split(b"\n")
            for line in lines:
                lengths.append(self._length(line, len(lengths) + 1, allow_empty_mask=allow_empty_mask))
        if rest:
            lengths.append(self._length(rest, len(lengths) + 1, allow_empty_mask=allow_empty_mask))
        return self._record(name, model, lengths)

    async def ingest_path(self, path: str, *, name: str, model: str | None, allow_empty_mask: bool) -> DatasetRecord:
        file = self.root / path
        if not file.is_file():
            raise DatasetRefused(f"no file {path} below {self.root}", field="path")

        async def chunks() -> AsyncIterator[bytes]:
            yield file.read_bytes()

        return await self.ingest(
            chunks(), name=name, model=model, gzipped=file.suffix == ".gz", allow_empty_mask=allow_empty_mask
        )

    async def delete(self, dataset: str) -> None:
        self.deleted.append(dataset)

    @staticmethod
    def _length(line: bytes, number: int, *, allow_empty_mask: bool) -> int:
        try:
            sample = json.loads(line)
        except ValueError:
            raise DatasetRefused("not JSON", line=number) from None
        if not sample.get("input_ids"):
            raise DatasetRefused("an empty sequence", line=number, field="input_ids")
        if not any(sample.get("loss_mask", [1])) and not allow_empty_mask:
            raise DatasetRefused("no token to train on", line=number, field="loss_mask")
        return len(sample["input_ids"])

    def _record(self, name: str, model: str | None, lengths: Sequence[int]) -> DatasetRecord:
        self._count += 1
        return DatasetRecord(
            id=f"ds{self._count}",
            name=name,
            model=model or MODEL.model_path,
            samples=len(lengths),
            tokens=sum(lengths),
            max_tokens=max(lengths, default=0),
            sha256=sha256(repr(lengths).encode()).hexdigest(),
            tokenizer="tokenizer",
            chat_template_sha256="",
            created_at=NOW,
        )


class FakeJobs:
    """Jobs whose states a test sets. A store named `full` has no space, one named `bad` is outside the roots."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self.submissions: list[JobSubmission] = []
        self.has_workers = True
        self.finish_at_once = False
        self._ledger = ledger
        self._keys: dict[str, tuple[str, str]] = {}

    async def submit(self, submission: JobSubmission, *, idempotency_key: str | None, request_hash: str) -> tuple[JobView, bool]:
        if idempotency_key in self._keys:
            known_hash, job = self._keys[idempotency_key]
            if known_hash != request_hash:
                raise IdempotencyConflict(f"the key {idempotency_key!r} was used for another request; use a new one")
            return await self.view(job), False
        dataset = await self._ledger.dataset(submission.dataset)
        if submission.store == "full":
            raise Refused(RefusalKind.NO_SPACE, "the job needs 10 GB, the store has 1 GB; free some or use ignore_space")
        if submission.store == "bad":
            raise Refused(RefusalKind.INVALID, "the store is outside the roots", field="store")
        if not self.has_workers:
            raise Refused(RefusalKind.CONFLICT, "no worker has told the model's shape; add one")
        self.submissions.append(submission)
        record = self._new(submission, dataset)
        if idempotency_key is not None:
            self._keys[idempotency_key] = (request_hash, record.id)
        await self._ledger.append_event(record.id, "job.submitted", {"samples": dataset.samples}, at=NOW)
        if self.finish_at_once:
            await self.finish(record.id)
        return await self.view(record.id), True

    async def view(self, job: str) -> JobView:
        record = await self._ledger.job(job)
        failed = record.counts.failed
        return JobView(
            record=record,
            bytes_total=record.counts.tokens_total * ROW_BYTES,
            tokens_per_second=1234.5,
            bytes_per_second=5_688_576.0,
            eta_seconds=None if record.finished_at else 60.0,
            failures={"non-finite states": failed} if failed else {},
            workers={"w0": WorkerTally(stored=record.counts.stored, attempts=record.counts.stored + failed, lost=failed)},
            norms=NORMS if record.finished_at else (),
        )

    async def list(self, *, limit: int, cursor: str | None) -> Page[JobView]:
        found = page(list(reversed(self._ledger.job_records)), limit, cursor)
        return Page([await self.view(job) for job in found.items], found.cursor)

    async def pause(self, job: str) -> JobView:
        return await self._move(job, JobState.RUNNING, JobState.PAUSED, "job.paused")

    async def resume(self, job: str) -> JobView:
        return await self._move(job, JobState.PAUSED, JobState.RUNNING, "job.resumed")

    async def cancel(self, job: str) -> JobView:
        return await self._move(job, JobState.RUNNING, JobState.CANCELLED, "job.cancelled")

    async def retry(self, job: str) -> JobView:
        return await self._move(job, JobState.COMPLETED, JobState.RUNNING, "job.retried")

    async def wait_for_event(self, job: str, after: int, *, timeout_seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds), self._ledger.grown:
                await self._ledger.grown.wait_for(lambda: any(e.job == job and e.id > after for e in self._ledger.event_records))

    async def finish(self, job: str, *, failed: int = 0) -> None:
        """The job ends, with its last `failed` samples failed."""
        record = await self._ledger.job(job)
        samples = self._ledger.sample_records[job]
        stored = len(samples) - failed
        self._ledger.sample_records[job] = [
            replace(s, status=SampleStatus.STORED, digest=0xABC, attempts=1, worker="w0")
            if s.sample < stored
            else replace(s, status=SampleStatus.FAILED, reason="non-finite states", attempts=3, worker="w0")
            for s in samples
        ]
        tokens = sum(s.length for s in samples[:stored])
        counts = replace(
            record.counts,
            pending=0,
            stored=stored,
            failed=failed,
            tokens_stored=tokens,
            bytes_stored=tokens * ROW_BYTES,
            units_committed=1,
        )
        self._ledger.job_records[job] = replace(record, counts=counts)
        await self._set(job, JobState.COMPLETED, "job.completed")

    async def _move(self, job: str, allowed: JobState, state: JobState, event: str) -> JobView:
        record = await self._ledger.job(job)
        if record.state is not allowed:
            raise Refused(RefusalKind.CONFLICT, f"job {job} is {record.state}, so this cannot be done")
        await self._set(job, state, event)
        return await self.view(job)

    async def _set(self, job: str, state: JobState, event: str) -> None:
        finished = NOW + 60 if state in (JobState.COMPLETED, JobState.CANCELLED) else None
        record = self._ledger.job_records[job]
        self._ledger.job_records[job] = replace(record, state=state, finished_at=finished)
        await self._ledger.append_event(job, event, {}, at=NOW)

    def _new(self, submission: JobSubmission, dataset: DatasetRecord) -> JobRecord:
        job = f"job{len(self._ledger.job_records) + 1}"
        spec = JobSpec(
            dataset=dataset.id,
            store=submission.store,
            capture=CaptureSpec(submission.aux_layer_ids or (1, 14, 26), submission.final or Final.POST_NORM),
            model=MODEL,
            identity=submission.identity or Identity.TOKENS,
            geometry=Geometry(1024, 64, 32),
            order=submission.order,
            seed=submission.seed,
            on_over_long=submission.on_over_long,
            first_row=0,
            first_sample=0,
            compression=submission.compression,
        )
        record = JobRecord(
            id=job,
            name=submission.name or dataset.name,
            priority=submission.priority,
            state=JobState.RUNNING,
            reason=None,
            spec=spec,
            counts=JobCounts(pending=dataset.samples, tokens_total=dataset.tokens, units_total=1),
            created_at=NOW,
            started_at=NOW,
        )
        self._ledger.job_records[job] = record
        self._ledger.sample_records[job] = [
            SampleRecord(
                job=job, sample=i, id=str(i + 1), unit=0, row_start=32 * i, length=dataset.max_tokens, status=SampleStatus.PENDING
            )
            for i in range(dataset.samples)
        ]
        return record


class FakeWorkers:
    """A list of workers that are always ready."""

    def __init__(self) -> None:
        self.records: dict[str, WorkerRecord] = {}

    def list(self) -> list[WorkerView]:
        return [self._view(record) for record in self.records.values()]

    async def add(self, record: WorkerRecord) -> WorkerView:
        if record.name in self.records:
            raise Refused(RefusalKind.CONFLICT, f"there is a worker {record.name} already; remove it first", field="name")
        self.records[record.name] = record
        return self._view(record)

    async def remove(self, name: str) -> None:
        self._known(name)
        del self.records[name]

    async def drain(self, name: str) -> WorkerView:
        self.records[name] = replace(self._known(name), draining=True)
        return self._view(self.records[name])

    def _known(self, name: str) -> WorkerRecord:
        if name not in self.records:
            raise NotFound(f"no worker {name!r}")
        return self.records[name]

    @staticmethod
    def _view(record: WorkerRecord) -> WorkerView:
        return WorkerView(
            record=record,
            state=WorkerState.DRAINING if record.draining else WorkerState.BUSY,
            reason=None,
            in_flight=1,
            requests=7,
            failures=0,
            model=MODEL,
            context_length=8192,
            dump_bytes=1 << 20,
            budget_bytes=8 << 30,
        )
