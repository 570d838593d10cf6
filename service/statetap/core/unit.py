"""The unit machine: from a lease to a commit, one capture per sample.

Phases:

    collecting ──every sample captured or failed──▶ writing ──UnitWritten──▶ committing ──CommitRecorded──▶ committed
    (no capture at all: straight to committing)     any but committed ──Abandoned──▶ abandoned

Each sample: waiting ──Assigned──▶ asked ──RequestAnswered──▶ answered ──(dumps tile)──▶ inspecting
──CaptureInspected──▶ captured, and back to waiting when an attempt fails, until its attempts are used up: failed.

Events are facts from outside, commands are what the shell must do; each command brings exactly one event back. The machine owns
the unit's dumps: it says when each may be released (invariant 3), and which are strays. It knows no clock: the shell tells it
when something is overdue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from statetap.core import unit_messages as msg
from statetap.core.attempt import Attempt, AttemptState
from statetap.core.capture import Complete, Expected, Incomplete, NeedDigests, Refusal, RefusalReason
from statetap.core.dumps import DumpFacts
from statetap.core.machine import Machine
from statetap.core.progress import Progress
from statetap.core.records import SampleVerdict
from statetap.core.requests import RequestName
from statetap.core.spec import Identity
from statetap.core.waiting import WaitingSamples


class UnitPhase(StrEnum):
    COLLECTING = "collecting"
    WRITING = "writing"
    COMMITTING = "committing"
    COMMITTED = "committed"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class UnitKey:
    """One lease of one unit."""

    job: str
    unit: int
    fence: int


@dataclass(frozen=True, slots=True)
class UnitSample:
    """A sample of the unit: its dataset index and what its capture must be."""

    sample: int
    expected: Expected


_P = UnitPhase
_COLLECT = (
    msg.Assigned,
    msg.Recalled,
    msg.RecallEnded,
    msg.RequestAnswered,
    msg.RequestFailed,
    msg.DumpPublished,
    msg.CaptureLost,
    msg.LifecycleClosed,
    msg.CaptureOverdue,
    msg.DumpsDigested,
    msg.CaptureInspected,
    msg.FailuresForgiven,
)
# What may still come of attempts that were given up: a publisher's loss settles an attempt before its answer is there.
_LATE = tuple(kind for kind in _COLLECT if kind not in (msg.Assigned, msg.Recalled))


class UnitMachine(Machine[UnitPhase]):
    """Collects the captures of one leased unit. `handle` takes an event and returns the commands that follow from it."""

    table = {
        _P.COLLECTING: {
            **dict.fromkeys(_COLLECT, frozenset({_P.COLLECTING, _P.WRITING, _P.COMMITTING})),
            msg.Abandoned: frozenset({_P.ABANDONED}),
        },
        _P.WRITING: {
            **dict.fromkeys(_LATE, frozenset({_P.WRITING})),
            msg.UnitWritten: frozenset({_P.COMMITTING}),
            msg.WriteFailed: frozenset({_P.WRITING}),
            msg.Abandoned: frozenset({_P.ABANDONED}),
        },
        _P.COMMITTING: {
            **dict.fromkeys(_LATE, frozenset({_P.COMMITTING})),
            msg.CommitRecorded: frozenset({_P.COMMITTED}),
            msg.Abandoned: frozenset({_P.ABANDONED}),
        },
        _P.COMMITTED: dict.fromkeys(_LATE, frozenset({_P.COMMITTED})),
        _P.ABANDONED: dict.fromkeys(
            (*_COLLECT, msg.UnitWritten, msg.WriteFailed, msg.CommitRecorded, msg.Abandoned), frozenset({_P.ABANDONED})
        ),
    }

    def __init__(self, key: UnitKey, samples: Sequence[UnitSample], *, attempts_per_sample: int) -> None:
        super().__init__(f"unit {key.unit} of job {key.job} (fence {key.fence})", UnitPhase.COLLECTING)
        self.key = key
        self.attempts_per_sample = attempts_per_sample
        self._samples = {s.sample: Progress(s.sample, s.expected) for s in samples}
        self._waiting = WaitingSamples(self._samples)
        self._unsettled = [*self._samples]
        self._attempts: dict[str, Attempt] = {}
        self._held: set[str] = set()
        self._keeps_dumps = False

    # --- what the shell may ask ---------------------------------------------------------------------------------------

    def waiting(self) -> Iterator[int]:
        """Samples that a worker may be asked for now: those that were lost less often first, else in placement order.

        Not to be gone on with after an event.
        """
        return iter(self._waiting if self.state is _P.COLLECTING else ())

    def next_rid(self, sample: int) -> str:
        """What the next attempt at this sample will be called."""
        return RequestName(self.key.job, self.key.unit, sample, self._samples[sample].attempts + 1, self.key.fence).rid

    def losses(self, sample: int) -> int:
        """How many attempts at this sample brought no capture, whosever fault that was."""
        return self._samples[sample].losses

    def failed_on(self, sample: int) -> tuple[str, ...]:
        """The workers on which attempts at this sample failed: another one is to be preferred."""
        return self._samples[sample].failed_on

    def awaits(self, rid: str) -> bool:
        """Whether this attempt's answer is still wanted."""
        attempt = self._attempts.get(rid)
        return self.state is _P.COLLECTING and attempt is not None and attempt.state is AttemptState.ASKED

    def expected(self, sample: int) -> Expected:
        return self._samples[sample].expected

    def held_dumps(self) -> set[str]:
        """Ids of the dumps that the unit still needs."""
        return set(self._held)

    def verdicts(self) -> list[SampleVerdict]:
        """How each sample ended, in placement order; meaningful once the unit has left `collecting`."""
        return [at.verdict() for at in self._samples.values()]

    # --- events ---------------------------------------------------------------------------------------------------------

    def handle(self, event: msg.UnitEvent) -> list[msg.UnitCommand]:
        """Apply one event.

        Raises:
            IllegalTransition: the event does not belong in this phase.
        """
        self.require(event)
        commands = self._apply(event)
        if self.state is _P.COLLECTING and self._all_settled():
            return [*commands, *self._finish_collecting(event)]
        return commands

    def _all_settled(self) -> bool:
        # The last in placement order is mostly the last to be settled: after each event, one look at it is enough.
        while self._unsettled and self._samples[self._unsettled[-1]].settled:
            self._unsettled.pop()
        return not self._unsettled and all(at.settled for at in self._samples.values())

    def _apply(self, event: msg.UnitEvent) -> list[msg.UnitCommand]:
        match event:
            case msg.DumpPublished(rid=rid, dump=dump):
                return self._dump(rid, dump)
            case msg.UnitWritten(objects=objects):
                if self.state is _P.ABANDONED:
                    return []
                self.move(event, _P.COMMITTING)
                return [msg.RecordCommit(tuple(self.verdicts()), objects)]
            case msg.WriteFailed(final=final, reason=reason):
                if self.state is _P.ABANDONED:
                    return []
                return [msg.GiveBack(reason)] if final else [self._write_command()]
            case msg.CommitRecorded():
                if self.state is _P.ABANDONED:
                    return []
                self.move(event, _P.COMMITTED)
                return self._release_everything(stray=False)
            case msg.Abandoned():
                self.move(event, _P.ABANDONED)
                self._keeps_dumps = not event.release
                return self._release_everything(stray=True) if event.release else []
        return self._collect(event) if self.state is _P.COLLECTING else []

    def _collect(self, event: msg.UnitEvent) -> list[msg.UnitCommand]:
        match event:
            case msg.Assigned():
                return [self._assign(event)]
            case msg.Recalled():
                self._recall(event)
            case msg.RecallEnded():
                return self._end_recall()
            case msg.FailuresForgiven(sample=sample, failures=failures):
                self._samples[sample].failures -= failures
            case (
                msg.RequestAnswered()
                | msg.RequestFailed()
                | msg.CaptureLost()
                | msg.LifecycleClosed()
                | msg.CaptureOverdue()
                | msg.DumpsDigested()
                | msg.CaptureInspected()
            ) if event.rid in self._attempts:
                return self._about(self._attempts[event.rid], event)
        return []

    def _about(self, attempt: Attempt, event: msg.AttemptEvent) -> list[msg.UnitCommand]:
        match event:
            case msg.RequestAnswered() if attempt.state is AttemptState.ASKED:
                attempt.answered(event)
            case msg.RequestFailed(reason=reason, fault=fault):
                return self._fail(attempt, reason, fault)
            case msg.CaptureLost(reason=reason, fault=fault):
                return self._fail(attempt, str(Refusal(RefusalReason.LOST_BY_PUBLISHER, reason)), fault)
            case msg.LifecycleClosed():
                attempt.lifecycle_closed = True
            case msg.CaptureOverdue():
                return self._overdue(attempt)
            case msg.DumpsDigested(digests=digests):
                attempt.digests.update(digests)
                attempt.asked_digests = False
            case msg.CaptureInspected(digest=digest, refusal=refusal):
                return self._inspected(attempt, digest, refusal)
        return self._judge(attempt)

    # --- attempts -------------------------------------------------------------------------------------------------------

    def _assign(self, event: msg.Assigned) -> msg.SendRequest:
        at = self._samples[event.sample]
        if not at.waits:
            raise ValueError(f"{self.name}: sample {event.sample} is not waiting for a worker")
        sample, rid = event.sample, self.next_rid(event.sample)
        at.attempts += 1
        at.worker = event.worker
        at.live = self._attempts[rid] = Attempt(
            rid, sample, event.worker, at.expected, event.identity, event.chunk, probation=event.probation
        )
        self._waiting.take(sample)
        return msg.SendRequest(rid, sample, event.worker)

    def _recall(self, event: msg.Recalled) -> None:
        """An attempt under an earlier lease, of which the answer is on record: its dumps may still be there."""
        at = self._samples[event.sample]
        attempt = Attempt(event.rid, event.sample, event.worker, at.expected, Identity.TOKENS, None)
        attempt.answered(msg.RequestAnswered(event.rid, at.expected.rows, 0, event.next_token))
        attempt.recalled = True
        self._attempts[event.rid] = attempt

    def _end_recall(self) -> list[msg.UnitCommand]:
        """All dumps that are still there have been reported: attempts that did not come out whole are given up."""
        commands: list[msg.UnitCommand] = []
        for attempt in [a for a in self._attempts.values() if a.recalled and a.state is AttemptState.ANSWERED]:
            commands += self._drop(attempt)
        return commands

    def _dump(self, rid: str, dump: DumpFacts) -> list[msg.UnitCommand]:
        attempt = self._attempts.get(rid)
        if self._keeps_dumps or dump.dump_id in self._held:
            # Kept for the next start, or reported a second time: a capture may hang on it.
            return []
        if attempt is None or self.state is not _P.COLLECTING or not attempt.wants(dump):
            return [msg.ReleaseDumps((dump.dump_id,), stray=True)]
        self._held.add(dump.dump_id)
        attempt.dumps[dump.dump_id] = dump
        return self._judge(attempt)

    def _judge(self, attempt: Attempt) -> list[msg.UnitCommand]:
        """See whether the attempt is complete by now, and what follows."""
        if attempt.state is not AttemptState.ANSWERED or attempt.asked_digests:
            return []
        at = self._samples[attempt.sample]
        if attempt.prompt_tokens != at.expected.rows:
            seen = f"the worker saw {attempt.prompt_tokens} tokens, the sample has {at.expected.rows}"
            return self._refuse(attempt, Refusal(RefusalReason.WRONG_PROMPT_LENGTH, seen))
        if attempt.cached_tokens and attempt.identity is Identity.COUNT:
            # Whatever has the full length is somebody else's.
            return self._refuse(attempt, _prefix_cached(attempt))
        verdict = attempt.verdict()
        match verdict:
            case Complete(dump_ids) if at.captured is None and at.live in (None, attempt):
                if not attempt.may_complete:
                    return attempt.ask_to_close()
                attempt.state = AttemptState.INSPECTING
                at.live = attempt
                self._waiting.take(at.sample)
                attempt.chosen = dump_ids
                return [msg.InspectCapture(attempt.rid, dump_ids)]
            case Complete():
                return self._drop(attempt)
            case NeedDigests(dump_ids):
                attempt.asked_digests = True
                return [msg.DigestDumps(attempt.rid, dump_ids)]
            case Refusal():
                return self._refuse(attempt, verdict)
            case Incomplete() if attempt.cached_tokens:
                return self._refuse(attempt, _prefix_cached(attempt))
        return []

    def _overdue(self, attempt: Attempt) -> list[msg.UnitCommand]:
        if attempt.state is not AttemptState.ANSWERED:
            return []
        verdict = attempt.verdict()
        gap = (
            f"rows {verdict.start} to {verdict.stop} of {attempt.expected.rows}"
            if isinstance(verdict, Incomplete)
            else "the end of its lifecycle"
        )
        return self._refuse(attempt, Refusal(RefusalReason.MISSING_ROWS, f"{gap} did not appear in time"))

    def _inspected(self, attempt: Attempt, digest: int, refusal: Refusal | None) -> list[msg.UnitCommand]:
        if attempt.state is not AttemptState.INSPECTING:
            return []
        if refusal is not None:
            return self._refuse(attempt, refusal)
        at = self._samples[attempt.sample]
        attempt.state, attempt.digest = AttemptState.CAPTURED, digest
        at.captured, at.live, at.worker = attempt, None, attempt.worker
        at.attempts = max(at.attempts, 1)
        spare = [dump for dump in attempt.dumps if dump not in attempt.chosen]
        return [
            msg.CaptureAccepted(attempt.rid, attempt.sample, attempt.worker, attempt.recalled),
            *self._release(attempt, spare, stray=True),
        ]

    def _refuse(self, attempt: Attempt, refusal: Refusal) -> list[msg.UnitCommand]:
        return self._fail(attempt, str(refusal), msg.Fault.ATTEMPT)

    def _fail(self, attempt: Attempt, reason: str, fault: msg.Fault) -> list[msg.UnitCommand]:
        """One attempt is over. Its sample waits again, unless its budget is used up or it is its own fault.

        What fails on probation is the worker's fault: that is why it is on probation.
        """
        if attempt.state in (AttemptState.CAPTURED, AttemptState.DROPPED):
            return []
        at = self._samples[attempt.sample]
        commands = self._drop(attempt)
        if at.live is attempt:
            at.live = None
        if attempt.recalled:
            self._waits_again(at)
            return commands
        at.lost(attempt.worker, uses_budget=fault is msg.Fault.ATTEMPT and not attempt.probation)
        final = fault is msg.Fault.SAMPLE or at.failures >= self.attempts_per_sample
        if final:
            at.reason = reason
        self._waits_again(at)
        return [*commands, msg.AttemptFailed(attempt.rid, attempt.sample, attempt.worker, reason, final, fault)]

    def _waits_again(self, at: Progress) -> None:
        if at.waits:
            self._waiting.put(at.sample, at.losses)

    def _drop(self, attempt: Attempt) -> list[msg.UnitCommand]:
        attempt.state = AttemptState.DROPPED
        return self._release(attempt, list(attempt.dumps), stray=True)

    def _release(self, attempt: Attempt, dump_ids: Iterable[str], *, stray: bool) -> list[msg.UnitCommand]:
        released = tuple(dump_ids)
        for dump_id in released:
            del attempt.dumps[dump_id]
            self._held.discard(dump_id)
        return [msg.ReleaseDumps(released, stray=stray)] if released else []

    # --- the end --------------------------------------------------------------------------------------------------------

    def _finish_collecting(self, event: msg.UnitEvent) -> list[msg.UnitCommand]:
        if any(at.captured for at in self._samples.values()):
            self.move(event, _P.WRITING)
            return [self._write_command()]
        self.move(event, _P.COMMITTING)
        return [msg.RecordCommit(tuple(self.verdicts()), ())]

    def _write_command(self) -> msg.WriteUnit:
        return msg.WriteUnit(tuple((sample, at.captured.chosen) for sample, at in self._samples.items() if at.captured))

    def _release_everything(self, *, stray: bool) -> list[msg.UnitCommand]:
        """With one command: each is a task and a thread's work for the shell, and a unit may have thousands of attempts."""
        released = tuple(dump_id for attempt in self._attempts.values() for dump_id in attempt.dumps)
        for attempt in self._attempts.values():
            attempt.dumps.clear()
        self._held.difference_update(released)
        return [msg.ReleaseDumps(released, stray=stray)] if released else []


def _prefix_cached(attempt: Attempt) -> Refusal:
    seen = f"{attempt.cached_tokens} of {attempt.expected.rows} tokens came from the worker's prefix cache"
    return Refusal(RefusalReason.PREFIX_CACHED, seen)
