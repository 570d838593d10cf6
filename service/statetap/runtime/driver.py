"""The driver of one worker: its requests go out one at a time, its dumps come in (`dump_intake`), its state is known.

Exactly one request is in flight (the worker machine forbids a second).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from zlib import crc32

from asyncio_throttle.throttler import Throttler
from structlog.typing import FilteringBoundLogger

from statetap.core.blame import Blame
from statetap.core.dumps import DumpFacts
from statetap.core.records import WorkerRecord
from statetap.core.spec import Identity
from statetap.core.strict import SHORTEST_FENCE, StrictGate
from statetap.core.worker import Answered, Cleared, Doubted, Drained, Identified, Lost, Misfit, Sent, WorkerMachine, WorkerState
from statetap.ports import (
    Clock,
    DumpSourceError,
    GenerateAnswer,
    GenerateSample,
    InferenceError,
    Outcome,
    RequestRefused,
    RequestTimedOut,
    TapRefused,
    TapSeen,
    WorkerUnreachable,
)
from statetap.runtime.dump_intake import DumpIntake, Inboxes
from statetap.runtime.dump_space import DumpSpace
from statetap.runtime.fencing import FenceFailed, Fencing
from statetap.runtime.loss_pause import LossPause
from statetap.runtime.quarantine import Quarantine
from statetap.runtime.request_meter import RequestMeter
from statetap.runtime.run_ports import WorkerPorts
from statetap.runtime.waiting import wait_or_sleep
from statetap.runtime.worker_taps import NotUsable, WorkerTaps
from statetap.settings import Runtime
from statetap.telemetry import events
from statetap.telemetry.metrics import Metrics

# Each worker's fences begin at a length of its own, out of so many: where two plain directories were swapped, neither passes.
FENCE_LENGTHS = 64


class WorkerDriver:
    """Drives one worker. `changed` is set whenever something may have become possible.

    `tap` is what the taps of its newest boot say together, once they all have: the last that did, while another boot starts.
    """

    def __init__(
        self,
        record: WorkerRecord,
        ports: WorkerPorts,
        inboxes: Inboxes,
        changed: asyncio.Event,
        blame: Blame,
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
        self._ports = ports
        self.space = DumpSpace(metrics.dump_bytes.labels(worker=record.name).set)
        self._pause = LossPause(settings.retry_backoff_seconds, clock, changed.set)
        self._changed = changed
        self._nudged = asyncio.Event()
        self._clock = clock
        self._settings = settings
        self._metrics = metrics
        self._log = log.bind(worker=record.name)
        self._blame = blame
        self.meter = RequestMeter(record.name, settings.max_batch_tokens, clock=clock, metrics=metrics, log=self._log)
        self.quarantine = Quarantine(
            record.name, self.machine, changed.set, clock=clock, settings=settings, metrics=metrics, log=self._log
        )
        self.intake = DumpIntake(
            record.name,
            inboxes,
            self.space,
            self._pause,
            clock=clock,
            metrics=metrics,
            log=self._log,
            on_tap=self._take_tap,
            on_stray=self._saw_stray,
            on_rows=self.meter.ran,
            on_crowded=self.meter.lost,
        )
        self._taps = WorkerTaps()
        self._identified: tuple[str | None, TapSeen] | None = None
        self._throttle = Throttler(rate_limit=1, period=1 / ports.requests_per_second) if ports.requests_per_second else None
        self._probing: asyncio.Task[None] | None = None
        self._doubted: tuple[str, ...] = ()
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
    def free(self) -> bool:
        """Whether it may be asked now: ready, and not at rest after a lost capture."""
        return self.ready and not self._pause.is_on

    @property
    def busy(self) -> bool:
        return self.machine.state is WorkerState.BUSY

    @property
    def chunk(self) -> int | None:
        """The tokens after which it splits a prompt, None if it never does or has not said so."""
        return self.tap.chunked_prefill_size if self.tap is not None else None

    # --- requests -------------------------------------------------------------------------------------------------------

    @property
    def paced(self) -> bool:
        """Whether there is a rate limit."""
        return self._throttle is not None

    async def pace(self) -> None:
        """Wait for the rate limit, if there is one."""
        if self._throttle is not None:
            await self._throttle.acquire()  # type: ignore[no-untyped-call]

    def prepare(self, samples: Sequence[GenerateSample]) -> None:
        """Make a request ready that may be asked for next."""
        self._ports.client.prepare(samples)

    async def ask(self, sample: GenerateSample) -> GenerateAnswer:
        """Send one sample. InferenceError: there is no answer to it."""
        (outcome,) = await self.ask_together([sample])
        if isinstance(outcome, RequestRefused):
            raise outcome
        return outcome

    async def ask_together(self, samples: Sequence[GenerateSample]) -> list[Outcome]:
        """Send samples as one request, known by its first rid, and wait for what comes of each: as long as their tokens allow.

        Raises:
            InferenceError: there was no answer at all.
            IllegalTransition: a request is in flight already.
        """
        rids = tuple(sample.rid for sample in samples)
        lengths = {sample.rid: len(sample.token_ids) for sample in samples}
        self.machine.handle(Sent(rids[0], probe=rids[0] == self.quarantine.probe))
        self.meter.sent(lengths)
        outcome = "answered"
        try:
            outcomes = await self._ports.client.generate(samples, timeout_seconds=self.timeout_seconds(sum(lengths.values())))
        except WorkerUnreachable as error:
            outcome = "unreachable"
            self._lose(str(error))
            raise
        except RequestTimedOut as error:
            outcome = "timed_out"
            self._doubt(rids, str(error))
            raise
        except InferenceError:
            outcome = "refused"
            self.machine.handle(Answered(rids[0]))
            raise
        except BaseException:
            # Cancelled, or an error that nobody foresaw: it may run on.
            outcome = "given_up"
            self._doubt(rids, "the request was given up")
            raise
        else:
            self.machine.handle(Answered(rids[0]))
            if all(isinstance(one, RequestRefused) for one in outcomes):
                outcome = "refused"
            return outcomes
        finally:
            self._require_identity()
            self.meter.ended(outcome)
            if outcome != "answered":
                # After an answer the turn goes on, or ends, which is told by itself.
                self._changed.set()

    def timeout_seconds(self, tokens: int) -> float:
        return self._settings.request_timeout_base_seconds + self._settings.request_timeout_seconds_per_1k_tokens * tokens / 1000

    async def fence(self, fencing: Fencing, pending: Collection[int]) -> None:
        """Strict mode: put a fence before samples of the pending lengths. FenceFailed or InferenceError: it did not hold."""
        try:
            await fencing.fence(self.ask, pending, timeout_seconds=self._settings.capture_timeout_seconds)
        except (FenceFailed, InferenceError) as error:
            self.quarantine.fence_failed(str(error))
            raise
        self.quarantine.fence_held()

    async def rest(self) -> None:
        """Leave the worker alone for a moment, after something went wrong there."""
        await self._clock.sleep(self._settings.probe_seconds)

    def begin_lifecycle(self, rid: str) -> None:
        """Strict mode: what appears from now on may belong to `rid`."""
        self.intake.router.begin_lifecycle(rid)

    def end_lifecycle(self) -> None:
        self.intake.router.end_lifecycle()

    async def look_again(self, after_seconds: float) -> None:
        """Wait, then report everything that is visible."""
        if after_seconds > 0:
            await self._clock.sleep(after_seconds)
        await self._ports.source.rescan()

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
            await self._ports.source.start(self.intake.take)
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
        await self._pause.close()
        await self.intake.close()
        await self._ports.source.close()
        await self._ports.client.close()

    def drain(self) -> None:
        self.machine.handle(Drained())
        self._log.info(events.WORKER_DRAINING)
        self._changed.set()

    def _take_tap(self, tap: TapSeen | TapRefused) -> None:
        self._taps.saw(tap)
        said = self._taps.together()
        if isinstance(said, TapSeen):
            self.tap = said
            self.space.budget_bytes = said.budget_bytes
            if said.identity is Identity.COUNT and self.fencing is None:
                gate = StrictGate(said.chunked_prefill_size, SHORTEST_FENCE + crc32(self.name.encode()) % FENCE_LENGTHS)
                self.fencing = Fencing(self.name, gate, said.model.vocab_size, self._ports.quiet_period_seconds, self._clock)
        if isinstance(tap, TapSeen) and tap.alive:
            self._log.info(
                events.WORKER_TAP_SEEN,
                tap=tap.tap,
                model=tap.model.model_path,
                layers=list(tap.capture.aux_layer_ids),
                final=tap.capture.final,
            )
        self._require_identity()
        self._nudged.set()

    def _require_identity(self) -> None:
        """What was identified must still be so: other taps than those are another worker, even at the same URL."""
        if self._identified is None or self.busy:
            return
        boot, said = self._identified
        if self._taps.boot != boot:
            self._lose("it was started again" if self._taps.boot is not None else "the process of its tap has ended")
        elif self._taps.together() != said:
            self._lose("what its taps say has changed")

    def _saw_stray(self, facts: DumpFacts) -> None:
        if self.fencing is not None:
            self.fencing.saw_stray(facts)

    def _lose(self, reason: str) -> None:
        before = self.machine.state
        self._identified = None
        self.machine.handle(Lost(reason))
        if before is not WorkerState.BUSY and (rid := self.intake.router.lifecycle) is not None:
            # By count, what is still to come of the open lifecycle could be anybody's now.
            self.intake.lose_capture(rid, f"worker {self.name} went away: {reason}")
        self._metrics.worker_up.labels(worker=self.name).set(0)
        if before is not self.machine.state:
            self._log.warning(events.WORKER_UNREACHABLE, reason=reason)
        self._changed.set()

    def _doubt(self, rids: tuple[str, ...], reason: str) -> None:
        self._doubted = rids
        self.machine.handle(Doubted(rids[0], reason))
        self._log.warning(events.WORKER_SUSPECT, rid=rids[0], samples=len(rids), reason=reason)
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
            for rid in self._doubted if self.machine.state is WorkerState.SUSPECT else ():
                await self._ports.client.abort(rid)
            up = await self._ports.client.is_up()
            asks = self._identified is None or self.machine.state is WorkerState.SUSPECT
            facts = await self._ports.client.server_facts() if up and asks else None
        except InferenceError as error:
            up, facts, reason = False, None, str(error)
        else:
            reason = f"{self.record.url} does not answer"
        if self.busy:
            # A request went out while this one was waited for: it will tell.
            return
        if not up:
            self._lose(reason)
            return
        if facts is not None:
            self._identify(facts.model_path, facts.context_length)
        self.quarantine.readmit_if_served()

    def _identify(self, model_path: str, context_length: int | None) -> None:
        said = self._taps.together()
        if isinstance(said, NotUsable):
            self._refuse(said.reason)
            return
        if said.model.model_path != model_path:
            self._refuse(
                f"the server at {self.record.url} serves {model_path!r}, its dumps are of {said.model.model_path!r}: "
                "one of the two is not this worker's"
            )
            return
        self._identified = (self._taps.boot, said)
        limits = [limit for limit in (context_length, said.context_length) if limit is not None]
        self.context_length = min(limits, default=None)
        was_barred = self.machine.barred is not None
        if self.machine.tap != said.tap:
            self._blame.forget_worker(self.name)
        if self.machine.state is WorkerState.SUSPECT:
            self._doubted = ()
            self.machine.handle(Cleared())
        else:
            self.machine.handle(Identified(said.tap))
        if self.fencing is not None:
            self.fencing.gate.restart()
        if self.machine.is_held:
            return
        if was_barred and self.machine.barred is None:
            self.quarantine.lift_for_new_boot()
        self._metrics.worker_up.labels(worker=self.name).set(1)
        self._log.info(events.WORKER_READY, tap=said.tap, model=said.model.model_path, context_length=self.context_length)
        self._changed.set()

    def _refuse(self, reason: str) -> None:
        self._identified = None
        if self.machine.reason != reason:
            self._log.warning(events.WORKER_REFUSED, reason=reason)
        self.machine.handle(Misfit(reason))
        self._changed.set()
