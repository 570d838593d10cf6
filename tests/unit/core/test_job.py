"""core/job.py: every pair of state and event, as the module's header draws them."""

import pytest
from statetap.core.job import CancelAsked, JobMachine, PauseAsked, PlanFailed, Planned, ResumeAsked, RetryAsked, UnitsSettled
from statetap.core.machine import IllegalTransition
from statetap.core.records import JobState

EVENTS = [Planned(), PlanFailed("no worker"), PauseAsked(), ResumeAsked(), CancelAsked(), RetryAsked(), UnitsSettled()]
ALLOWED = {
    ("planning", Planned): "running",
    ("planning", PlanFailed): "failed",
    ("planning", CancelAsked): "cancelling",
    ("running", PauseAsked): "paused",
    ("running", ResumeAsked): "running",
    ("running", CancelAsked): "cancelling",
    ("running", UnitsSettled): "completed",
    ("paused", PauseAsked): "paused",
    ("paused", ResumeAsked): "running",
    ("paused", CancelAsked): "cancelling",
    ("paused", UnitsSettled): "completed",
    ("cancelling", CancelAsked): "cancelling",
    ("cancelling", Planned): "cancelling",
    ("cancelling", PlanFailed): "cancelling",
    ("cancelling", UnitsSettled): "cancelled",
    ("completed", RetryAsked): "planning",
    ("cancelled", CancelAsked): "cancelled",
}


@pytest.mark.parametrize("state", JobState)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_every_state_takes_its_own_events_and_no_other(state, event):
    job = JobMachine("j1", state)
    following = ALLOWED.get((state.value, type(event)))
    if following is not None:
        assert job.handle(event) == job.state == following
        return
    with pytest.raises(IllegalTransition, match="job j1") as raised:
        job.handle(event)
    assert (job.state, raised.value.state, raised.value.event) == (state, state, event)


def test_an_illegal_step_tells_the_story():
    job = JobMachine("j1", JobState.PLANNING)
    for event in (Planned(), PauseAsked(), ResumeAsked(), UnitsSettled()):
        job.handle(event)
    with pytest.raises(IllegalTransition) as raised:
        job.handle(PauseAsked())
    assert raised.value.history == [
        ("planning", "Planned", "running"),
        ("running", "PauseAsked", "paused"),
        ("paused", "ResumeAsked", "running"),
        ("running", "UnitsSettled", "completed"),
    ]
    assert "running --UnitsSettled--> completed" in str(raised.value)


def test_retried_samples_run_to_their_end():
    job = JobMachine("j1", JobState.COMPLETED)
    assert [job.handle(event) for event in (RetryAsked(), Planned(), UnitsSettled())] == ["planning", "running", "completed"]
