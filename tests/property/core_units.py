"""Units in the world around core: their machines, the shell that performs their commands, the ledger and the store.

The invariants of the design are checked here, where they could break.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from statetap.core import unit_messages as msg
from statetap.core.capture import Refusal, RefusalReason
from statetap.core.dumps import DumpFacts
from statetap.core.placement import Geometry, dataset_order, place
from statetap.core.records import SampleStatus, SampleVerdict
from statetap.core.requests import RequestName
from statetap.core.routing import UnitId
from statetap.core.spec import Identity
from statetap.core.unit import UnitMachine, UnitPhase

from tests.property.core_server import Prompt, Published, Row

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


class Units:
    """All units of one job. `strict`: by count. The world that has the workers says what a lifecycle is."""

    def __init__(self, prompts: Sequence[Prompt], identity: Identity) -> None:
        self.prompts = prompts
        self.identity = identity
        self.strict = identity is Identity.COUNT
        placement = place([len(p) for p in prompts], dataset_order(len(prompts)), Geometry(64, 16, 4))
        self.units = {
            unit.index: UnitState(dict(placement.samples_of(unit)), range(unit.row_start, unit.row_start + unit.rows))
            for unit in placement.units
        }
        self.runs: dict[UnitId, Run] = {}
        self.directory: dict[str, Published] = {}
        self.journal: dict[int, list[msg.Recalled]] = defaultdict(list)
        self.next_tokens: dict[str, int] = {}
        self.reported: dict[str, list[str]] = defaultdict(list)
        self.owners: dict[str, str] = {}
        self.named: dict[str, frozenset[str]] = {}

    def end_lifecycle(self, rid: str, *, captured: bool) -> None:
        """The attempt is over: what appears from now on is not its own."""
        raise NotImplementedError

    def look_again(self, rid: str) -> None:
        """The quiet period is over: report what is visible."""
        raise NotImplementedError

    def give(self, key: UnitId, rid: str, facts: DumpFacts) -> None:
        """Report a dump to its unit."""
        if facts.dump_id not in self.reported[rid]:
            self.reported[rid].append(facts.dump_id)
            self.owners[facts.dump_id] = rid
        self.post(key, msg.DumpPublished(rid, facts))

    # --- events in, effects out -----------------------------------------------------------------------------------------

    def post(self, key: UnitId, event: msg.UnitEvent) -> list[msg.UnitCommand]:
        run = self.runs[key]
        commands = run.machine.handle(event)
        for command in commands:
            # First what is told, so that the rest can be judged by it.
            match command:
                case msg.CaptureAccepted(rid=rid):
                    self._accepted(run, rid)
                    if not command.recalled:
                        chosen = {self.directory[dump].facts.name for dump in run.chosen[rid]}
                        assert rid not in self.named or chosen <= self.named[rid], "a dump that its answer does not name"
                    self.end_lifecycle(rid, captured=True)
                case msg.AttemptFailed():
                    self._failed(run, command)
                    self.end_lifecycle(command.rid, captured=False)
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
        """Invariant 2: a sample fails with its own fault, or with the last of its attempts, and not before; what was nobody's
        fault is no attempt."""
        run.live.discard(command.rid)
        if command.fault is msg.Fault.NOBODY:
            assert not command.final
            return
        run.failures[command.sample] += 1
        assert command.final == (command.rid in run.faulty or run.failures[command.sample] == ATTEMPTS)

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
                self.look_again(rid)
                self.post(key, msg.LifecycleClosed(rid))
            case msg.DigestDumps(rid, dump_ids):
                digests = {d: hash(self.directory[d].rows) for d in dump_ids if d in self.directory}
                self.post(key, msg.DumpsDigested(rid, digests))
            case msg.InspectCapture(rid, _):
                self.post(key, msg.CaptureInspected(rid, hash(rid), Refusal(RefusalReason.BAD_VALUES, "NaN") if fails else None))
            case msg.WriteUnit(captures):
                self._write(key, run, captures, fails)
            case msg.RecordCommit(verdicts, _):
                self._commit(key, run, verdicts)
            case msg.GiveBack(reason):
                self.abandon(key, reason)

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
        for rid in sorted(self.runs[key].live):
            self.end_lifecycle(rid, captured=False)
        self.units[key[1]].leased = False
        self._end_run(key)

    def _end_run(self, key: UnitId) -> None:
        del self.runs[key]
        self.journal.pop(key[1], None)

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
