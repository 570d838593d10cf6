"""core/worker.py: invariant 1, at most one request in flight per worker, whatever happens to the worker."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from statetap.core.machine import IllegalTransition
from statetap.core.worker import (
    Answered,
    Cleared,
    Condemned,
    Doubted,
    Drained,
    Identified,
    Lost,
    Misfit,
    Proven,
    Quarantined,
    Readmitted,
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
    with pytest.raises(IllegalTransition, match=r"Sent\(rid='r2', probe=False\) is not allowed in state"):
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


BAD = Quarantined("its captures fail")


def test_a_quarantined_worker_is_asked_for_nothing_until_it_is_readmitted():
    worker = machine(UP, BAD)
    assert (worker.state, worker.reason) == (WorkerState.QUARANTINED, "its captures fail")
    with pytest.raises(IllegalTransition):
        worker.handle(Sent("r1"))
    worker.handle(Readmitted())
    assert (worker.state, worker.reason) == (WorkerState.READY, "on probation: its captures fail")


def test_probation_is_one_probe_and_what_comes_before_it():
    worker = machine(UP, BAD, Readmitted(), Sent("fence"), Answered("fence"))
    assert (worker.state, worker.on_probation) == (WorkerState.READY, True)
    worker.handle(Sent("r1", probe=True))
    assert worker.standing is WorkerState.QUARANTINED
    worker.handle(Answered("r1"))
    assert (worker.state, worker.on_probation) == (WorkerState.QUARANTINED, False)
    worker.handle(Proven())
    assert (worker.state, worker.reason, worker.barred) == (WorkerState.READY, None, None)


@pytest.mark.parametrize(
    ("away", "back"),
    [
        ([Lost("gone")], UP),
        ([Misfit("no tap")], UP),
        ([Readmitted(), Sent("r1", probe=True), Doubted("r1", "timed out")], Cleared()),
        ([Readmitted(), Sent("r1", probe=True), Lost("gone")], UP),
    ],
)
@pytest.mark.parametrize(("bar", "state"), [(BAD, WorkerState.QUARANTINED), (Condemned("again"), WorkerState.DEAD)])
def test_a_bar_outlasts_what_else_befalls_a_worker(away, back, bar, state):
    worker = machine(UP, BAD, *away, bar)
    worker.handle(back)
    assert (worker.state, worker.reason) == (state, bar.reason)


@pytest.mark.parametrize("bar", [BAD, Condemned("again and again")])
def test_another_boot_is_not_to_blame(bar):
    worker = machine(UP, bar, Lost("it was started again"))
    worker.handle(UP)
    assert worker.state is worker.barred
    worker.handle(Identified("tap-2"))
    assert (worker.state, worker.reason, worker.barred) == (WorkerState.READY, None, None)


def test_a_dead_worker_stays_dead_with_its_reason_whether_it_answers_or_not():
    worker = machine(UP, BAD, Condemned("again and again"), Lost("gone"), Misfit("no tap"))
    assert (worker.state, worker.reason) == (WorkerState.DEAD, "again and again")
    with pytest.raises(IllegalTransition):
        worker.handle(Readmitted())


def test_a_worker_that_is_judged_while_it_is_busy_is_barred_once_it_has_answered():
    worker = machine(UP, Sent("r1"), BAD)
    assert (worker.state, worker.standing, worker.in_flight) == (WorkerState.BUSY, WorkerState.QUARANTINED, "r1")
    worker.handle(Answered("r1"))
    assert worker.state is WorkerState.QUARANTINED


rids = st.sampled_from(["r1", "r2", "r3"])
reasons = st.just("because")
events = st.one_of(
    st.builds(Identified, st.sampled_from(["tap", "tap-2"])),
    st.builds(Sent, rids, st.booleans()),
    st.builds(Answered, rids),
    st.builds(Doubted, rids, reasons),
    st.just(Cleared()),
    st.builds(Lost, reasons),
    st.builds(Misfit, reasons),
    st.just(Drained()),
    st.builds(Quarantined, reasons),
    st.builds(Condemned, reasons),
    st.just(Readmitted()),
    st.just(Proven()),
)


@given(st.lists(events, max_size=40))
def test_any_story_keeps_one_request_in_flight(story):
    """A model of the server beside the machine: requests that the machine took and that have not ended."""
    worker, running, drained = WorkerMachine("gpu0"), set(), False
    for event in story:
        before_probation = worker.on_probation
        before = (worker.state, worker.in_flight, worker.draining)
        try:
            worker.handle(event)
        except IllegalTransition:
            assert (worker.state, worker.in_flight, worker.draining) == before
            continue
        match event:
            case Sent(rid):
                assert not drained
                assert worker.barred is None or before_probation
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
