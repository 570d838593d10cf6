"""One leased unit, from its first request to its commit: the shell around the unit machine.

The machine decides; here each of its commands becomes one effect that posts exactly one event back, failures included. Requests
are sent by the turns that workers lend the run (`turn`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from statetap.core import unit_messages as msg
from statetap.core.capture import Expected, reason_kind
from statetap.core.dumps import DumpFacts
from statetap.core.norms import JobNorms, UnitNorms
from statetap.core.records import JobSpec, SampleRecord, SampleVerdict, ShardObject, UnitLease
from statetap.core.routing import UnitId
from statetap.core.spec import Identity
from statetap.core.unit import UnitKey, UnitMachine, UnitPhase, UnitSample
from statetap.ports import (
    CapturePart,
    CommitEvent,
    Dump,
    GenerateAnswer,
    LeaseLost,
    OpenDataset,
    RecordedAnswer,
    Segment,
    StoreError,
    StoreFull,
    UnitWrite,
)
from statetap.runtime.blaming import Blaming
from statetap.runtime.driver import WorkerDriver
from statetap.runtime.lifecycle import Lifecycle
from statetap.runtime.overdue import OverdueWatch
from statetap.runtime.releasing import release, release_again
from statetap.runtime.run_ports import Ending, RunPorts
from statetap.runtime.tally import LostAttempt, UnitWork
from statetap.runtime.unit_samples import UnitSamples
from statetap.telemetry import events

LONGEST_BACKOFF_SECONDS = 30.0
MOST_DOUBLINGS = 16
WRITE_ATTEMPTS = 5


class UnitRun:
    """`changed` is called when the run may want a worker, `attempted` with (worker, `attempts` or `lost`), `ended` once.

    `blaming` hears of every attempt.
    """

    def __init__(
        self,
        lease: UnitLease,
        spec: JobSpec,
        samples: Sequence[SampleRecord],
        dataset: OpenDataset,
        norms: JobNorms,
        ports: RunPorts,
        *,
        changed: Callable[[], None],
        attempted: Callable[[str, str], None],
        ended: Callable[[Ending], None],
        blaming: Blaming,
    ) -> None:
        self.lease = lease
        self.spec = spec
        self.id: UnitId = (lease.unit.job, lease.unit.index)
        self.arrays = spec.capture.hidden_arrays(spec.model)
        self.samples = UnitSamples(samples, dataset)
        model = spec.model.model_fingerprint
        ids = self.samples.token_bytes()
        wanted = [UnitSample(index, Expected(ids[index], self.arrays, spec.capture, model)) for index in ids]
        self.machine = UnitMachine(UnitKey(*self.id, lease.fence), wanted, attempts_per_sample=ports.settings.attempts_per_sample)
        self._ports = ports
        self.log = ports.log.bind(job=self.id[0], unit=self.id[1])
        self._changed = changed
        self._attempted = attempted
        self._ended = ended
        self._blaming = blaming
        self._norms = UnitNorms(norms)
        self._dumps: dict[str, Dump] = {}
        self._facts: dict[str, DumpFacts] = {}
        self._not_before: dict[int, float] = {}
        self._overdue = OverdueWatch(ports.settings.capture_timeout_seconds, ports.clock)
        self._lifecycles: dict[str, Lifecycle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._releases: list[asyncio.Task[None]] = []
        self._work = UnitWork()
        self._writes = 0
        self._closed_to_workers = False
        self.begun = False
        """Whether a worker was asked for any of it, under this lease or, by tokens, one before."""
        self.in_hand: deque[tuple[RecordedAnswer, GenerateAnswer]] = deque()
        """Answers that are in and not taken yet: those of one request at most, while the next one leaves."""

    # --- what it needs of a worker ----------------------------------------------------------------------------------------

    def dump_bytes(self, chunk: int | None) -> int:
        """What its dumps may take in a worker's dump directory."""
        return self.samples.dump_bytes(self.arrays, chunk)

    def waiting_for(self, worker: str, elsewhere: Callable[[Sequence[str]], bool]) -> Iterator[int]:
        """The samples to ask this worker for now: back-off over, and not failed here before if they may go elsewhere.

        Not to be gone on with after anything has happened.
        """
        now = self._ports.clock.monotonic()
        for sample in () if self._closed_to_workers else self.machine.waiting():
            if self._not_before.get(sample, 0.0) <= now:
                failed_on = self.machine.failed_on(sample)
                if worker not in failed_on or not elsewhere(failed_on):
                    yield sample

    def fresh_for(self, worker: str, elsewhere: Callable[[Sequence[str]], bool]) -> Iterator[int]:
        """Those of `waiting_for` of which no attempt was lost."""
        return (sample for sample in self.waiting_for(worker, elsewhere) if not self.was_lost(sample))

    @property
    def is_waiting(self) -> bool:
        """Whether some of its samples wait for a worker, now or after a back-off."""
        return not self._closed_to_workers and next(self.machine.waiting(), None) is not None

    def close_to_workers(self) -> None:
        """Ask no worker for anything any more; what is in flight may end."""
        self._closed_to_workers = True

    @property
    def finishing(self) -> bool:
        """Whether it is being written or committed."""
        return self.machine.state in (UnitPhase.WRITING, UnitPhase.COMMITTING)

    @property
    def recorded(self) -> bool:
        """Whether its commit is recorded, or is being recorded: then it ends by itself."""
        return self.machine.state in (UnitPhase.COMMITTING, UnitPhase.COMMITTED)

    def next_rid(self, sample: int) -> str:
        """What the next attempt at it will be called."""
        return self.machine.next_rid(sample)

    def was_lost(self, sample: int) -> bool:
        """Whether an attempt at it brought no capture. Such a sample goes alone: what befalls it then is its own."""
        return self.machine.losses(sample) > 0

    def assign(self, sample: int, worker: str, identity: Identity, chunk: int | None, *, in_company: bool = False) -> str:
        """Begin an attempt at this worker; returns its rid. `in_company`: in one request with the last one assigned to it."""
        self.begun = True
        self._work.attempted(worker)
        self._attempted(worker, "attempts")
        probation = self._blaming.is_probation(worker)
        (command,) = self.machine.handle(msg.Assigned(sample, worker, identity, chunk, probation))
        assert isinstance(command, msg.SendRequest)  # noqa: S101 - what the machine promises for Assigned
        self._blaming.asked(self.id, command, in_company=in_company)
        return command.rid

    def begin_lifecycle(self, rid: str) -> Lifecycle:
        """Strict mode: whoever began this attempt is told of it, and closes its lifecycle by posting LifecycleClosed."""
        return self._lifecycles.setdefault(rid, Lifecycle())

    def take_answers(self) -> None:
        """Record and post the answers in hand: from here on their captures have so much time to become complete."""
        while self.in_hand:
            recorded, answer = self.in_hand.popleft()
            if self.machine.awaits(rid := answer.rid):
                # By count nothing is taken up again: after a restart a dump without a name is nobody's.
                if rid not in self._lifecycles:
                    self._ports.answers.record(*self.id, recorded)
                self._overdue.answered(rid, self._spawn, lambda rid: self.post(msg.CaptureOverdue(rid)))
                seen = answer.prompt_tokens, answer.cached_tokens, answer.next_token
                self.post(msg.RequestAnswered(rid, *seen, answer.dumps))

    # --- what was there before ------------------------------------------------------------------------------------------

    def recall(self, drivers: Sequence[WorkerDriver]) -> None:
        """Use what an earlier lease of this unit left in shared memory instead of asking again."""
        for answer in self._ports.answers.recall(*self.id):
            if answer.sample in self.samples.lengths:
                self.begun = True
                self.post(msg.Recalled(answer.rid, answer.sample, answer.worker, answer.next_token))
        for driver in drivers:
            for rid, facts, dump in driver.space.take_parked(self.id):
                self.take_dump(rid, facts, dump)
        self.post(msg.RecallEnded())

    # --- events in, effects out -----------------------------------------------------------------------------------------

    def take_dump(self, rid: str, facts: DumpFacts, dump: Dump) -> None:
        self._dumps[facts.dump_id], self._facts[facts.dump_id] = dump, facts
        self.post(msg.DumpPublished(rid, facts))

    def take_loss(self, rid: str, reason: str, fault: msg.Fault) -> None:
        self.post(msg.CaptureLost(rid, reason, fault))

    def forgive(self, sample: int, failures: int) -> None:
        """So many failures of this sample were a worker's fault."""
        self.post(msg.FailuresForgiven(sample, failures))

    def post(self, event: msg.UnitEvent) -> None:
        for command in self.machine.handle(event):
            self._execute(command)

    def _execute(self, command: msg.UnitCommand) -> None:
        match command:
            # Views are taken here, not in the effect: the machine may let go of a dump before the effect begins.
            case msg.DigestDumps(rid, dump_ids):
                self._spawn(self._digest(rid, {dump_id: self._dumps[dump_id].views for dump_id in dump_ids}))
            case msg.InspectCapture(rid, dump_ids):
                if (lifecycle := self._lifecycles.get(rid)) is not None:
                    lifecycle.came(lifecycle.chosen)
                dumps = [self._dumps[dump_id] for dump_id in dump_ids]
                self._spawn(self._inspect(rid, [CapturePart(dump.views, dump.row_checksums) for dump in dumps]))
            case msg.CloseLifecycle(rid):
                lifecycle = self._lifecycles[rid]
                lifecycle.came(lifecycle.complete)
            case msg.CaptureAccepted():
                self._accepted(command)
            case msg.AttemptFailed():
                self._failed(command)
            case msg.WriteUnit(captures):
                self._spawn(self._write(self._segments(captures)))
            case msg.RecordCommit(verdicts, objects):
                self._spawn(self._commit(verdicts, objects))
            case msg.GiveBack(reason):
                self._spawn(self.abandon(reason, give_back=True))
            case msg.ReleaseDumps(dump_ids):
                self._releases.append(self._spawn(self._release([self._forget(dump_id) for dump_id in dump_ids])))

    def _forget(self, dump_id: str) -> Dump:
        del self._facts[dump_id]
        return self._dumps.pop(dump_id)

    async def _release(self, dumps: Sequence[Dump]) -> None:
        for dump in await release(dumps, self.log):
            self._spawn(release_again(dump, self._ports.clock, self.log))

    async def _digest(self, rid: str, views: Mapping[str, Mapping[str, memoryview]]) -> None:
        digests = {dump_id: await self._ports.inspector.digest(view) for dump_id, view in views.items()}
        self.post(msg.DumpsDigested(rid, digests))

    async def _inspect(self, rid: str, parts: Sequence[CapturePart]) -> None:
        report = await self._ports.inspector.inspect(parts, self.arrays)
        refusal = report.refusal or self._norms.refusal(rid, report.norms)
        self.post(msg.CaptureInspected(rid, report.digest, refusal))

    def _accepted(self, event: msg.CaptureAccepted) -> None:
        self._norms.accepted(event.rid)
        self._settle(event.rid, captured=True)
        self._blaming.captured(self.id, event)
        if event.recalled:
            self.log.info(events.CAPTURE_ADOPTED, sample=event.sample, rid=event.rid)

    def _failed(self, event: msg.AttemptFailed) -> None:
        self._work.lost(LostAttempt(event.rid, event.worker, event.reason))
        self._attempted(event.worker, "lost")
        self._ports.metrics.capture_refusals_total.labels(reason=reason_kind(event.reason)).inc()
        log = self.log.bind(sample=event.sample, rid=event.rid, worker=event.worker, reason=event.reason)
        log.warning(events.CAPTURE_REFUSED)
        if event.final:
            log.warning(events.SAMPLE_FAILED)
        else:
            doublings = min(self.machine.losses(event.sample) - 1, MOST_DOUBLINGS)
            delay = min(self._ports.settings.retry_backoff_seconds * 2**doublings, LONGEST_BACKOFF_SECONDS)
            self._not_before[event.sample] = self._ports.clock.monotonic() + delay
            log.warning(events.SAMPLE_RETRIED, delay_seconds=delay)
            self._spawn(self._wake_after(delay))
        self._settle(event.rid, captured=False)
        self._blaming.failed(self.id, event)

    def _settle(self, rid: str, *, captured: bool) -> None:
        """An attempt is over, one way or the other."""
        self._overdue.settled(rid)
        if (lifecycle := self._lifecycles.pop(rid, None)) is not None:
            lifecycle.settle(accepted=captured)

    async def _wake_after(self, seconds: float) -> None:
        await self._ports.clock.sleep(seconds)
        self._changed()

    # --- the end ----------------------------------------------------------------------------------------------------------

    async def _write(self, segments: Sequence[Segment]) -> None:
        unit = self.lease.unit
        write = UnitWrite(
            location=self.spec.store,
            arrays=self.arrays,
            geometry=self.spec.geometry,
            row_start=unit.row_start,
            rows=unit.rows,
            fence=self.lease.fence,
            segments=segments,
            compression=self.spec.compression,
        )
        try:
            if self.lease.fence > 1 or self._writes:
                # An earlier lease may have published objects and died before its commit: they do not count.
                await self._ports.writer.discard(self.spec.store, self.arrays, self.spec.geometry, unit.row_start, unit.rows)
            objects = await self._ports.writer.write(write)
        except StoreError as error:
            self._writes += 1
            final = self._writes >= WRITE_ATTEMPTS and not isinstance(error, StoreFull)
            self.log.warning(events.UNIT_WRITE_FAILED, reason=str(error), attempt=self._writes)
            if not final:
                await self._ports.clock.sleep(min(2.0 ** min(self._writes, WRITE_ATTEMPTS), LONGEST_BACKOFF_SECONDS))
            self.post(msg.WriteFailed(f"store: {error}", final))
        else:
            self.log.debug(events.UNIT_WRITTEN, objects=len(objects), bytes=sum(o.nbytes for o in objects))
            self.post(msg.UnitWritten(objects))

    def _segments(self, captures: tuple[tuple[int, tuple[str, ...]], ...]) -> list[Segment]:
        """Every dump's hidden tensors at their rows within the unit, by array, in row order."""
        segments = []
        for array in self.arrays:
            for sample, dump_ids in captures:
                row = self.samples.row_starts[sample] - self.lease.unit.row_start
                for dump_id in dump_ids:
                    segments.append(Segment(array.name, row, self._dumps[dump_id].views[array.name]))
                    row += self._facts[dump_id].rows
        return segments

    async def _commit(self, verdicts: tuple[SampleVerdict, ...], objects: tuple[ShardObject, ...]) -> None:
        row_bytes = self.spec.capture.row_bytes(self.spec.model)
        report = self._work.report(verdicts, self.samples.lengths, row_bytes, self._norms.as_data())
        event = CommitEvent(events.UNIT_COMMITTED, report.as_event(self.id[1]))
        try:
            counts = await self._ports.ledger.commit_unit(
                self.lease, verdicts, objects, bytes_stored=report.nbytes, at=self._ports.clock.now(), event=event
            )
        except LeaseLost as error:
            self.log.warning(events.UNIT_LEASE_LOST, reason=str(error))
            await self.abandon(str(error), give_back=False)
            return
        self.post(msg.CommitRecorded())
        await self._end(Ending(self.id, counts, verdicts, report))

    async def give_up(self, reason: str) -> None:
        """Give the unit back, unless it ends by itself."""
        if not self.recorded:
            await self.abandon(reason, give_back=True)

    async def abandon(self, reason: str, *, give_back: bool) -> None:
        """End the run without a commit: its dumps are released, and the unit is given back unless the lease is lost anyway."""
        if self.machine.state in (UnitPhase.COMMITTED, UnitPhase.ABANDONED):
            return
        self.post(msg.Abandoned(reason, release=True))
        for rid in (*self._overdue.rids, *self._lifecycles):
            self._settle(rid, captured=False)
        if give_back:
            await self._give_back()
            self.log.info(events.UNIT_GIVEN_BACK, reason=reason)
        await self._end(Ending(self.id, reason=reason))

    async def _give_back(self) -> None:
        """Until it is recorded: a lease that stays is renewed for ever, and nobody else could take the unit."""
        while True:
            try:
                return await self._ports.ledger.give_back(self.lease)
            except Exception:
                self.log.exception(events.UNIT_CRASHED)
                await self._ports.clock.sleep(LONGEST_BACKOFF_SECONDS)

    async def _end(self, ending: Ending) -> None:
        with suppress(OSError):  # Answers that stay are of attempts without dumps: the next lease drops them.
            self._ports.answers.forget(*self.id)
        self._overdue.close()
        await asyncio.gather(*self._releases)
        self._ended(ending)

    async def stop(self) -> None:
        """Leave everything where it is: the lease, the dumps and the answers are taken up again at the next start."""
        with suppress(OSError):  # What cannot be recorded is asked for again.
            self.take_answers()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.machine.state not in (UnitPhase.COMMITTED, UnitPhase.ABANDONED):
            self.post(msg.Abandoned("the service stops", release=False))

    def _spawn(self, effect: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(self._guard(effect), name=f"unit {self.id[0]}/{self.id[1]}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # Cancelled before its first step, the guard never came to await it.
        task.add_done_callback(lambda _: effect.close())
        return task

    async def _guard(self, effect: Coroutine[Any, Any, None]) -> None:
        """No effect fails silently: an error that nobody foresaw gives the unit back, so that it is done again."""
        try:
            await effect
        except Exception as error:
            self.log.exception(events.UNIT_CRASHED)
            await self.abandon(f"{type(error).__name__}: {error}", give_back=True)
