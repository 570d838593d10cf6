"""What uses up the budget of a sample, what does not, and what is given back."""

from statetap.core import unit_messages as msg
from statetap.core.unit import UnitPhase

from tests.unit.core.unit_play import OBJECTS, Unit, failed


def fail(unit, rid, reason="broken"):
    """Let an attempt fail; whether its sample failed with it."""
    (failure, *_) = unit.handle(msg.RequestFailed(rid, reason, msg.Fault.ATTEMPT))
    return failure.final


def test_what_is_nobodys_fault_uses_up_nothing_and_has_a_new_rid_all_the_same():
    unit = Unit(attempts=1)
    for attempt in range(1, 6):
        rid = unit.ask()
        assert rid == f"st-j-3-0-{attempt}-2"
        lost = unit.handle(msg.CaptureLost(rid, "no space", msg.Fault.NOBODY))
        assert lost == [failed(rid, "lost_by_publisher: no space", fault=msg.Fault.NOBODY)]
    assert unit.losses(0) == 5
    assert fail(unit, unit.ask())


def test_what_fails_on_probation_uses_up_nothing():
    unit = Unit(attempts=1)
    assert not fail(unit, unit.ask(probation=True))
    assert unit.failed_on(0) == ("gpu0",), "another worker is to be preferred"
    assert fail(unit, unit.ask())


def test_forgiven_failures_can_be_used_up_again():
    unit = Unit(attempts=2)
    assert not fail(unit, unit.ask())
    unit.handle(msg.FailuresForgiven(0, 1))
    assert unit.ask() == "st-j-3-0-2-2"
    assert not fail(unit, "st-j-3-0-2-2")
    assert fail(unit, unit.ask())


def test_forgiveness_that_comes_late_changes_nothing():
    unit = Unit(samples=2, attempts=1)
    unit.capture(1)
    assert fail(unit, unit.ask())
    assert unit.state is UnitPhase.WRITING
    for event in (msg.UnitWritten(OBJECTS), msg.CommitRecorded()):
        assert unit.handle(msg.FailuresForgiven(0, 1)) == []
        unit.handle(event)
    assert unit.handle(msg.FailuresForgiven(0, 1)) == []
    assert unit.reason(0) == "broken"


def test_samples_that_were_lost_less_often_go_first():
    unit = Unit(samples=3)
    fail(unit, unit.ask(0))
    assert list(unit.waiting()) == [1, 2, 0]
    fail(unit, unit.ask(1))
    assert list(unit.waiting()) == [2, 0, 1]
    fail(unit, unit.ask(0))
    assert list(unit.waiting()) == [2, 1, 0]
