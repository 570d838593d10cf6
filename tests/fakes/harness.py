"""The whole runtime over fakes: workers that publish what they should, a clock that a test moves, nothing on disk.

`World` outlives its service: `stop` and `kill` end it, `start` begins another one over the same ledger, store, dump directories
and answers. After each call that lets something happen, everything that can happen without the clock has happened.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray
from statetap.core.dumps import DumpFacts
from statetap.core.records import JobRecord, SampleStatus, WorkerRecord
from statetap.core.spec import CaptureSpec, Final, HiddenArray, Identity, ModelFacts
from statetap.ports import GenerateSample, RecordedAnswer, ServerFacts, TapRefused, TapSeen
from statetap.runtime.admission import Admission
from statetap.runtime.disk_watch import DiskWatch
from statetap.runtime.job_course import JobCourse
from statetap.runtime.job_states import JobStates
from statetap.runtime.jobs import JobDesk
from statetap.runtime.pool import WorkerPool
from statetap.runtime.run_ports import RunPorts, WorkerPorts
from statetap.runtime.service import Service
from statetap.runtime.views import JobSubmission
from statetap.settings import Runtime
from statetap.telemetry.metrics import Metrics
from statetap_sglang.checksum import row_checksums
from statetap_sglang.format import TensorView
from structlog.testing import LogCapture

from tests.fakes.clock import HandClock, settle
from tests.fakes.datasets import MemoryDatasets
from tests.fakes.dumps import FakeDump, FakeDumpSource
from tests.fakes.inference import FakeInferenceClient
from tests.fakes.ledger import FakeLedger
from tests.fakes.store import FakeInspector, FakeShardWriter, FakeStore

MODEL = ModelFacts("org/model", "fingerprint", 8, 4, 1000, "float32")
CAPTURE = CaptureSpec((1, 3), Final.POST_NORM)
ARRAYS = CAPTURE.hidden_arrays(MODEL)
ROW_BYTES = CAPTURE.row_bytes(MODEL)
CONTEXT_LENGTH = 512
STORE = "store"
TAP = TapSeen(
    tap="boot1-0",
    capture=CAPTURE,
    model=MODEL,
    identity=Identity.TOKENS,
    budget_bytes=1 << 24,
    context_length=None,
    chunked_prefill_size=None,
    alive=True,
    boot="boot1",
)


def hidden_rows(array: HiddenArray, tokens: NDArray[np.int32], first: int = 0) -> NDArray[np.float32]:
    """What the fake model computes of `tokens`, of which the first is at position `first`: float32 `[n, *row_shape]`."""
    position = np.arange(first, first + len(tokens), dtype=np.float32)
    column = np.arange(np.prod(array.row_shape), dtype=np.float32).reshape(array.row_shape)
    rows = (tokens * 8 + position / 8 + len(array.name)).reshape(-1, *[1] * len(array.row_shape))
    return np.asarray(rows + column / 64, dtype=np.float32)


class MemoryAnswers:
    """An AnswerJournal in memory. While `broken` is set, no answer can be recorded, for that reason."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, int], list[RecordedAnswer]] = {}
        self.broken: OSError | None = None

    def record(self, job: str, unit: int, answer: RecordedAnswer) -> None:
        if self.broken is not None:
            raise self.broken
        self.kept.setdefault((job, unit), []).append(answer)

    def recall(self, job: str, unit: int) -> list[RecordedAnswer]:
        return list(self.kept.get((job, unit), []))

    def forget(self, job: str, unit: int) -> None:
        self.kept.pop((job, unit), None)

    def keep_only(self, units: Collection[tuple[str, int]]) -> None:
        self.kept = {unit: answers for unit, answers in self.kept.items() if unit in units}


class FakeWorker:
    """A worker with its dump directory. `publish` says what a request makes it publish before it is answered.

    `names` is what its answers call the dumps of each request; without an entry they say nothing of them. `stamps` says when a
    dump's pass began and ended, in nanoseconds.
    """

    def __init__(self, name: str, tap: TapSeen = TAP, *, announced: bool = True) -> None:
        self.name = name
        self.tap = tap
        self.source = FakeDumpSource()
        self.facts = ServerFacts("0.5.23", tap.model.model_path, CONTEXT_LENGTH)
        self.names: dict[str, set[str]] = {}
        self.client = FakeInferenceClient(on_request=self._on_request, facts=self.facts, names=self.names)
        self.publish: Callable[[GenerateSample], None] = self.publish_whole
        self.stamps: Callable[[GenerateSample], tuple[int, int]] = lambda _: (0, 0)
        self.quiet_period_seconds = 0.0
        self._sequence = 0
        if announced:
            self.source.announce(tap)

    @property
    def record(self) -> WorkerRecord:
        return WorkerRecord(name=self.name, url=f"http://{self.name}", dumps={"kind": "plugin", "dir": "/dumps"})

    @property
    def asked(self) -> list[str]:
        """The rids of all its requests, in order."""
        return [sample.rid for request in self.client.requests for sample in request]

    @property
    def asked_lengths(self) -> list[int]:
        return [len(sample.token_ids) for request in self.client.requests for sample in request]

    def publish_whole(self, sample: GenerateSample) -> None:
        self.put(sample)

    def publish_nothing(self, sample: GenerateSample) -> None:
        """A request whose dump never appears."""

    def put(
        self,
        sample: GenerateSample,
        start: int = 0,
        stop: int | None = None,
        *,
        add: float = 0.0,
        times: float = 1.0,
        torn: bool = False,
        named: bool = True,
        noticed: bool = True,
    ) -> FakeDump:
        """Publish rows `[start, stop)` of a sample; `add` makes another reading of them, and so does `times`.

        `torn`: not what was computed when its checksums were taken. By tokens, the answer names the dump, unless not `named`.
        """
        tokens = sample.token_ids[start:stop]
        by_tokens = self.tap.identity is Identity.TOKENS
        arrays = self.tap.capture.hidden_arrays(self.tap.model)
        views = {a.name: (hidden_rows(a, tokens, start) * np.float32(times) + np.float32(add)).tobytes() for a in arrays}
        tensors = {
            array.name: TensorView("F32", (len(tokens), *array.row_shape), memoryview(views[array.name])) for array in arrays
        }
        checksums = row_checksums(tensors) + int(torn)
        self._sequence += 1
        name = f"{self.tap.tap}/req_{self._sequence}"
        if by_tokens:
            self.names.setdefault(sample.rid, set()).update({name} if named else ())
        stamps = self.stamps(sample)
        facts = DumpFacts(
            dump_id=f"req_{self._sequence}",
            sequence=self._sequence,
            rows=len(tokens),
            nbytes=sum(map(len, views.values())),
            tensors=tuple((array.name, array.dtype, (len(tokens), *array.row_shape)) for array in arrays),
            capture=self.tap.capture,
            model_fingerprint=self.tap.model.model_fingerprint,
            rid=sample.rid if by_tokens else None,
            prefix_len=start if by_tokens else 0,
            prompt_len=len(sample.token_ids) if by_tokens else None,
            token_ids=tokens.astype("<i4").tobytes() if by_tokens else None,
            name=name if by_tokens else None,
            forward_start_ns=stamps[0],
            forward_end_ns=stamps[1],
        )
        return self.source.put(facts, views, checksums.tobytes() if by_tokens else None, noticed=noticed)

    def restart(self, *, announced: bool = True) -> None:
        """Another boot of the server, whose rank 0 announces itself."""
        boot = f"boot{int(self.tap.boot.removeprefix('boot')) + 1}"
        self.tap = replace(self.tap, tap=f"{boot}-0", boot=boot)
        if announced:
            self.source.announce(self.tap)

    def announce_rank(self, rank: int, of: int, **changes: Any) -> TapSeen:
        """The tap of one data-parallel rank of the present boot announces itself."""
        tap = replace(self.tap, tap=f"{self.tap.boot}-{rank}", dp_rank=rank, dp_size=of, **changes)
        self.source.announce(tap)
        return tap

    def refuse(self, reason: str) -> None:
        """The present boot's tap says that it publishes nothing."""
        self.source.announce(TapRefused(self.tap.tap, self.tap.boot, reason, alive=True))

    def connect(self) -> WorkerPorts:
        self.client.closed = False
        return WorkerPorts(self.client, self.source, self.quiet_period_seconds, None)

    async def _on_request(self, samples: Sequence[GenerateSample]) -> None:
        for sample in samples:
            self.publish(sample)


class InlineExecutor(ThreadPoolExecutor):
    """Does its work at once, where it is submitted: no thread makes a test's outcome depend on time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class World:
    """Everything that a service works on, and the service. `workers` may grow; those given at first are configured ones."""

    def __init__(self, *workers: FakeWorker, **settings: Any) -> None:
        self.workers = {worker.name: worker for worker in workers}
        self.configured = [worker.record for worker in workers]
        self.settings = Runtime(**settings)
        self.clock = HandClock()
        self.ledger = FakeLedger()
        self.store = FakeStore()
        self.writer = FakeShardWriter(self.store)
        self.inspector = FakeInspector()
        self.datasets = MemoryDatasets()
        self.answers = MemoryAnswers()
        self.metrics = Metrics()
        self.starts = 0
        self.running = False
        self._capture = LogCapture()

    # --- the service --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start a service; its workers are ready when this returns, if they can be."""
        await self.begin()
        await settle()

    async def begin(self) -> None:
        """Start a service and return before anything else has happened."""
        asyncio.get_running_loop().set_default_executor(InlineExecutor())
        self.starts += 1
        owner = f"owner-{self.starts}"
        log = structlog.wrap_logger(
            structlog.PrintLogger(), processors=[self._capture], wrapper_class=structlog.make_filtering_bound_logger(0)
        )
        self._others = asyncio.all_tasks()
        ports = RunPorts(
            clock=self.clock,
            settings=self.settings,
            ledger=self.ledger,
            writer=self.writer,
            inspector=self.inspector,
            answers=self.answers,
            metrics=self.metrics,
            log=log,
        )
        self.pool = WorkerPool(
            lambda record: self.workers[record.name].connect(),
            self.ledger,
            clock=self.clock,
            settings=self.settings,
            metrics=self.metrics,
            log=log,
        )
        self.states = JobStates(self.ledger, self.clock)
        self.course = JobCourse(owner, self.states, self.pool, self.datasets, self.store, ports, version="0.1.0")
        self.admission = Admission(
            self.states,
            self.pool,
            self.course.datasets,
            self.store,
            self.ledger,
            self.clock,
            locate=lambda place: place,
            reserve_bytes=self.settings.disk_reserve_bytes,
            version="0.1.0",
        )
        self.desk = JobDesk(self.states, self.admission, self.course, self.pool, self.ledger, log)
        disk = DiskWatch(self.states, self.course, self.store, ports)
        self.service = Service(owner, self.ledger, self.answers, self.pool, self.course, disk)
        await self.service.start(self.configured)
        self.running = True

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Stop the service as a signal does."""
        self.running = False
        await self.service.stop(drain_seconds)

    async def kill(self) -> None:
        """End the service where it stands: what it would still do on its way out is undone."""
        self.running = False
        ledger, answers = copy.deepcopy(self.ledger), copy.deepcopy(self.answers)
        held = {worker.name: dict(worker.source._dumps) for worker in self.workers.values()}
        views = {dump: dump.views for dumps in held.values() for dump in dumps.values()}
        tasks = asyncio.all_tasks() - self._others - {asyncio.current_task()}
        for _ in range(3):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            tasks = asyncio.all_tasks() - self._others - {asyncio.current_task()}
        self.ledger, self.answers = ledger, answers
        for worker in self.workers.values():
            worker.source._dumps = held[worker.name]
            await worker.source.close()
        for dump, kept in views.items():
            dump.views, dump.released = kept, False

    async def passes(self, seconds: float) -> None:
        """Let time pass, and all that it brings happen in its order."""
        await settle()
        end = self.clock.monotonic() + seconds
        while (due := self.clock.next_waking) is not None and self.clock.monotonic() + due <= end:
            self.clock.advance(max(due, 0.0))
            await settle()
        self.clock.advance(end - self.clock.monotonic())
        await settle()

    # --- jobs ---------------------------------------------------------------------------------------------------------

    async def dataset(self, *lengths: int, tokens: Sequence[Sequence[int]] | None = None) -> str:
        """Take in a dataset with samples of these lengths (or of these tokens); no two of them are the same."""
        rows = tokens or [[(97 * index + 31 * j) % MODEL.vocab_size for j in range(n)] for index, n in enumerate(lengths)]
        record = self.datasets.put([(f"s{index}", row, [1] * len(row)) for index, row in enumerate(rows)])
        await self.ledger.add_dataset(record)
        return record.id

    async def submit(self, *lengths: int, key: str | None = None, request_hash: str = "", **submission: Any) -> str:
        """Submit a job over such a dataset, by default in shards of 8 rows, and let happen what can; returns its id."""
        asked = {"store": STORE, "rows_per_shard": 8, "rows_per_chunk": 4} | submission
        if "dataset" not in asked:
            asked["dataset"] = await self.dataset(*lengths)
        view, _ = await self.desk.submit(JobSubmission(**asked), idempotency_key=key, request_hash=request_hash)
        await settle()
        return view.record.id

    async def job(self, job: str) -> JobRecord:
        return await self.ledger.job(job)

    def statuses(self, job: str) -> list[SampleStatus]:
        """By dataset index, as the ledger has them."""
        return [sample.status for _, sample in sorted(self.ledger.jobs_by_id[job].samples.items())]

    def reasons(self, job: str) -> list[str | None]:
        return [sample.reason for _, sample in sorted(self.ledger.jobs_by_id[job].samples.items())]

    def assert_stored(self, job: str) -> None:
        """Every sample that the ledger calls stored stands in the store, bit for bit, where its row says."""
        record = self.ledger.jobs_by_id[job]
        dataset = self.datasets._datasets[record.record.spec.dataset]
        group = self.store.groups[record.record.spec.store]
        for sample in record.samples.values():
            if sample.status is SampleStatus.STORED:
                rows = slice(sample.row_start, sample.row_start + sample.length)
                tokens = dataset.input_ids(sample.sample)[: sample.length]
                for array in ARRAYS:
                    np.testing.assert_array_equal(group.hidden[array.name][rows], hidden_rows(array, tokens))

    # --- what happened -------------------------------------------------------------------------------------------------

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [dict(entry) for entry in self._capture.entries if entry["event"] == event]

    def events(self, job: str) -> list[str]:
        """Names in the job's event log."""
        return [event.name for event in self.ledger.log if event.job == job]

    @property
    def held_dumps(self) -> list[str]:
        return [f"{name}/{dump}" for name, worker in self.workers.items() for dump in worker.source.held]

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"statetap_{name}", labels) or 0.0


@asynccontextmanager
async def running(*workers: FakeWorker, **settings: Any) -> AsyncIterator[World]:
    """A world with a running service, which is stopped at the end unless a test stopped it."""
    world = World(*workers, **settings)
    await world.start()
    try:
        yield world
    finally:
        if world.running:
            await world.stop()
