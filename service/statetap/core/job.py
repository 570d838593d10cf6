"""The job machine: what may be done with a job, and when it is over.

planning ──Planned──▶ running ⇄ paused
running, paused ──UnitsSettled──▶ completed        (every unit committed; some samples may have failed)
planning, running, paused ──CancelAsked──▶ cancelling ──UnitsSettled──▶ cancelled
completed ──RetryAsked──▶ planning                 (failed samples again, in new units at the end)
planning ──PlanFailed──▶ failed
"""

from __future__ import annotations

from dataclasses import dataclass

from statetap.core.machine import Machine
from statetap.core.records import JobState


@dataclass(frozen=True, slots=True)
class Planned:
    """Its units are recorded and its rows are there in the store."""


@dataclass(frozen=True, slots=True)
class PlanFailed:
    reason: str


@dataclass(frozen=True, slots=True)
class PauseAsked:
    pass


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    pass


@dataclass(frozen=True, slots=True)
class CancelAsked:
    pass


@dataclass(frozen=True, slots=True)
class RetryAsked:
    pass


@dataclass(frozen=True, slots=True)
class UnitsSettled:
    """No unit is pending or leased any more, and the store's projection says so."""


JobEvent = Planned | PlanFailed | PauseAsked | ResumeAsked | CancelAsked | RetryAsked | UnitsSettled

_S = JobState


class JobMachine(Machine[JobState]):
    """One job. `handle` returns the next state; asking for what is already so changes nothing."""

    table = {
        _S.PLANNING: {
            Planned: frozenset({_S.RUNNING}),
            PlanFailed: frozenset({_S.FAILED}),
            CancelAsked: frozenset({_S.CANCELLING}),
        },
        _S.RUNNING: {
            PauseAsked: frozenset({_S.PAUSED}),
            ResumeAsked: frozenset({_S.RUNNING}),
            CancelAsked: frozenset({_S.CANCELLING}),
            UnitsSettled: frozenset({_S.COMPLETED}),
        },
        _S.PAUSED: {
            PauseAsked: frozenset({_S.PAUSED}),
            ResumeAsked: frozenset({_S.RUNNING}),
            CancelAsked: frozenset({_S.CANCELLING}),
            UnitsSettled: frozenset({_S.COMPLETED}),
        },
        _S.CANCELLING: {
            CancelAsked: frozenset({_S.CANCELLING}),
            Planned: frozenset({_S.CANCELLING}),
            PlanFailed: frozenset({_S.CANCELLING}),
            UnitsSettled: frozenset({_S.CANCELLED}),
        },
        _S.COMPLETED: {RetryAsked: frozenset({_S.PLANNING})},
        _S.CANCELLED: {CancelAsked: frozenset({_S.CANCELLED})},
        _S.FAILED: {},
    }

    def __init__(self, job: str, state: JobState) -> None:
        super().__init__(f"job {job}", state)

    def handle(self, event: JobEvent) -> JobState:
        """Apply one event.

        Raises:
            IllegalTransition: the job's state does not allow it.
        """
        self.require(event)
        (state,) = self.table[self.state][type(event)]
        self.move(event, state)
        return state
