"""The runtime over fakes, in virtual time, made to take faults: a ledger that locks, a wall clock that jumps, slow workers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
from statetap.core.capture import RefusalReason
from statetap.core.requests import RequestName
from statetap.core.spec import Identity
from statetap.ports import (
    GenerateSample,
    InferenceError,
    LedgerError,
    RequestRefused,
    RequestTimedOut,
    TapSeen,
    WorkerUnreachable,
)

from tests.fakes.clock import HandClock
from tests.fakes.dumps import FakeDump
from tests.fakes.harness import FakeWorker, World
from tests.fakes.ledger import FakeLedger

R = RefusalReason
# As `rescan_seconds`: by then a real source finds what no event told it of.
RESCAN_SECONDS = 1.0
LATE_SECONDS = 5.0
TOO_LATE_SECONDS = 40.0

# What a fault in a request does to the attempt: None where the sample must be captured all the same.
REQUEST_FAULTS: dict[str, RefusalReason | None] = {
    "error 500": R.REQUEST_FAILED,
    "error 503": R.REQUEST_FAILED,
    "connection refused": R.REQUEST_FAILED,
    "answer lost": R.REQUEST_FAILED,
    "hang": R.REQUEST_FAILED,
    "slow": None,
    "no dump": R.MISSING_ROWS,
    "dump late": None,
    "dump too late": R.MISSING_ROWS,
    "event lost": None,
    "missing rows": R.MISSING_ROWS,
    "duplicate dump": None,
    "two readings": R.AMBIGUOUS,
    "NaN": R.BAD_VALUES,
    "zeros": R.BAD_VALUES,
}
# These need dumps that say whose they are.
TOKEN_FAULTS: dict[str, RefusalReason | None] = {
    "in pieces": None,
    "wrong token ids": R.WRONG_TOKENS,
    "wrong rid": R.MISSING_ROWS,
    "wrong dtype": R.WRONG_TENSORS,
    "lost by publisher": R.LOST_BY_PUBLISHER,
    "prefix cached": R.PREFIX_CACHED,
}
# What a sample cannot survive, on whichever worker.
DOOMS: dict[str, RefusalReason] = {"error 400": R.REQUEST_FAILED, "NaN": R.BAD_VALUES, "no dump": R.MISSING_ROWS}

_LOCKED_BY_OTHERS = frozenset(
    {"peek_unit", "lease_unit", "renew_leases", "give_back", "commit_unit", "unit_samples", "set_job_state", "append_event"}
)


class JumpingClock(HandClock):
    """A wall clock that somebody sets: `now` jumps, and what sleeps does not notice."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = 0.0

    def now(self) -> float:
        return super().now() + self.offset


class LockableLedger(FakeLedger):
    """A ledger whose file somebody locks: calls fail while `locked`. `lost_answers` commits are done, and then not answered."""

    def __init__(self) -> None:
        super().__init__()
        self.locked = False
        self.lost_answers = 0

    def __getattribute__(self, name: str) -> Any:
        if name in _LOCKED_BY_OTHERS and self.locked:
            return self._refuse
        return super().__getattribute__(name)

    async def commit_unit(self, *args: Any, **kwargs: Any) -> Any:
        counts = await super().commit_unit(*args, **kwargs)
        if self.lost_answers:
            self.lost_answers -= 1
            raise LedgerError("the connection broke after the commit")
        return counts

    async def _refuse(self, *_: Any, **__: Any) -> Any:
        raise LedgerError("database is locked")


class ChaosWorker(FakeWorker):
    """A worker that takes time for each request, and does to it what the schedule says.

    `hits` are the reasons that its faults give for each sample, one an attempt.
    """

    def __init__(self, name: str, tap: TapSeen, chaos: ChaosWorld) -> None:
        super().__init__(name, tap)
        self._chaos = chaos
        if tap.identity is Identity.COUNT:
            self.quiet_period_seconds = 0.05

    async def _on_request(self, samples: Sequence[GenerateSample]) -> None:
        """Each sample may have a fault of its own; what befalls the request befalls all of its samples."""
        chaos = self._chaos
        faults = [chaos.fault_of(sample) for sample in samples]
        await chaos.clock.sleep(chaos.random.uniform(0.02, 0.4))
        if self.name in chaos.unreachable:
            chaos.hit_all(samples)
            raise WorkerUnreachable("connection refused")
        for fault, sample in zip(faults, samples, strict=True):
            try:
                await self._do(fault, sample)
            except InferenceError:
                # What it does to its own sample is noted already.
                chaos.hit_all([other for other in samples if other is not sample])
                raise
        await chaos.clock.sleep(chaos.random.choice((0.0, 0.05)))

    async def _do(self, fault: str | None, sample: GenerateSample) -> None:
        chaos = self._chaos
        timeout = chaos.settings.request_timeout_base_seconds + 10
        whole = lambda: self.put(sample)  # noqa: E731 - a name for what is said often
        match fault:
            case None:
                whole()
            case "error 400" | "error 500" | "error 503":
                raise RequestRefused(int(fault.removeprefix("error ")), "by the schedule")
            case "connection refused":
                raise WorkerUnreachable(fault)
            case "answer lost":
                whole()
                raise WorkerUnreachable("the connection broke")
            case "hang":
                chaos.later(timeout + chaos.random.uniform(-5, 5), whole)
                await chaos.clock.sleep(timeout)
                raise RequestTimedOut("no answer in time")
            case "slow":
                await chaos.clock.sleep(chaos.settings.request_timeout_base_seconds / 2)
                whole()
            case "no dump":
                pass
            case "dump late":
                chaos.later(LATE_SECONDS, whole)
            case "dump too late":
                chaos.later(TOO_LATE_SECONDS, whole)
            case "event lost":
                self.put(sample, noticed=False)
                chaos.later(RESCAN_SECONDS, self.source.rescan)
            case "missing rows":
                if (rows := len(sample.token_ids)) > 1:
                    self.put(sample, *chaos.random.choice([(0, rows - 1), (1, rows)]))
            case "duplicate dump":
                whole()
                whole()
            case _:
                self._publish_other(fault, sample)

    def _publish_other(self, fault: str, sample: GenerateSample) -> None:
        """Something is published that is not what it should be."""
        rows = len(sample.token_ids)
        match fault:
            case "in pieces":
                cut = self._chaos.random.randint(1, rows)
                pieces = [(0, cut), (cut, rows)] if cut < rows else [(0, rows)]
                for piece in self._chaos.random.sample(pieces, len(pieces)):
                    self.put(sample, *piece)
            case "two readings":
                self.put(sample)
                self.put(sample, add=1.0)
            case "NaN":
                self._altered(sample, lambda rows: np.full_like(rows, np.nan))
            case "zeros":
                self._altered(sample, np.zeros_like)
            case "wrong token ids":
                self._altered(sample, token_ids=b"".join(n.to_bytes(4, "little") for n in range(500, 500 + rows)))
            case "wrong rid":
                self._altered(sample, rid=f"{sample.rid}9")
            case "wrong dtype":
                self._altered(sample, tensors=(("aux_hidden_states", "float16", (rows, 2, 4)),))
            case "lost by publisher":
                self.source.lose(sample.rid, "over budget")
            case "prefix cached":
                self.client.cached[sample.rid] = max(1, rows // 2)
                if rows > 1:
                    self.put(sample, rows // 2)
            case _:
                raise AssertionError(f"nobody knows how to do {fault!r}")

    def _altered(self, sample: GenerateSample, values: Callable[[Any], Any] | None = None, **facts: Any) -> FakeDump:
        """Publish the sample's dump with other values, or other facts. What its source computed is not told."""
        dump = self.put(sample, noticed=False)
        dump.facts = replace(dump.facts, **facts)
        if values is not None:
            dump.row_checksums = None
            dump.views = {
                name: memoryview(values(np.frombuffer(view, np.float32)).tobytes()).toreadonly()
                for name, view in dump.views.items()
            }
        self.source._post_dumps([dump])
        return dump


class ChaosWorld(World):
    """A world that a schedule disturbs. Faults in requests are by the number of the request, over all workers."""

    def __init__(self, random: Random, *taps: TapSeen, **settings: Any) -> None:
        super().__init__(**settings)
        self.random = random
        self.clock: JumpingClock = JumpingClock()
        self.ledger: LockableLedger = LockableLedger()
        self.request_faults: dict[int, str] = {}
        self.doomed: dict[int, str] = {}
        self.unreachable: set[str] = set()
        self.hits: dict[int, list[RefusalReason]] = defaultdict(list)
        self.took_effect: list[str] = []
        self.requests = 0
        self.actions: list[tuple[float, Callable[[], Any]]] = []
        for number, tap in enumerate(taps):
            worker = ChaosWorker(f"w{number}", tap, self)
            self.workers[worker.name] = worker
            self.configured.append(worker.record)

    def later(self, seconds: float, action: Callable[[], Any]) -> None:
        """Let something happen after so much virtual time; the service may be dead by then."""
        self.actions.append((self.clock.monotonic() + seconds, action))

    def fault_of(self, sample: GenerateSample) -> str | None:
        name = RequestName.parse(sample.rid)
        if name is None:
            return None  # A fence: what befalls it befalls no sample.
        number, self.requests = self.requests, self.requests + 1
        if (doom := self.doomed.get(name.sample)) is not None:
            self._note(f"{doom}, for ever", sample, DOOMS[doom])
            return doom
        fault = self.request_faults.pop(number, None)
        if fault is not None:
            self._note(fault, sample, (REQUEST_FAULTS | TOKEN_FAULTS)[fault])
        return fault

    def hit_all(self, samples: Sequence[GenerateSample]) -> None:
        """A request fails as a whole."""
        for sample in samples:
            self.hit(sample, R.REQUEST_FAILED)

    def hit(self, sample: GenerateSample, reason: RefusalReason) -> None:
        name = RequestName.parse(sample.rid)
        if name is not None:
            self.hits[name.sample].append(reason)

    def _note(self, fault: str, sample: GenerateSample, reason: RefusalReason | None) -> None:
        self.took_effect.append(fault)
        if reason is not None:
            self.hit(sample, reason)
