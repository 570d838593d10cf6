"""Wires the service: the one place that knows every adapter. `serve` runs it until it is told to stop."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import secrets
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog
from aiohttp import web
from pydantic import TypeAdapter
from statetap_client.schemas import Dumps, PlainDumps, PluginDumps
from statetap_sglang.plain import PlainLayout

from statetap import __version__
from statetap.adapters.datasets.arrow import ArrowDatasets
from statetap.adapters.datasets.limits import IntakeLimits
from statetap.adapters.datasets.tokenizer import TokenizerSource
from statetap.adapters.dumps.plain import PlainDumpSource
from statetap.adapters.dumps.plugin import PluginDumpSource
from statetap.adapters.inference.sglang import SglangClient
from statetap.adapters.ledger.answer_journal import FileAnswerJournal
from statetap.adapters.ledger.ledger import SqlLedger
from statetap.adapters.store.shard_writers import ShardWriters
from statetap.adapters.store.threaded_capture_inspector import ThreadedCaptureInspector
from statetap.adapters.store.zarr_store import ZarrStore
from statetap.adapters.system_clock import SystemClock
from statetap.api.app import build_app
from statetap.api.gate import Gate
from statetap.api.server import ApiRunner
from statetap.api.services import Limits, Services
from statetap.api.translate import worker, worker_record
from statetap.core.object_urls import lies_below, normalise
from statetap.core.records import WorkerRecord
from statetap.core.spec import CaptureSpec, Final, Identity, ModelFacts
from statetap.heap import keep_little
from statetap.ports import Clock, DumpSource, TapSeen
from statetap.runtime.admission import Admission
from statetap.runtime.disk_watch import DiskWatch
from statetap.runtime.job_course import JobCourse
from statetap.runtime.job_states import JobStates
from statetap.runtime.jobs import JobDesk
from statetap.runtime.pool import WorkerPool
from statetap.runtime.run_ports import RunPorts, WorkerPorts
from statetap.runtime.service import Service
from statetap.runtime.views import RefusalKind, Refused
from statetap.settings import Runtime, Settings
from statetap.supervision import READY, STOPPING, Supervisor
from statetap.telemetry import events, logs
from statetap.telemetry.metrics import Metrics

SHUTDOWN_SECONDS = 5.0
LEDGER_FILE = "ledger.db"
_DUMPS: TypeAdapter[Dumps] = TypeAdapter(Dumps)


class AlreadyRunning(Exception):
    """Another service uses this data folder."""


@dataclass(frozen=True, slots=True)
class Wired:
    """The parts that are started and stopped."""

    app: web.Application
    service: Service
    ledger: SqlLedger
    datasets: ArrowDatasets
    writer: ShardWriters
    inspector: ThreadedCaptureInspector


def lock_data_dir(data_dir: Path) -> int:
    """Take the data folder for this process, until it ends. AlreadyRunning: somebody has it."""
    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise AlreadyRunning(f"another service uses {data_dir}; stop it, or start this one with another --data-dir") from error
    return descriptor


def make_private(ledger: Path) -> None:
    """See that nobody else reads SQLite's file: it holds the keys of workers. Its log gets the same mode from SQLite itself."""
    descriptor = os.open(ledger, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


def wire(settings: Settings) -> Wired:
    """Make every part of the service. Starts nothing."""
    log = structlog.get_logger()
    clock = SystemClock()
    metrics = Metrics()
    ledger = SqlLedger(f"sqlite:///{settings.data_dir / LEDGER_FILE}")
    store = ZarrStore()
    writer = ShardWriters(parallel=settings.runtime.writer_threads)
    inspector = ThreadedCaptureInspector(parallel=settings.runtime.writer_threads)
    pool = WorkerPool(
        lambda record: _connect(record, settings, clock), ledger, clock=clock, settings=settings.runtime, metrics=metrics, log=log
    )
    datasets = ArrowDatasets(
        settings.data_dir / "datasets",
        lambda: _tokenizers(settings, pool),
        clock=clock,
        roots=settings.dataset_roots,
        limits=IntakeLimits(line_bytes=settings.limits.dataset_line_bytes, samples=settings.limits.dataset_samples),
    )
    ports = RunPorts(
        clock=clock,
        settings=settings.runtime,
        ledger=ledger,
        writer=writer,
        inspector=inspector,
        answers=FileAnswerJournal(settings.data_dir / "answers"),
        metrics=metrics,
        log=log,
    )
    owner = f"{os.getpid()}-{secrets.token_hex(4)}"
    states = JobStates(ledger, clock)
    course = JobCourse(owner, states, pool, datasets, store, ports, version=__version__)
    admission = Admission(
        states,
        pool,
        course.datasets,
        store,
        ledger,
        clock,
        locate=lambda place: locate_store(place, settings),
        reserve_bytes=settings.runtime.disk_reserve_bytes,
        version=__version__,
    )
    service = Service(owner, ledger, ports.answers, pool, course, DiskWatch(states, course, store, ports))
    app = build_app(
        Services(
            jobs=JobDesk(states, admission, course, pool, ledger, log),
            workers=pool,
            datasets=datasets,
            ledger=ledger,
            readiness=lambda: (service.ready, "" if service.ready else "the service is starting or stopping"),
            render_metrics=lambda: _render(metrics, states, pool),
            log=log,
            limits=Limits(dataset_bytes=settings.limits.dataset_body_bytes),
            gate=Gate(settings.keys, settings.server.trusted_hosts),
        )
    )
    return Wired(app, service, ledger, datasets, writer, inspector)


def locate_store(place: str, settings: Settings) -> str:
    """The place of a store: its URL, or its absolute path, as given or below the first store root.

    Refused unless it is below a store root, or below one of the object stores.
    """
    if "://" in place:
        return _locate_at_object_store(place, settings)
    roots = [root.resolve() for root in settings.store_roots]
    if not place.strip() or not place.isprintable():
        raise Refused(RefusalKind.INVALID, f"{place!r} is not a path below a store root", field="store")
    try:
        resolved = (roots[0] / place).resolve()
        # Looked for in the store itself too: a name that the file system cannot have fails here, not in mid-job.
        marked = [folder for folder in (resolved, *resolved.parents) if (folder / "zarr.json").exists()]
    except (OSError, ValueError, RuntimeError) as error:
        raise Refused(RefusalKind.INVALID, f"{place!r} cannot be a path: {error}", field="store") from error
    if not any(resolved != root and resolved.is_relative_to(root) for root in roots):
        below = ", ".join(map(str, roots))
        raise Refused(
            RefusalKind.INVALID,
            f"{resolved} is not below a store root; the configured ones (store_roots) are {below}",
            field="store",
        )
    if (outer := next((folder for folder in marked if folder != resolved), None)) is not None:
        raise Refused(RefusalKind.INVALID, f"{resolved} lies inside the store {outer}; put it beside it", field="store")
    return str(resolved)


def _locate_at_object_store(place: str, settings: Settings) -> str:
    try:
        url = normalise(place)
    except ValueError as error:
        raise Refused(RefusalKind.INVALID, str(error), field="store") from error
    if not any(lies_below(url, prefix) for prefix in settings.object_stores):
        below = ", ".join(settings.object_stores) or "none; add its bucket, or a prefix in it, to the service's settings"
        raise Refused(
            RefusalKind.INVALID,
            f"{url} is not below an object store that this service writes to; the configured ones (object_stores) are {below}",
            field="store",
        )
    return url


def _connect(record: WorkerRecord, settings: Settings, clock: Clock) -> WorkerPorts:
    """Connections to one worker."""
    dumps = _DUMPS.validate_python(record.dumps)
    source = dump_source(record.name, dumps, settings.runtime, clock)
    quiet_period_seconds = dumps.quiet_period_seconds if isinstance(dumps, PlainDumps) else 0.0
    return WorkerPorts(SglangClient(record.url, api_key=record.api_key), source, quiet_period_seconds, record.requests_per_second)


def dump_source(name: str, dumps: PluginDumps | PlainDumps, runtime: Runtime, clock: Clock) -> DumpSource:
    """The watcher of the dump directory of the worker `name`."""
    if isinstance(dumps, PluginDumps):
        return PluginDumpSource(Path(dumps.dir), name, clock=clock, rescan_seconds=runtime.rescan_seconds)
    return PlainDumpSource(
        Path(dumps.dir),
        plain_layout(dumps),
        declared_tap(name, dumps),
        clock=clock,
        rescan_seconds=runtime.rescan_seconds,
        torn_after_seconds=runtime.torn_after_seconds,
    )


def plain_layout(dumps: PlainDumps) -> PlainLayout:
    """How a hand-patched server writes, as declared."""
    default = PlainLayout.default(aux_layers=len(dumps.aux_layer_ids), final=dumps.final)
    return PlainLayout(
        kind=dumps.format,
        published_by=dumps.published_by,
        tensors={**default.tensors, **dumps.tensors},
        aux_layers=len(dumps.aux_layer_ids),
    )


def declared_tap(name: str, dumps: PlainDumps) -> TapSeen:
    """What a beacon would say of a hand-patched server."""
    return TapSeen(
        tap=f"{name}-plain",
        capture=CaptureSpec(tuple(dumps.aux_layer_ids), Final(dumps.final)),
        model=ModelFacts(
            dumps.model_path, dumps.model_fingerprint, dumps.num_layers, dumps.hidden_size, dumps.vocab_size, dumps.dtype
        ),
        identity=Identity.COUNT,
        budget_bytes=dumps.budget_bytes,
        context_length=dumps.context_length,
        chunked_prefill_size=dumps.chunked_prefill_size,
        alive=True,
    )


def _tokenizers(settings: Settings, pool: WorkerPool) -> Mapping[str, TokenizerSource]:
    """The tokenizers that datasets may be bound to: the configured model's first, then those of the models that workers serve."""
    models = ([settings.model] if settings.model else []) + [tap.model.model_path for tap in pool.taps()]
    return {model: TokenizerSource(model, model, trust_remote_code=model in settings.trust_remote_code) for model in models}


def _render(metrics: Metrics, states: JobStates, pool: WorkerPool) -> bytes:
    metrics.jobs.clear()
    for job in states.active.values():
        metrics.jobs.labels(state=job.state).inc()
    metrics.workers.clear()
    for view in pool.list():
        metrics.workers.labels(state=worker(view).state).inc()
    return metrics.render()


async def serve(settings: Settings, *, announce: Callable[[str], None] = lambda _: None) -> None:
    """Run the service until SIGTERM or SIGINT; a second signal stops it at once. `announce` is told its URL once it listens.

    Raises:
        AlreadyRunning: another service uses the data folder.
        LedgerError: the ledger cannot be used.
        OSError: the address is taken.
    """
    keep_little()
    lock = lock_data_dir(settings.data_dir)
    wired = wire(settings)
    # Modules and parts stay: the collector need not go through them again and again. Before any job is taken up, which must not.
    gc.freeze()
    log = structlog.get_logger()
    runner = ApiRunner(wired.app, shutdown_timeout=SHUTDOWN_SECONDS)
    stopping = _stop_on_signals()
    supervisor = Supervisor()
    watching = asyncio.create_task(supervisor.watch(), name="watchdog")
    try:
        make_private(settings.data_dir / LEDGER_FILE)
        await wired.ledger.open()
        await wired.service.start([worker_record(request) for request in settings.workers])
        await runner.setup()
        site = web.TCPSite(runner, settings.server.host, settings.server.port)
        await site.start()
        host, port = runner.addresses[0][:2]
        log.info(events.SERVICE_STARTED, version=__version__, host=host, port=port, data_dir=str(settings.data_dir))
        announce(f"http://{host}:{port}")
        supervisor.tell(READY)
        reason = await stopping
        supervisor.tell(STOPPING)
        log.info(events.SERVICE_STOPPING, reason=reason, drain_seconds=settings.runtime.drain_seconds)
    finally:
        # Who looks at it while it drains is answered; whoever wants to change something is told to come again.
        await wired.service.stop(settings.runtime.drain_seconds)
        await runner.cleanup()
        watching.cancel()
        await wired.datasets.close()
        wired.writer.close()
        wired.inspector.close()
        await wired.ledger.close()
        os.close(lock)
    log.info(events.SERVICE_STOPPED)


def _stop_on_signals() -> asyncio.Future[str]:
    """Resolves to the first signal's name; the second ends the process where it stands."""
    loop = asyncio.get_running_loop()
    stopping: asyncio.Future[str] = loop.create_future()

    def stop(received: signal.Signals) -> None:
        if stopping.done():
            os._exit(128 + received)
        stopping.set_result(received.name)

    for received in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(received, stop, received)
    return stopping


def configure_logs(settings: Settings) -> None:
    logs.configure(settings.log.format, settings.log.level)
