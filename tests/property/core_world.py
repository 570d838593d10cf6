"""The world around core, without any I/O: workers and their dumps, over the units of one job (`core_units`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from statetap.core import unit_messages as msg
from statetap.core.capture import Expected
from statetap.core.dumps import DumpFacts
from statetap.core.requests import RequestName
from statetap.core.routing import DumpRouter, Parked, Stray, ToUnit, UnitId
from statetap.core.spec import Identity
from statetap.core.strict import StrictGate
from statetap.core.unit import UnitKey, UnitMachine, UnitSample
from statetap.core.worker import Answered, Cleared, Doubted, Identified, Lost, Sent, WorkerMachine, WorkerState

from tests.property.core_server import ARRAYS, CAPTURE, FINGERPRINT, Loss, Prompt, Published, Server, token_bytes
from tests.property.core_units import ATTEMPTS, Run, Units

JOB = "j"


@dataclass(slots=True)
class Worker:
    server: Server
    machine: WorkerMachine
    router: DumpRouter
    gate: StrictGate
    parked: dict[UnitId, list[tuple[str, DumpFacts]]] = field(default_factory=lambda: defaultdict(list))
    unseen: list[Published | Loss] = field(default_factory=list)
    lifecycle: tuple[str, int] | None = None


class World(Units):
    """`punctual`: by count, what a worker has computed is visible when its lifecycle's quiet period ends."""

    def __init__(
        self, prompts: Sequence[Prompt], *, identity: Identity, chunk: int | None, workers: int, punctual: bool = True
    ) -> None:
        super().__init__(prompts, identity)
        self.chunk, self.punctual = chunk, punctual
        self.rids: set[str] = set()
        self.serial = count(1)
        self.expected_back: set[UnitId] = set()
        servers = [Server(f"gpu{n}", not self.strict, chunk) for n in range(workers)]
        self.workers = {server.name: self._worker(server) for server in servers}

    def _worker(self, server: Server) -> Worker:
        return Worker(
            server, WorkerMachine(server.name), DumpRouter(self.runs.keys(), self.expected_back), StrictGate(self.chunk)
        )

    # --- leases ---------------------------------------------------------------------------------------------------------

    def open_to_lease(self) -> list[int]:
        return [i for i, unit in self.units.items() if unit.committed is None and not unit.leased]

    def lease(self, index: int) -> None:
        unit, key = self.units[index], (JOB, index)
        unit.fence, unit.leased = unit.fence + 1, True
        wanted = [UnitSample(s, Expected(token_bytes(self.prompts[s]), ARRAYS, CAPTURE, FINGERPRINT)) for s in unit.samples]
        run = self.runs[key] = Run(UnitMachine(UnitKey(JOB, index, unit.fence), wanted, attempts_per_sample=ATTEMPTS))
        self.expected_back.discard(key)
        for recalled in self.journal[index]:
            self.post(key, recalled)
        for worker in self.workers.values():
            for rid, facts in worker.parked.pop(key, []):
                self.give(key, rid, facts)
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
        waiting = list(self.runs[key].machine.waiting())
        if not waiting:
            return
        sample = waiting[0]
        if self.strict:
            lengths = [len(self.prompts[s]) for s in waiting]
            following = next(filter(worker.gate.may_send, lengths), None)
            if following is None:
                self._fence(worker, set(lengths))
                return
            sample = waiting[lengths.index(following)]
        (command,) = self.post(key, msg.Assigned(sample, worker.server.name, self.identity, self.chunk))
        assert isinstance(command, msg.SendRequest)
        if self.strict:
            worker.router.begin_lifecycle(command.rid)
            worker.lifecycle = (command.rid, len(self.prompts[sample]))
            worker.gate.sent(len(self.prompts[sample]))
        self.runs[key].live.add(command.rid)
        self._send(worker, command.rid, self.prompts[sample])

    def _send(self, worker: Worker, rid: str, prompt: Prompt) -> None:
        assert rid not in self.rids, f"{rid} was used before"
        self.rids.add(rid)
        worker.machine.handle(Sent(rid))
        assert not worker.server.queued, f"invariant 1: a second request at {worker.server.name}"
        worker.server.queued[rid] = prompt

    def _fence(self, worker: Worker, next_lengths: set[int]) -> None:
        length = worker.gate.begin_fence(next_lengths)
        self._send(worker, f"st-fence-{worker.server.name}-{next(self.serial)}", (3,) * length)

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
            if not self.strict:
                self.journal[name.unit].append(msg.Recalled(rid, name.sample, worker.server.name, answer.next_token))
            if answer.named is not None:
                self.named[rid] = answer.named
            self.post(run, msg.RequestAnswered(rid, answer.prompt_tokens, answer.cached_tokens, answer.next_token, answer.named))

    def fail(self, worker: Worker, event: Answered | Doubted | Lost, fault: msg.Fault = msg.Fault.ATTEMPT) -> None:
        """What is in flight ends without an answer."""
        rid = worker.machine.in_flight
        worker.machine.handle(event)
        if isinstance(event, Answered):
            worker.server.queued.pop(rid, None)
        self.give_up_fence(worker)
        if rid is not None and (run := self._run_of(rid)) is not None:
            if fault is msg.Fault.SAMPLE:
                self.runs[run].faulty.add(rid)
            self.post(run, msg.RequestFailed(rid, f"no answer: {event}", fault))

    def clear(self, worker: Worker) -> None:
        """The doubted request is aborted: what it has computed may still be published."""
        worker.server.queued.clear()
        worker.machine.handle(Cleared() if worker.machine.state is WorkerState.SUSPECT else Identified("tap"))
        worker.gate.restart()

    def give_up_fence(self, worker: Worker) -> None:
        if worker.gate.awaited is not None:
            worker.gate.fence_failed()

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
        item = worker.server.publish(0 if self.strict else place)
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
                self.give(key, rid, item.facts)
            case Parked(key):
                worker.parked[key].append((item.facts.rid, item.facts))
            case Stray():
                del self.directory[item.facts.dump_id]
                self._check_stray(item)
                worker.gate.appeared(item.facts.rows)

    def see_again(self, worker: Worker, place: int) -> None:
        """A dump that a unit holds is reported once more."""
        held = sorted(dump for run in self.runs.values() for dump in run.machine.held_dumps())
        mine = [dump for dump in held if dump.startswith(f"{worker.server.name}/")]
        if mine and not self.strict:
            worker.unseen.insert(0, self.directory[mine[place % len(mine)]])
            self.see(worker)

    def _check_stray(self, dump: Published) -> None:
        """Invariant 3, where a dump is released without asking any unit."""
        name = RequestName.parse(dump.facts.rid) if dump.facts.rid is not None else None
        if name is not None:
            key = (JOB, name.unit)
            assert key not in {*self.runs, *self.expected_back}, f"invariant 3: {dump.facts}"

    def end_lifecycle(self, rid: str, *, captured: bool) -> None:
        for worker in self.workers.values():
            if worker.lifecycle is not None and worker.lifecycle[0] == rid:
                worker.router.end_lifecycle()
                if not captured:
                    worker.gate.doubt(worker.lifecycle[1])
                worker.lifecycle = None

    def look_again(self, rid: str) -> None:
        for worker in self.workers.values():
            if worker.lifecycle is not None and worker.lifecycle[0] == rid:
                while self.punctual and worker.server.pipeline:
                    self.publish(worker)
                while worker.unseen:
                    self.see(worker)

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
        self.give_up_fence(worker)
        if worker.machine.state is not WorkerState.READY:
            self.clear(worker)
        for index in self.open_to_lease():
            self.lease(index)
        for key, run in self.runs.items():
            if worker in self.idle() and list(run.machine.waiting()):
                self.ask(worker, key)
