"""The driver of one worker: its requests go out one at a time, its dumps come in and are routed, its state is known.

Exactly one request is in flight (the worker machine forbids a second). Dumps of nobody are released at once; dumps of a unit that
was open when the service last stopped are parked until it is leased again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Protocol
from zlib import crc32

from asyncio_throttle.throttler import Throttler
from structlog.typing import FilteringBoundLogger

from statetap.core.dumps import DumpFacts
from statetap.core.records import WorkerRecord
from statetap.core.requests import RequestName
from statetap.core.routing import DumpRouter, Parked, Stray, ToUnit, UnitId
from statetap.core.spec import Identity
from statetap.core.strict import SHORTEST_FENCE, StrictGate
from statetap.core.worker import Answered, Cleared, Doubted, Drained, Identified, Lost, Misfit, Sent, WorkerMachine, WorkerState
from statetap.ports import (
    CaptureLost,
    Clock,
    Dump,
    DumpEvent,
    DumpRejected,
    DumpSeen,
    DumpSource,
    DumpSourceError,
    GenerateAnswer,
    GenerateSample,
    InferenceClient,
    InferenceError,
    RequestTimedOut,
    TapSeen,
    WorkerUnreachable,
)
from statetap.runtime.dump_space import DumpSpace
from statetap.runtime.fencing import Fencing
from statetap.runtime.waiting import wait_or_sleep
from statetap.settings import Runtime
from statetap.telemetry import events
from statetap.telemetry.metrics import Metrics

# Each worker's fences begin at a length of its own, out of so many: where two plain directories were swapped, neither passes.
FENCE_LENGTHS = 64


class UnitInbox(Protocol):
    """Where an open unit takes what is published for it."""

    def take_dump(self, rid: str, facts: DumpFacts, dump: Dump) -> None: ...
    def take_loss(self, rid: str, reason: str) -> None: ...


@dataclass(slots=True)
class Inboxes:
    """The open units of this host, and those that were open when the service last stopped; shared by its drivers."""

    open: dict[UnitId, UnitInbox]
    expected_back: set[UnitId]


@dataclass(frozen=True, slots=True)
class WorkerPorts:
    """One worker's connections, made by `main`. `requests_per_second` limits it, if set."""

    client: InferenceClient
    source: DumpSource
    quiet_period_seconds: float
    requests_per_second: float | None


class WorkerDriver:
    """Drives one worker. `changed` is set whenever something may have become possible."""

    def __init__(
        self,
        record: WorkerRecord,
        ports: WorkerPorts,
        inboxes: Inboxes,
        changed: asyncio.Event,
        *,
        clock: Clock,
        settings: Runtime,
        metrics: Metrics,
        log: FilteringBoundLogger,
    ) -> None:
        self.record = record
        self.machine = WorkerMachine(record.name)
        self.turn: asyncio.Task[None] | None = None
        self.tap: TapSeen | None = None
        self.context_length: int | None = None
        self.fencing: Fencing | None = None
        self.requests = 0
        self.failures = 0
        self._ports = ports
        self._inboxes = inboxes
        self._router = DumpRouter(inboxes.open.keys(), inboxes.expected_back)
        self.space = DumpSpace(metrics.dump_bytes.labels(worker=record.name).set)
        self._changed = changed
        self._nudged = asyncio.Event()
        self._clock = clock
        self._settings = settings
        self._metrics = metrics
        self._log = log.bind(worker=record.name)
        self._throttle = Throttler(rate_limit=1, period=1 / ports.requests_per_second) if ports.requests_per_second else None
        self._probing: asyncio.Task[None] | None = None
        self._doubted: str | None = None
        self._watched = False
        if record.draining:
            self.machine.handle(Drained())

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def ready(self) -> bool:
        return self.machine.state is WorkerState.READY

    @property
    def busy(self) -> bool:
        return self.machine.state is WorkerState.BUSY

    @property
    def chunk(self) -> int | None:
        """The tokens after which it splits a prompt, None if it never does or has not said so."""
        return self.tap.chunked_prefill_size if self.tap is not None else None

    # --- requests -------------------------------------------------------------------------------------------------------

    async def pace(self) -> None:
        """Wait for the rate limit, if there is one."""
        if self._throttle is not None:
            await self._throttle.acquire()  # type: ignore[no-untyped-call]

    async def ask(self, sample: GenerateSample) -> GenerateAnswer:
        """Send one sample and wait for the answer, within a time that grows with its tokens.

        Raises:
            InferenceError: there was none.
            IllegalTransition: a request is in flight already.
        """
        timeout = self.timeout_seconds(len(sample.token_ids))
        self.machine.handle(Sent(sample.rid))
        self.requests += 1
        self._metrics.worker_in_flight.labels(worker=self.name).set(1)
        started = self._clock.monotonic()
        outcome = "answered"
        try:
            (answer,) = await self._ports.client.generate([sample], timeout_seconds=timeout)
        except WorkerUnreachable as error:
            outcome = "unreachable"
            self._lose(str(error))
            raise
        except RequestTimedOut as error:
            outcome = "timed_out"
            self._doubt(sample.rid, str(error))
            raise
        except InferenceError:
            outcome = "refused"
            self.machine.handle(Answered(sample.rid))
            raise
        except BaseException:
            # Cancelled, or an error that nobody foresaw: it may run on.
            outcome = "given_up"
            self._doubt(sample.rid, "the request was given up")
            raise
        else:
            self.machine.handle(Answered(sample.rid))
            return answer
        finally:
            self.failures += outcome != "answered"
            self._metrics.worker_in_flight.labels(worker=self.name).set(0)
            self._metrics.requests_total.labels(worker=self.name, outcome=outcome).inc()
            self._metrics.request_seconds.labels(worker=self.name).observe(self._clock.monotonic() - started)
            self._changed.set()

    def timeout_seconds(self, tokens: int) -> float:
        return self._settings.request_timeout_base_seconds + self._settings.request_timeout_seconds_per_1k_tokens * tokens / 1000

    async def fence(self, fencing: Fencing, pending: Collection[int]) -> None:
        """Strict mode: put a fence before samples of the pending lengths. FenceFailed or InferenceError: it did not hold."""
        await fencing.fence(self.ask, pending, timeout_seconds=self._settings.capture_timeout_seconds)

    async def rest(self) -> None:
        """Leave the worker alone for a moment, after something went wrong there."""
        await self._clock.sleep(self._settings.probe_seconds)

    def begin_lifecycle(self, rid: str) -> None:
        """Strict mode: what appears from now on may belong to `rid`."""
        self._router.begin_lifecycle(rid)

    def end_lifecycle(self) -> None:
        self._router.end_lifecycle()

    async def look_again(self, after_seconds: float) -> None:
        """Wait, then report everything that is visible."""
        if after_seconds > 0:
            await self._clock.sleep(after_seconds)
        await self._ports.source.rescan()

    # --- dumps ----------------------------------------------------------------------------------------------------------

    def release_parked(self, wanted: AbstractSet[UnitId]) -> None:
        """Release what is parked for units that will not come back."""
        for dump in self.space.drop_parked(wanted):
            self._release(dump)

    def _release(self, dump: Dump) -> None:
        try:
            dump.release()
        except OSError as error:
            self._log.warning(events.DUMP_REJECTED, dump=dump.facts.dump_id, reason=f"cannot be removed: {error}")

    def _on_dump_event(self, event: DumpEvent) -> None:
        match event:
            case DumpSeen(dump):
                self._route(dump)
            case CaptureLost(rid, reason):
                self._log.warning(events.DUMP_LOST, rid=rid, reason=reason)
                self._lose_capture(rid, reason)
            case DumpRejected(name, reason):
                self._log.warning(events.DUMP_REJECTED, dump=name, reason=reason)
            case TapSeen():
                self._take_tap(event)

    def _lose_capture(self, rid: str, reason: str) -> None:
        """Tell the unit that this attempt's capture will not come."""
        name = RequestName.parse(rid)
        inbox = self._inboxes.open.get((name.job, name.unit)) if name is not None else None
        if inbox is not None:
            inbox.take_loss(rid, reason)

    def _route(self, dump: Dump) -> None:
        facts = replace(dump.facts, dump_id=f"{self.name}/{dump.facts.dump_id}")
        match self._router.route(facts):
            case ToUnit(unit, rid):
                self._inboxes.open[unit].take_dump(rid, facts, dump)
            case Parked(unit):
                self.space.park(unit, facts.rid or "", facts, dump)
            case Stray(reason):
                self._release(dump)
                self._metrics.strays_total.labels(worker=self.name).inc()
                self._log.debug(events.DUMP_STRAY, dump=facts.dump_id, rows=facts.rows, rid=facts.rid, reason=reason)
                if self.fencing is not None:
                    self.fencing.saw_stray(facts)

    # --- its state ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Report what is in the dump directory, then keep asking whether the worker is up.

        Raises:
            DumpSourceError: the directory cannot be used. It is tried again as long as the worker is not closed.
        """
        try:
            await self._watch()
        finally:
            self._probing = asyncio.create_task(self._probe_forever(), name=f"probe {self.name}")

    async def _watch(self) -> None:
        try:
            await self._ports.source.start(self._on_dump_event)
        except DumpSourceError as error:
            self._refuse(str(error))
            raise
        self._watched = True
        self._nudged.set()

    async def close(self) -> None:
        """Stop what runs; the dumps stay where they are."""
        self.machine.handle(Drained())
        tasks = [task for task in (self.turn, self._probing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._ports.source.close()
        await self._ports.client.close()

    def drain(self) -> None:
        self.machine.handle(Drained())
        self._log.info(events.WORKER_DRAINING)
        self._changed.set()

    def _take_tap(self, tap: TapSeen) -> None:
        if not tap.alive:
            return
        restarted = self.tap is not None and self.tap.tap != tap.tap
        self.tap = tap
        self.space.budget_bytes = tap.budget_bytes
        if tap.identity is Identity.COUNT and self.fencing is None:
            gate = StrictGate(tap.chunked_prefill_size, SHORTEST_FENCE + crc32(self.name.encode()) % FENCE_LENGTHS)
            self.fencing = Fencing(self.name, gate, tap.model.vocab_size, self._ports.quiet_period_seconds, self._clock)
        self._log.info(
            events.WORKER_TAP_SEEN,
            tap=tap.tap,
            model=tap.model.model_path,
            layers=list(tap.capture.aux_layer_ids),
            final=tap.capture.final,
        )
        if restarted and not self.busy:
            self._lose("it was started again")
        self._nudged.set()

    def _lose(self, reason: str) -> None:
        before = self.machine.state
        self.machine.handle(Lost(reason))
        if before is not WorkerState.BUSY and (rid := self._router.lifecycle) is not None:
            # By count, what is still to come of the open lifecycle could be anybody's now.
            self._lose_capture(rid, f"worker {self.name} went away: {reason}")
        self._metrics.worker_up.labels(worker=self.name).set(0)
        if before is not self.machine.state:
            self._log.warning(events.WORKER_UNREACHABLE, reason=reason)
        self._changed.set()

    def _doubt(self, rid: str, reason: str) -> None:
        self._doubted = rid
        self.machine.handle(Doubted(rid, reason))
        self._log.warning(events.WORKER_SUSPECT, rid=rid, reason=reason)
        self._nudged.set()

    async def _probe_forever(self) -> None:
        while True:
            await wait_or_sleep(self._nudged, self._clock, self._settings.probe_seconds)
            try:
                if not self._watched:
                    await self._watch()
                await self._probe()
            except DumpSourceError:
                continue
            except Exception as error:  # noqa: BLE001 - a worker that is not asked again would be lost for ever
                reason = f"asking {self.record.url} failed: {type(error).__name__}: {error}"
                self._log.exception(events.WORKER_UNREACHABLE, reason=reason)
                if not self.busy:
                    self._lose(reason)

    async def _probe(self) -> None:
        """Find out how the worker is, without making it run a pass."""
        if self.busy or self.machine.state is WorkerState.DRAINING:
            return
        try:
            if self.machine.state is WorkerState.SUSPECT and self._doubted is not None:
                await self._ports.client.abort(self._doubted)
            up = await self._ports.client.is_up()
            facts = await self._ports.client.server_facts() if up and not self.ready else None
        except InferenceError as error:
            up, facts, reason = False, None, str(error)
        else:
            reason = f"{self.record.url} does not answer"
        if self.busy:
            # A request went out while this one was waited for: it will tell.
            return
        if not up:
            self._lose(reason)
        elif facts is not None:
            self._identify(facts.model_path, facts.context_length)

    def _identify(self, model_path: str, context_length: int | None) -> None:
        if self.tap is None:
            self._refuse(
                "the server is up, but no tap has announced itself in its dump directory: check that it publishes there "
                "(for SGLang: that statetap-sglang is installed in its environment and STATETAP_PLUGIN_DIR is set)"
            )
            return
        if self.tap.model.model_path != model_path:
            self._refuse(
                f"the server at {self.record.url} serves {model_path!r}, its dumps are of {self.tap.model.model_path!r}: "
                "one of the two is not this worker's"
            )
            return
        limits = [limit for limit in (context_length, self.tap.context_length) if limit is not None]
        self.context_length = min(limits, default=None)
        if self.machine.state is WorkerState.SUSPECT:
            self._doubted = None
            self.machine.handle(Cleared())
        else:
            self.machine.handle(Identified(self.tap.tap))
        if self.fencing is not None:
            self.fencing.gate.restart()
        self._metrics.worker_up.labels(worker=self.name).set(1)
        self._log.info(events.WORKER_READY, tap=self.tap.tap, model=self.tap.model.model_path, context_length=self.context_length)
        self._changed.set()

    def _refuse(self, reason: str) -> None:
        if self.machine.reason != reason:
            self._log.warning(events.WORKER_REFUSED, reason=reason)
        self.machine.handle(Misfit(reason))
        self._changed.set()
