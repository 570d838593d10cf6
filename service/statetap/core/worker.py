"""The worker machine: may this worker be asked for something, and what is it waiting for?

Invariant 1: at most one request in flight per worker. The table makes a second `Sent` illegal.

    starting ──Identified──▶ ready ⇄ busy             (Sent / Answered)
    any ──Lost──▶ unreachable ──Identified──▶ ready    (a new boot is identified anew)
    any ──Misfit──▶ refused                            (its beacon does not fit its configuration)
    ready ──Doubted──▶ suspect ──Cleared──▶ ready      (a request timed out: quiesce before it is used again)
    ready, busy … ──Drained──▶ draining                (no further request; what is in flight ends)

Barred (its captures fail, and it is to blame):

    ready ──Quarantined──▶ quarantined ──Readmitted──▶ ready, on probation: one attempt, Sent as a probe
    on probation ──Answered──▶ quarantined ──Proven──▶ ready, or ──Quarantined──▶ quarantined once more
    any of these ──Condemned──▶ dead

A bar outlasts whatever else befalls the worker: where it would be ready again, it is quarantined or dead, until it is Proven or
Identified by another tap: then another boot serves, which is not to blame.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from statetap.core.machine import IllegalTransition, Machine


class WorkerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    BUSY = "busy"
    SUSPECT = "suspect"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class Identified:
    """Its server answers and a live tap (or its configuration) says what it captures."""

    tap: str


@dataclass(frozen=True, slots=True)
class Sent:
    """`probe`: it is the one attempt of a worker on probation."""

    rid: str
    probe: bool = False


@dataclass(frozen=True, slots=True)
class Answered:
    """The request ended at the worker: with an answer or with an error that leaves the worker usable."""

    rid: str


@dataclass(frozen=True, slots=True)
class Doubted:
    """A request timed out: it may still be running there."""

    rid: str
    reason: str


@dataclass(frozen=True, slots=True)
class Cleared:
    """Nothing of the doubted request runs any more."""


@dataclass(frozen=True, slots=True)
class Lost:
    reason: str


@dataclass(frozen=True, slots=True)
class Misfit:
    reason: str


@dataclass(frozen=True, slots=True)
class Drained:
    """Somebody asked for it to be used no further."""


@dataclass(frozen=True, slots=True)
class Quarantined:
    """Its captures fail, for a reason that is its own."""

    reason: str


@dataclass(frozen=True, slots=True)
class Readmitted:
    """It has been left alone for long enough: it may show by one attempt that it is well."""


@dataclass(frozen=True, slots=True)
class Proven:
    """The attempt of its probation brought a capture."""


@dataclass(frozen=True, slots=True)
class Condemned:
    """It was quarantined again and again for nothing."""

    reason: str


WorkerEvent = (
    Identified | Sent | Answered | Doubted | Cleared | Lost | Misfit | Drained | Quarantined | Readmitted | Proven | Condemned
)

_S = WorkerState


def _changes_only_its_bar(state: WorkerState) -> dict[type, frozenset[WorkerState]]:
    """What is learned of a worker's captures while it is in a state in which it is not asked anyhow changes only its bar."""
    return dict.fromkeys((Quarantined, Condemned, Proven), frozenset({state}))


class WorkerMachine(Machine[WorkerState]):
    """One worker, as far as requests are concerned. `in_flight` is the rid that runs there, if any.

    `barred` is where it goes instead of being ready if its captures fail; `on_probation` it is ready all the same, for one probe.
    """

    table = {
        _S.STARTING: {
            Identified: frozenset({_S.READY}),
            Lost: frozenset({_S.UNREACHABLE}),
            Misfit: frozenset({_S.REFUSED}),
            Drained: frozenset({_S.DRAINING}),
        },
        _S.READY: {
            Identified: frozenset({_S.READY}),
            Sent: frozenset({_S.BUSY}),
            Lost: frozenset({_S.UNREACHABLE}),
            Misfit: frozenset({_S.REFUSED}),
            Drained: frozenset({_S.DRAINING}),
            Quarantined: frozenset({_S.QUARANTINED}),
            Condemned: frozenset({_S.DEAD}),
        },
        _S.BUSY: {
            **_changes_only_its_bar(_S.BUSY),
            Answered: frozenset({_S.READY, _S.DRAINING, _S.QUARANTINED, _S.DEAD}),
            Doubted: frozenset({_S.SUSPECT, _S.DRAINING}),
            Lost: frozenset({_S.UNREACHABLE, _S.DRAINING}),
            Drained: frozenset({_S.BUSY}),
        },
        _S.SUSPECT: {
            **_changes_only_its_bar(_S.SUSPECT),
            Cleared: frozenset({_S.READY, _S.QUARANTINED, _S.DEAD}),
            Lost: frozenset({_S.UNREACHABLE}),
            Misfit: frozenset({_S.REFUSED}),
            Drained: frozenset({_S.DRAINING}),
        },
        _S.UNREACHABLE: {
            **_changes_only_its_bar(_S.UNREACHABLE),
            Identified: frozenset({_S.READY, _S.QUARANTINED, _S.DEAD}),
            Lost: frozenset({_S.UNREACHABLE}),
            Misfit: frozenset({_S.REFUSED}),
            Drained: frozenset({_S.DRAINING}),
        },
        _S.REFUSED: {
            **_changes_only_its_bar(_S.REFUSED),
            Identified: frozenset({_S.READY, _S.QUARANTINED, _S.DEAD}),
            Lost: frozenset({_S.UNREACHABLE}),
            Misfit: frozenset({_S.REFUSED}),
            Drained: frozenset({_S.DRAINING}),
        },
        _S.QUARANTINED: {
            Identified: frozenset({_S.READY, _S.QUARANTINED}),
            Readmitted: frozenset({_S.READY}),
            Proven: frozenset({_S.READY}),
            Quarantined: frozenset({_S.QUARANTINED}),
            Condemned: frozenset({_S.DEAD}),
            Lost: frozenset({_S.UNREACHABLE}),
            Misfit: frozenset({_S.REFUSED}),
            Drained: frozenset({_S.DRAINING}),
        },
        _S.DEAD: {
            Identified: frozenset({_S.READY, _S.DEAD}),
            Lost: frozenset({_S.DEAD}),
            Misfit: frozenset({_S.DEAD}),
            Drained: frozenset({_S.DRAINING}),
        },
        _S.DRAINING: {
            **_changes_only_its_bar(_S.DRAINING),
            Lost: frozenset({_S.DRAINING}),
            Misfit: frozenset({_S.DRAINING}),
            Drained: frozenset({_S.DRAINING}),
            Identified: frozenset({_S.DRAINING}),
        },
    }

    def __init__(self, name: str) -> None:
        super().__init__(f"worker {name}", WorkerState.STARTING)
        self.in_flight: str | None = None
        self.reason: str | None = None
        self.draining = False
        self.tap: str | None = None
        self.barred: WorkerState | None = None
        self.barred_because: str | None = None
        self.on_probation = False

    @property
    def is_held(self) -> bool:
        """Whether it is to be asked for nothing because its captures fail."""
        return self.barred is not None and not self.on_probation

    @property
    def standing(self) -> WorkerState:
        """What to say of it: of one that is barred, that, even while a request runs there."""
        return self.barred if self.barred is not None and self.state is _S.BUSY else self.state

    def handle(self, event: WorkerEvent) -> None:
        """Apply one event.

        Raises:
            IllegalTransition: a second request while one is in flight, an answer nobody waits for, and the like.
        """
        self.require(event)
        match event:
            case Identified(tap):
                if tap != self.tap:
                    self._lift()
                self.tap = tap
                self._go(event, self._idle, None)
            case Sent(rid, probe):
                self._go(event, _S.BUSY, None)
                self.in_flight = rid
                self.on_probation = self.on_probation and not probe
            case Answered(rid) | Doubted(rid) if rid != self.in_flight:
                raise IllegalTransition(f"{self.name} ({self.in_flight} in flight)", self.state, event, self.history)
            case Answered():
                self.in_flight = None
                self._go(event, self._idle, None)
            case Doubted(_, reason):
                self.in_flight = None
                self._go(event, _S.DRAINING if self.draining else _S.SUSPECT, reason)
            case Cleared():
                self._go(event, self._idle, None)
            case Lost(reason):
                self.in_flight = None
                self._go(event, self._away(_S.UNREACHABLE), reason)
            case Misfit(reason):
                self._go(event, self._away(_S.REFUSED), reason)
            case Drained():
                self.draining = True
                self._go(event, _S.BUSY if self.state is _S.BUSY else _S.DRAINING, self.reason)
            case Quarantined() | Readmitted() | Proven() | Condemned():
                self._judged(event)

    def _judged(self, event: Quarantined | Readmitted | Proven | Condemned) -> None:
        """Something was learned of its captures."""
        match event:
            case Quarantined(reason):
                self._bar(event, _S.QUARANTINED, reason)
            case Condemned(reason):
                self._bar(event, _S.DEAD, reason)
            case Readmitted():
                self.on_probation = True
                self._go(event, _S.READY, None)
            case Proven():
                self._lift()
                if self.state is _S.QUARANTINED:
                    self._go(event, _S.READY, None)
                else:
                    self._go(event, self.state, None if self.state is _S.BUSY else self.reason)

    @property
    def _idle(self) -> WorkerState:
        """Where it goes once nothing runs there."""
        if self.draining:
            return _S.DRAINING
        return self.barred if self.barred is not None and not self.on_probation else _S.READY

    def _away(self, state: WorkerState) -> WorkerState:
        """Where it goes when it cannot be asked: one that is dead stays so, with its reason."""
        return _S.DRAINING if self.draining else _S.DEAD if self.state is _S.DEAD else state

    def _bar(self, event: WorkerEvent, bar: WorkerState, reason: str) -> None:
        self.barred, self.barred_because, self.on_probation = bar, reason, False
        self._go(event, bar if self.state in (_S.READY, _S.QUARANTINED) else self.state, self.reason)

    def _lift(self) -> None:
        self.barred, self.barred_because, self.on_probation = None, None, False

    def _go(self, event: WorkerEvent, state: WorkerState, reason: str | None) -> None:
        self.move(event, state)
        if self.barred is not None and state in (self.barred, _S.BUSY, _S.READY):
            reason = f"on probation: {self.barred_because}" if self.on_probation else self.barred_because
        self.reason = reason
