"""core/worker.py: invariant 1, at most one request in flight per worker, whatever happens to the worker."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from statetap.core.machine import IllegalTransition
from statetap.core.worker import (
    Answered,
    Cleared,
    Doubted,
    Drained,
    Identified,
    Lost,
    Misfit,
    Sent,
    WorkerMachine,
    WorkerState,
)


def machine(*events):
    worker = WorkerMachine("gpu0")
    for event in events:
        worker.handle(event)
    return worker


UP = Identified("tap-1")


def test_a_request_comes_and_goes():
    worker = machine(UP, Sent("r1"))
    assert (worker.state, worker.in_flight) == (WorkerState.BUSY, "r1")
    worker.handle(Answered("r1"))
    assert (worker.state, worker.in_flight) == (WorkerState.READY, None)


def test_a_second_request_in_flight_is_illegal():
    worker = machine(UP, Sent("r1"))
    with pytest.raises(IllegalTransition, match=r"Sent\(rid='r2'\) is not allowed in state"):
        worker.handle(Sent("r2"))
    assert worker.in_flight == "r1"


@pytest.mark.parametrize("event", [Answered("r2"), Doubted("r2", "timed out")])
def test_what_is_said_of_another_request_is_refused(event):
    worker = machine(UP, Sent("r1"))
    with pytest.raises(IllegalTransition, match="r1 in flight"):
        worker.handle(event)
    assert (worker.state, worker.in_flight) == (WorkerState.BUSY, "r1")


def test_a_doubted_worker_gets_no_request_until_it_is_cleared():
    worker = machine(UP, Sent("r1"), Doubted("r1", "no answer in 60 s"))
    assert (worker.state, worker.in_flight, worker.reason) == (WorkerState.SUSPECT, None, "no answer in 60 s")
    with pytest.raises(IllegalTransition):
        worker.handle(Sent("r2"))
    worker.handle(Cleared())
    worker.handle(Sent("r2"))
    assert worker.in_flight == "r2"


def test_a_lost_worker_forgets_its_request_and_is_identified_anew():
    worker = machine(UP, Sent("r1"), Lost("connection reset"))
    assert (worker.state, worker.in_flight, worker.reason) == (WorkerState.UNREACHABLE, None, "connection reset")
    worker.handle(Identified("tap-2"))
    assert (worker.state, worker.reason) == (WorkerState.READY, None)


def test_a_worker_that_does_not_fit_may_come_back_fitting():
    worker = machine(UP, Misfit("captures layers [1, 2]"))
    assert (worker.state, worker.reason) == (WorkerState.REFUSED, "captures layers [1, 2]")
    worker.handle(Identified("tap-2"))
    assert worker.state is WorkerState.READY


@pytest.mark.parametrize("end", [Answered("r1"), Doubted("r1", "timed out"), Lost("gone")])
def test_draining_lets_what_is_in_flight_end_and_sends_nothing_more(end):
    worker = machine(UP, Sent("r1"), Drained())
    assert (worker.state, worker.in_flight) == (WorkerState.BUSY, "r1")
    worker.handle(end)
    assert (worker.state, worker.in_flight) == (WorkerState.DRAINING, None)
    worker.handle(Identified("tap-2"))
    with pytest.raises(IllegalTransition):
        worker.handle(Sent("r2"))


rids = st.sampled_from(["r1", "r2", "r3"])
reasons = st.just("because")
events = st.one_of(
    st.builds(Identified, st.just("tap")),
    st.builds(Sent, rids),
    st.builds(Answered, rids),
    st.builds(Doubted, rids, reasons),
    st.just(Cleared()),
    st.builds(Lost, reasons),
    st.builds(Misfit, reasons),
    st.just(Drained()),
)


@given(st.lists(events, max_size=40))
def test_any_story_keeps_one_request_in_flight(story):
    """A model of the server beside the machine: requests that the machine took and that have not ended."""
    worker, running, drained = WorkerMachine("gpu0"), set(), False
    for event in story:
        before = (worker.state, worker.in_flight, worker.draining)
        try:
            worker.handle(event)
        except IllegalTransition:
            assert (worker.state, worker.in_flight, worker.draining) == before
            continue
        match event:
            case Sent(rid):
                assert not drained
                running.add(rid)
            case Answered(rid) | Doubted(rid):
                running.remove(rid)
            case Lost():
                running.clear()
            case Drained():
                drained = True
        assert len(running) <= 1
        assert worker.in_flight == (next(iter(running)) if running else None)
        assert (worker.state is WorkerState.BUSY) == bool(running)
        assert drained == (worker.state is WorkerState.DRAINING or (worker.draining and bool(running)))
