"""The service around core, without any I/O: a ledger, a store, workers and the shell that turns commands into events.

Whatever a test lets happen, the world checks the five invariants of the design where they could break.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from statetap.core import unit_messages as msg
from statetap.core.capture import Expected
from statetap.core.dumps import DumpFacts
from statetap.core.placement import Geometry, dataset_order, place
from statetap.core.records import SampleStatus, SampleVerdict
from statetap.core.requests import RequestName
from statetap.core.routing import DumpRouter, Parked, Stray, ToUnit, UnitId
from statetap.core.spec import Identity
from statetap.core.strict import fence_length, next_length
from statetap.core.unit import UnitKey, UnitMachine, UnitPhase, UnitSample
from statetap.core.worker import Answered, Cleared, Doubted, Identified, Lost, Sent, WorkerMachine, WorkerState

from tests.property.core_server import ARRAYS, Loss, Prompt, Published, Row, Server, token_bytes

JOB = "j"
ATTEMPTS = 3


@dataclass(slots=True)
class UnitState:
    """A unit in the ledger and in the store; `committed` and `kept` are set once."""

    samples: dict[int, int]
    rows: range
    fence: int = 0
    leased: bool = False
    written: tuple[int, dict[int, Row]] | None = None
    committed: tuple[SampleVerdict, ...] | None = None
    kept: dict[int, Row] = field(default_factory=dict)


@dataclass(slots=True)
class Run:
    """A leased unit: its machine, the commands whose event is still to come, and what was promised to be kept."""

    machine: UnitMachine
    effects: list[msg.UnitCommand] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    chosen: dict[str, tuple[str, ...]] = field(default_factory=dict)
    accepted: set[str] = field(default_factory=set)
    failures: Counter[int] = field(default_factory=Counter)
    faulty: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Gate:
    """The rules of strict mode at one worker: what `core.strict` decides, kept from request to request."""

    previous: int | None = None
    unaccounted: set[int] = field(default_factory=set)
    fenced: bool = False
    awaited: int | None = None


@dataclass(slots=True)
class Worker:
    server: Server
    machine: WorkerMachine
    router: DumpRouter
    gate: Gate = field(default_factory=Gate)
    parked: dict[UnitId, list[tuple[str, DumpFacts]]] = field(default_factory=lambda: defaultdict(list))
    unseen: list[Published | Loss] = field(default_factory=list)
    lifecycle: tuple[str, int] | None = None


class World:
    """`punctual`: by count, what a worker has computed is visible when its lifecycle's quiet period ends."""

    def __init__(
        self, prompts: Sequence[Prompt], *, identity: Identity, chunk: int | None, workers: int, punctual: bool = True
    ) -> None:
        self.prompts = prompts
        self.strict = identity is Identity.COUNT
        self.identity, self.chunk, self.punctual = identity, chunk, punctual
        placement = place([len(p) for p in prompts], dataset_order(len(prompts)), Geometry(64, 16, 4))
        self.units = {
            unit.index: UnitState(dict(placement.samples_of(unit)), range(unit.row_start, unit.row_start + unit.rows))
            for unit in placement.units
        }
        self.directory: dict[str, Published] = {}
        self.journal: dict[int, list[msg.Recalled]] = defaultdict(list)
        self.next_tokens: dict[str, int] = {}
        self.reported: dict[str, list[str]] = defaultdict(list)
        self.owners: dict[str, str] = {}
        self.rids: set[str] = set()
        self.serial = count(1)
        self.runs: dict[UnitId, Run] = {}
        self.expected_back: set[UnitId] = set()
        servers = [Server(f"gpu{n}", not self.strict, chunk) for n in range(workers)]
        self.workers = {server.name: self._worker(server) for server in servers}

    def _worker(self, server: Server) -> Worker:
        return Worker(server, WorkerMachine(server.name), DumpRouter(self.runs.keys(), self.expected_back))

    # --- leases ---------------------------------------------------------------------------------------------------------

    def open_to_lease(self) -> list[int]:
        return [i for i, unit in self.units.items() if unit.committed is None and not unit.leased]

    def lease(self, index: int) -> None:
        unit, key = self.units[index], (JOB, index)
        unit.fence, unit.leased = unit.fence + 1, True
        wanted = [UnitSample(s, Expected(token_bytes(self.prompts[s]), ARRAYS)) for s in unit.samples]
        run = self.runs[key] = Run(UnitMachine(UnitKey(JOB, index, unit.fence), wanted, attempts_per_sample=ATTEMPTS))
        self.expected_back.discard(key)
        for recalled in self.journal[index]:
            self.post(key, recalled)
        for worker in self.workers.values():
            for rid, facts in worker.parked.pop(key, []):
                self._give(key, rid, facts)
        whole = {r.sample for r in self.journal[index] if self._is_whole(r)}
        self.post(key, msg.RecallEnded())
        # What lies ready in shared memory is not asked for again.
        assert not whole & set(run.machine.waiting())

    def _is_whole(self, recalled: msg.Recalled) -> bool:
        """Whether the dumps of this attempt tile its prompt beyond all doubt, and no other answer for the sample is on record."""
        alone = [r.sample for r in self.journal[RequestName.parse(recalled.rid).unit]].count(recalled.sample) == 1
        dumps = [self.directory[dump] for dump in self.reported[recalled.rid] if dump in self.directory]
        rows = [row.index for dump in dumps for row in dump.rows]
        prompt = self.prompts[recalled.sample]
        right = all(row.prompt == prompt for dump in dumps for row in dump.rows if row.index < len(prompt))
        return alone and right and sorted(i for i in rows if i < len(prompt)) == list(range(len(prompt)))

    def steal(self, key: UnitId) -> None:
        """The lease ran out, somebody else has had the unit and gave it back."""
        self.units[key[1]].fence += 1

    # --- requests -------------------------------------------------------------------------------------------------------

    def idle(self) -> list[Worker]:
        """Workers that may be asked for something: by count, no lifecycle is open there and no fence is awaited."""
        ready = [w for w in self.workers.values() if w.machine.state is WorkerState.READY]
        return [w for w in ready if w.lifecycle is None and w.gate.awaited is None]

    def ask(self, worker: Worker, key: UnitId) -> None:
        """Send the next sample that may go, or the fence that must come first."""
        waiting = self.runs[key].machine.waiting()
        if not waiting:
            return
        sample = waiting[0]
        if self.strict:
            lengths = [len(self.prompts[s]) for s in waiting]
            following = next_length(lengths, worker.gate.previous) if worker.gate.fenced else None
            if following is None:
                self._fence(worker, set(lengths))
                return
            sample = waiting[lengths.index(following)]
        (command,) = self.post(key, msg.Assigned(sample, worker.server.name, self.identity, self.chunk))
        assert isinstance(command, msg.SendRequest)
        if self.strict:
            worker.router.begin_lifecycle(command.rid)
            worker.lifecycle = (command.rid, len(self.prompts[sample]))
            worker.gate.previous = len(self.prompts[sample])
        self.runs[key].live.add(command.rid)
        self._send(worker, command.rid, self.prompts[sample])

    def _send(self, worker: Worker, rid: str, prompt: Prompt) -> None:
        assert rid not in self.rids, f"{rid} was used before"
        self.rids.add(rid)
        worker.machine.handle(Sent(rid))
        assert not worker.server.queued, f"invariant 1: a second request at {worker.server.name}"
        worker.server.queued[rid] = prompt

    def _fence(self, worker: Worker, next_lengths: set[int]) -> None:
        gate = worker.gate
        avoid = gate.unaccounted | next_lengths | ({gate.previous} if gate.previous is not None else set())
        gate.awaited = fence_length(avoid, self.chunk)
        gate.unaccounted.add(gate.awaited)
        self._send(worker, f"st-fence-{worker.server.name}-{next(self.serial)}", (3,) * gate.awaited)

    def answer(self, worker: Worker) -> None:
        """The answer to what is in flight arrives, once it is computed."""
        rid = worker.machine.in_flight
        answer = worker.server.answers.pop(rid, None)
        if answer is None:
            return
        worker.machine.handle(Answered(rid))
        self.next_tokens[rid] = answer.next_token
        if (run := self._run_of(rid)) is not None:
            name = RequestName.parse(rid)
            self.journal[name.unit].append(msg.Recalled(rid, name.sample, worker.server.name, answer.next_token))
            self.post(run, msg.RequestAnswered(rid, answer.prompt_tokens, answer.cached_tokens, answer.next_token))

    def fail(self, worker: Worker, event: Answered | Doubted | Lost, fault: msg.Fault = msg.Fault.ATTEMPT) -> None:
        """What is in flight ends without an answer."""
        rid = worker.machine.in_flight
        worker.machine.handle(event)
        if isinstance(event, Answered):
            worker.server.queued.pop(rid, None)
        worker.gate.awaited = None
        if rid is not None and (run := self._run_of(rid)) is not None:
            if fault is msg.Fault.SAMPLE:
                self.runs[run].faulty.add(rid)
            self.post(run, msg.RequestFailed(rid, f"no answer: {event}", fault))

    def clear(self, worker: Worker) -> None:
        """The doubted request is aborted: what it has computed may still be published."""
        worker.server.queued.clear()
        worker.machine.handle(Cleared() if worker.machine.state is WorkerState.SUSPECT else Identified("tap"))
        worker.gate.fenced = False

    def kill_worker(self, worker: Worker) -> None:
        worker.server.kill()
        self.fail(worker, Lost("killed"))

    def _run_of(self, rid: str) -> UnitId | None:
        """The open run that sent this request."""
        name = RequestName.parse(rid)
        key = (JOB, name.unit) if name is not None else None
        return key if key in self.runs and self.runs[key].machine.key.fence == name.fence else None

    # --- dumps ----------------------------------------------------------------------------------------------------------

    def publish(self, worker: Worker, place: int = 0) -> None:
        """Let the pipeline's next dump become visible; by name the order does not matter."""
        item = worker.server.pipeline.pop(0 if self.strict else place % len(worker.server.pipeline))
        if isinstance(item, Published):
            self.directory[item.facts.dump_id] = item
        worker.unseen.append(item)

    def see(self, worker: Worker, place: int = 0) -> None:
        """The service hears of a dump."""
        item = worker.unseen.pop(0 if self.strict else place % len(worker.unseen))
        if isinstance(item, Loss):
            name = RequestName.parse(item.rid)
            if (JOB, name.unit) in self.runs:
                self.post((JOB, name.unit), msg.CaptureLost(item.rid, "no space"))
            return
        match worker.router.route(item.facts):
            case ToUnit(key, rid):
                self._give(key, rid, item.facts)
            case Parked(key):
                worker.parked[key].append((item.facts.rid, item.facts))
            case Stray():
                del self.directory[item.facts.dump_id]
                self._check_stray(item)
                if worker.gate.awaited == item.facts.rows:
                    worker.gate = Gate(previous=item.facts.rows, fenced=True)

    def see_again(self, worker: Worker, place: int) -> None:
        """A dump that a unit holds is reported once more."""
        held = sorted(dump for run in self.runs.values() for dump in run.machine.held_dumps())
        mine = [dump for dump in held if dump.startswith(f"{worker.server.name}/")]
        if mine and not self.strict:
            worker.unseen.insert(0, self.directory[mine[place % len(mine)]])
            self.see(worker)

    def _give(self, key: UnitId, rid: str, facts: DumpFacts) -> None:
        if facts.dump_id not in self.reported[rid]:
            self.reported[rid].append(facts.dump_id)
            self.owners[facts.dump_id] = rid
        self.post(key, msg.DumpPublished(rid, facts))

    def _check_stray(self, dump: Published) -> None:
        """Invariant 3, where a dump is released without asking any unit."""
        name = RequestName.parse(dump.facts.rid) if dump.facts.rid is not None else None
        if name is not None:
            key = (JOB, name.unit)
            assert key not in {*self.runs, *self.expected_back}, f"invariant 3: {dump.facts}"

    # --- events in, effects out -----------------------------------------------------------------------------------------

    def post(self, key: UnitId, event: msg.UnitEvent) -> list[msg.UnitCommand]:
        run = self.runs[key]
        commands = run.machine.handle(event)
        for command in commands:
            # First what is told, so that the rest can be judged by it.
            match command:
                case msg.CaptureAccepted(rid=rid):
                    self._accepted(run, rid)
                    self._end_lifecycle(rid, captured=True)
                case msg.AttemptFailed():
                    self._failed(run, command)
                    self._end_lifecycle(command.rid, captured=False)
        for command in commands:
            match command:
                case msg.ReleaseDumps(dump_ids, stray):
                    self._release(key, run, dump_ids, stray)
                case msg.CaptureAccepted() | msg.AttemptFailed() | msg.SendRequest():
                    pass
                case _:
                    if isinstance(command, msg.InspectCapture):
                        run.chosen[command.rid] = command.dump_ids
                    run.effects.append(command)
        return commands

    def _accepted(self, run: Run, rid: str) -> None:
        """Never guess: no dump of the same rows that was there when the capture was chosen holds other bits."""
        run.live.discard(rid)
        run.accepted.add(rid)
        there = [self.directory[dump].facts for dump in self.reported[rid] if dump in self.directory]
        for dump in [] if self.strict else run.chosen[rid]:
            mine = self.directory[dump].facts
            for other in there:
                if (other.prefix_len, other.rows, other.retraction_count) == (mine.prefix_len, mine.rows, mine.retraction_count):
                    assert self.directory[other.dump_id].rows == self.directory[dump].rows, "two readings that differ"

    @staticmethod
    def _failed(run: Run, command: msg.AttemptFailed) -> None:
        """Invariant 2: a sample fails with its own fault, or with the last of its attempts, and not before."""
        run.live.discard(command.rid)
        run.failures[command.sample] += 1
        assert command.final == (command.rid in run.faulty or run.failures[command.sample] == ATTEMPTS)

    def _end_lifecycle(self, rid: str, *, captured: bool) -> None:
        for worker in self.workers.values():
            if worker.lifecycle is not None and worker.lifecycle[0] == rid:
                worker.router.end_lifecycle()
                if not captured:
                    worker.gate.unaccounted.add(worker.lifecycle[1])
                    worker.gate.fenced = False
                worker.lifecycle = None

    def _release(self, key: UnitId, run: Run, dump_ids: tuple[str, ...], stray: bool) -> None:
        """Invariant 3: a dump goes after the commit, or when nothing can hang on it any more."""
        over = run.machine.state in (UnitPhase.COMMITTED, UnitPhase.ABANDONED)
        committed = self.units[key[1]].committed is not None
        kept = {dump for rid in run.accepted for dump in run.chosen[rid]}
        for dump_id in dump_ids:
            dump, rid = self.directory.pop(dump_id), self.owners[dump_id]
            assert stray or committed, f"invariant 3: {dump_id} goes as a capture's, but nothing is committed"
            assert over or dump_id not in kept, f"invariant 3: {dump_id} belongs to an accepted capture"
            undecided = rid in run.live and rid not in run.chosen
            beyond = not self.strict and dump.facts.prefix_len + dump.facts.rows > len(
                self.prompts[RequestName.parse(rid).sample]
            )
            assert over or beyond or not undecided, f"invariant 3: {dump_id} may still be needed"

    def perform(self, key: UnitId, place: int, *, fails: bool = False) -> None:
        """Do one of the effects that are under way, and post what came of it."""
        run = self.runs[key]
        command = run.effects.pop(place % len(run.effects))
        match command:
            case msg.CloseLifecycle(rid):
                self._look_again(rid)
                self.post(key, msg.LifecycleClosed(rid))
            case msg.DigestDumps(rid, dump_ids):
                digests = {d: hash(self.directory[d].rows) for d in dump_ids if d in self.directory}
                self.post(key, msg.DumpsDigested(rid, digests))
            case msg.InspectCapture(rid, _):
                self.post(key, msg.CaptureInspected(rid, hash(rid), "NaN" if fails else None))
            case msg.WriteUnit(captures):
                self._write(key, run, captures, fails)
            case msg.RecordCommit(verdicts, _):
                self._commit(key, run, verdicts)
            case msg.GiveBack(reason):
                self.abandon(key, reason)

    def _look_again(self, rid: str) -> None:
        for worker in self.workers.values():
            if worker.lifecycle is not None and worker.lifecycle[0] == rid:
                while self.punctual and worker.server.pipeline:
                    self.publish(worker)
                while worker.unseen:
                    self.see(worker)

    def _write(self, key: UnitId, run: Run, captures: tuple[tuple[int, tuple[str, ...]], ...], fails: bool) -> None:
        """Invariant 4: what is committed is not touched; what is not is replaced as a whole."""
        unit = self.units[key[1]]
        if run.machine.state is not UnitPhase.WRITING:
            return
        if fails:
            self.post(key, msg.WriteFailed("no space", final=False))
            return
        assert unit.committed is None or unit.fence > run.machine.key.fence, "invariant 4: a committed unit is written again"
        written: dict[int, Row] = {}
        for sample, dump_ids in captures:
            rows = [row for dump_id in dump_ids for row in self.directory[dump_id].rows]
            start = unit.samples[sample]
            written |= {start + place: row for place, row in enumerate(rows)}
        unit.written = (run.machine.key.fence, written)
        self.post(key, msg.UnitWritten(()))

    def _commit(self, key: UnitId, run: Run, verdicts: tuple[SampleVerdict, ...]) -> None:
        unit = self.units[key[1]]
        if run.machine.state is not UnitPhase.COMMITTING:
            return
        if unit.fence != run.machine.key.fence or not unit.leased:
            self.abandon(key, "the lease is lost")
            return
        assert unit.committed is None, "invariant 4: a unit is committed twice"
        unit.committed, unit.leased = verdicts, False
        unit.kept = dict(unit.written[1]) if unit.written is not None and unit.written[0] == unit.fence else {}
        self.post(key, msg.CommitRecorded())
        assert not run.machine.held_dumps()
        self._end_run(key)
        self.check_stored(key[1])

    def abandon(self, key: UnitId, reason: str) -> None:
        self.post(key, msg.Abandoned(reason, release=True))
        for worker in self.workers.values():
            if worker.lifecycle is not None and RequestName.parse(worker.lifecycle[0]).unit == key[1]:
                self._end_lifecycle(worker.lifecycle[0], captured=False)
        self.units[key[1]].leased = False
        self._end_run(key)

    def _end_run(self, key: UnitId) -> None:
        del self.runs[key]
        self.journal.pop(key[1], None)

    def restart_service(self, *, politely: bool) -> None:
        """All that is in memory is gone; the ledger, the journal, the store and the directories are not."""
        if politely:
            for key in self.runs:
                assert self.post(key, msg.Abandoned("the service stops", release=False)) == []
        leased = {(JOB, i) for i, unit in self.units.items() if unit.leased}
        for _, index in leased:
            self.units[index].leased = False
        self.runs.clear()
        self.expected_back = leased
        losses = {name: [i for i in w.unseen if isinstance(i, Loss)] for name, w in self.workers.items()}
        self.workers = {name: self._worker(w.server) for name, w in self.workers.items()}
        for name, worker in self.workers.items():
            # With its connection gone, a server drops what it has not begun; what it has computed may still be published.
            worker.server.queued.clear()
            worker.unseen = [d for d in self.directory.values() if d.facts.dump_id.startswith(f"{name}/")]
            worker.unseen += losses[name]
            while worker.unseen:
                # A source that starts reports what is there, before anything is leased.
                self.see(worker)

    # --- what must hold -------------------------------------------------------------------------------------------------

    def check_stored(self, index: int) -> None:
        """Invariants 2 and 5, of one committed unit: every row of every stored sample is the worker's, of one computation."""
        unit = self.units[index]
        assert [v.sample for v in unit.committed] == list(unit.samples)
        kept = dict(unit.kept)
        for verdict in unit.committed:
            if verdict.status is SampleStatus.FAILED:
                assert verdict.reason, "invariant 2: a failure without a reason"
                continue
            assert verdict.status is SampleStatus.STORED, "invariant 2: neither stored nor failed"
            prompt, start = self.prompts[verdict.sample], unit.samples[verdict.sample]
            rows = [kept.pop(start + place) for place in range(len(prompt))]
            assert [(row.prompt, row.index) for row in rows] == [(prompt, place) for place in range(len(prompt))], "invariant 5"
            (rid,) = {row.bits.split()[0] for row in rows}
            assert len({"after" in row.bits for row in rows}) == 1, "rows of two generations"
            assert RequestName.parse(rid).sample == verdict.sample
            assert self.next_tokens[rid] == verdict.next_token, "an answer of another attempt"
        assert not kept, "rows that belong to no sample"

    # --- the fair end ---------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Nothing goes wrong any more: every sample comes to its end, and nothing is left in any directory."""
        for _ in range(60 * len(self.prompts)):
            self._show_everything()
            while any(run.effects for run in self.runs.values()):
                for key in list(self.runs):
                    while key in self.runs and self.runs[key].effects:
                        self.perform(key, 0)
            if all(unit.committed is not None for unit in self.units.values()) and not self._in_flight():
                break
            for key, run in list(self.runs.items()):
                for rid in sorted(run.live):
                    self.post(key, msg.CaptureOverdue(rid))
            for worker in self.workers.values():
                self._serve(worker)
        for index in self.units:
            self.check_stored(index)
        self._show_everything()
        assert self.directory == {}, "dumps that nobody releases"

    def _in_flight(self) -> bool:
        return any(worker.machine.in_flight is not None for worker in self.workers.values())

    def _show_everything(self) -> None:
        for worker in self.workers.values():
            while worker.server.pipeline:
                self.publish(worker)
            while worker.unseen:
                self.see(worker)

    def _serve(self, worker: Worker) -> None:
        """One fair step of a worker: come back, answer, or be asked."""
        rid = worker.machine.in_flight
        if rid is not None:
            if rid in worker.server.queued:
                worker.server.compute(rid, "whole", 0)
            self.answer(worker)
            return
        worker.gate.awaited = None
        if worker.machine.state is not WorkerState.READY:
            self.clear(worker)
        for index in self.open_to_lease():
            self.lease(index)
        for key, run in self.runs.items():
            if worker in self.idle() and run.machine.waiting():
                self.ask(worker, key)
