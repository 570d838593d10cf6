"""The worker machine: may this worker be asked for something, and what is it waiting for?

Invariant 1: at most one request in flight per worker. The table makes a second `Sent` illegal.

    starting ──Identified──▶ ready ⇄ busy             (Sent / Answered)
    any ──Lost──▶ unreachable ──Identified──▶ ready    (a new boot is identified anew)
    any ──Misfit──▶ refused                            (its beacon does not fit its configuration)
    ready ──Doubted──▶ suspect ──Cleared──▶ ready      (a request timed out: quiesce before it is used again)
    ready, busy … ──Drained──▶ draining                (no further request; what is in flight ends)
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


@dataclass(frozen=True, slots=True)
class Identified:
    """Its server answers and a live tap (or its configuration) says what it captures."""

    tap: str


@dataclass(frozen=True, slots=True)
class Sent:
    rid: str


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


WorkerEvent = Identified | Sent | Answered | Doubted | Cleared | Lost | Misfit | Drained

_S = WorkerState


class WorkerMachine(Machine[WorkerState]):
    """One worker, as far as requests are concerned. `in_flight` is the rid that runs there, if any."""

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
        },
        _S.BUSY: {
            Answered: frozenset({_S.READY, _S.DRAINING}),
            Doubted: frozenset({_S.SUSPECT, _S.DRAINING}),
            Lost: frozenset({_S.UNREACHABLE, _S.DRAINING}),
            Drained: frozenset({_S.BUSY}),
        },
        _S.SUSPECT: {
            Cleared: frozenset({_S.READY}),
            Lost: frozenset({_S.UNREACHABLE}),
            Misfit: frozenset({_S.REFUSED}),
            Drained: frozenset({_S.DRAINING}),
        },
        _S.UNREACHABLE: {
            Identified: frozenset({_S.READY}),
            Lost: frozenset({_S.UNREACHABLE}),
            Misfit: frozenset({_S.REFUSED}),
            Drained: frozenset({_S.DRAINING}),
        },
        _S.REFUSED: {
            Identified: frozenset({_S.READY}),
            Lost: frozenset({_S.UNREACHABLE}),
            Misfit: frozenset({_S.REFUSED}),
            Drained: frozenset({_S.DRAINING}),
        },
        _S.DRAINING: {
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

    def handle(self, event: WorkerEvent) -> None:
        """Apply one event.

        Raises:
            IllegalTransition: a second request while one is in flight, an answer nobody waits for, and the like.
        """
        self.require(event)
        match event:
            case Identified():
                self._go(event, _S.DRAINING if self.draining else _S.READY, None)
            case Sent(rid):
                self._go(event, _S.BUSY, None)
                self.in_flight = rid
            case Answered(rid) | Doubted(rid) if rid != self.in_flight:
                raise IllegalTransition(f"{self.name} ({self.in_flight} in flight)", self.state, event, self.history)
            case Answered():
                self.in_flight = None
                self._go(event, _S.DRAINING if self.draining else _S.READY, None)
            case Doubted(_, reason):
                self.in_flight = None
                self._go(event, _S.DRAINING if self.draining else _S.SUSPECT, reason)
            case Cleared():
                self._go(event, _S.READY, None)
            case Lost(reason):
                self.in_flight = None
                self._go(event, _S.DRAINING if self.draining else _S.UNREACHABLE, reason)
            case Misfit(reason):
                self._go(event, _S.DRAINING if self.draining else _S.REFUSED, reason)
            case Drained():
                self.draining = True
                self._go(event, _S.BUSY if self.state is _S.BUSY else _S.DRAINING, self.reason)

    def _go(self, event: WorkerEvent, state: WorkerState, reason: str | None) -> None:
        self.move(event, state)
        self.reason = reason
