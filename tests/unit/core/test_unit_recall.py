"""core/unit.py after a restart: what an earlier lease left in shared memory is used, or given up as a whole."""

from statetap.core import unit_messages as msg
from statetap.core.records import SampleStatus
from statetap.core.requests import RequestName
from statetap.core.unit import UnitPhase

from tests.unit.core.dump_facts import plugin_dump
from tests.unit.core.unit_play import OBJECTS, OLD, OLDER, ROWS, Unit, stored, stray


def recalled(*rids, samples=1, attempts=3):
    unit = Unit(samples=samples, attempts=attempts)
    for rid in rids:
        assert unit.handle(msg.Recalled(rid, RequestName.parse(rid).sample, "gpu0", 42)) == []
    return unit


def test_a_recalled_attempt_that_is_whole_needs_no_request():
    unit = recalled(OLD)
    assert unit.whole(OLD) == [msg.InspectCapture(OLD, ("d",))]
    assert list(unit.waiting()) == []
    assert unit.handle(msg.RecallEnded()) == []
    assert unit.inspect(OLD) == [msg.CaptureAccepted(OLD, 0, "gpu0", recalled=True), msg.WriteUnit(((0, ("d",)),))]
    assert unit.verdicts() == [stored(0, 1, "gpu0", 42, 99)]


def test_what_came_back_in_part_is_given_up_and_asked_for_anew():
    unit = recalled(OLD)
    unit.publish(OLD, plugin_dump("part", 0, 4))
    assert unit.handle(msg.RecallEnded()) == [stray("part")]
    assert list(unit.waiting()) == [0]
    assert unit.publish(OLD, plugin_dump("rest", 4, ROWS)) == [stray("rest")]
    rid = unit.ask()
    assert rid == "st-j-3-0-1-2"
    assert unit.failed_on(0) == ()


def test_a_recalled_attempt_without_dumps_is_forgotten():
    unit = recalled(OLD)
    assert unit.handle(msg.RecallEnded()) == []
    assert unit.whole(OLD, "late") == [stray("late")]
    assert list(unit.waiting()) == [0]


def test_a_dump_of_an_earlier_lease_without_an_answer_on_record_is_a_stray():
    unit = recalled(samples=1)
    assert unit.whole(OLD) == [stray("d")]
    assert unit.handle(msg.RecallEnded()) == []
    assert list(unit.waiting()) == [0]


def test_of_two_recalled_attempts_of_a_sample_one_is_taken():
    unit = recalled(OLDER, OLD, samples=2)
    assert unit.whole(OLD, "new") == [msg.InspectCapture(OLD, ("new",))]
    assert unit.whole(OLDER, "old") == [stray("old")]
    assert unit.handle(msg.RecallEnded()) == []
    assert unit.inspect(OLD) == [msg.CaptureAccepted(OLD, 0, "gpu0", recalled=True)]
    assert unit.held_dumps() == {"new"}


def test_a_recalled_attempt_that_is_refused_costs_no_attempt():
    unit = recalled(OLD, attempts=1)
    unit.whole(OLD)
    unit.handle(msg.RecallEnded())
    assert unit.inspect(OLD, refusal="NaN") == [stray("d")]
    assert list(unit.waiting()) == [0]
    unit.capture(0)
    assert unit.verdicts()[0].status is SampleStatus.STORED


def test_a_loss_that_an_earlier_attempt_reported_stands():
    unit = recalled(OLD)
    unit.publish(OLD, plugin_dump("part", 0, 4))
    assert unit.handle(msg.CaptureLost(OLD, "over budget")) == [stray("part")]
    assert unit.handle(msg.RecallEnded()) == []
    assert list(unit.waiting()) == [0]


def test_the_recall_may_end_after_the_last_sample_is_settled():
    unit = recalled(OLD, OLDER)
    unit.publish(OLDER, plugin_dump("part", 0, 4))
    unit.whole(OLD)
    unit.inspect(OLD)
    assert unit.handle(msg.RecallEnded()) == []
    assert unit.state is UnitPhase.WRITING
    unit.handle(msg.UnitWritten(OBJECTS))
    unit.handle(msg.CommitRecorded())
    assert unit.held_dumps() == set()
