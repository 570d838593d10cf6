"""core/unit.py: written, committed or abandoned, and every event that is out of place."""

import pytest
from statetap.core import unit_messages as msg
from statetap.core.machine import IllegalTransition
from statetap.core.spec import Identity
from statetap.core.unit import UnitPhase

from tests.unit.core.dump_facts import plugin_dump
from tests.unit.core.unit_play import OBJECTS, OLD, ROWS, Unit, stray


def test_a_unit_without_samples_is_committed_as_such():
    unit = Unit(samples=0)
    assert list(unit.waiting()) == []
    assert unit.handle(msg.RecallEnded()) == [msg.RecordCommit((), ())]


def test_a_write_that_failed_is_done_again():
    unit = Unit()
    unit.capture()
    again = [msg.WriteUnit(((0, ("d0",)),))]
    assert unit.handle(msg.WriteFailed("store: no space", final=False)) == again
    assert unit.handle(msg.WriteFailed("store: no space", final=False)) == again
    assert unit.held_dumps() == {"d0"}
    assert unit.handle(msg.UnitWritten(OBJECTS)) == [msg.RecordCommit(tuple(unit.verdicts()), OBJECTS)]


def test_a_write_that_will_never_work_gives_the_unit_back():
    unit = Unit()
    unit.capture()
    assert unit.handle(msg.WriteFailed("store: read-only", final=True)) == [msg.GiveBack("store: read-only")]
    assert unit.held_dumps() == {"d0"}
    assert unit.handle(msg.Abandoned("store: read-only", release=True)) == [stray("d0")]
    assert unit.handle(msg.WriteFailed("store: read-only", final=True)) == []


def reach(phase):
    unit = Unit()
    if phase is UnitPhase.COLLECTING:
        unit.whole(unit.ask(), "d0")
        return unit
    unit.capture()
    if phase in (UnitPhase.COMMITTING, UnitPhase.COMMITTED):
        unit.handle(msg.UnitWritten(OBJECTS))
    if phase is UnitPhase.COMMITTED:
        unit.handle(msg.CommitRecorded())
    if phase is UnitPhase.ABANDONED:
        unit.handle(msg.Abandoned("lease lost", release=True))
    assert unit.state is phase
    return unit


@pytest.mark.parametrize("phase", [UnitPhase.COLLECTING, UnitPhase.WRITING, UnitPhase.COMMITTING])
def test_an_abandoned_unit_releases_its_dumps_as_strays(phase):
    unit = reach(phase)
    assert unit.handle(msg.Abandoned("lease lost", release=True)) == [stray("d0")]
    assert unit.held_dumps() == set()
    assert unit.whole("st-j-3-0-1-2", "late") == [stray("late")]


@pytest.mark.parametrize("phase", [UnitPhase.COLLECTING, UnitPhase.WRITING, UnitPhase.COMMITTING])
def test_a_unit_that_is_to_come_back_keeps_its_dumps_and_takes_no_more(phase):
    unit = reach(phase)
    assert unit.handle(msg.Abandoned("the service stops", release=False)) == []
    assert unit.held_dumps() == {"d0"}
    assert unit.whole("st-j-3-0-1-2", "late") == []


def test_after_its_end_a_unit_takes_what_was_still_under_way():
    unit = reach(UnitPhase.ABANDONED)
    for event in EVENTS:
        assert unit.handle(event) in ([], [stray("x")])
    assert unit.state is UnitPhase.ABANDONED


EVENTS = [
    msg.Assigned(0, "gpu0", Identity.TOKENS, None),
    msg.Recalled(OLD, 0, "gpu0", 5),
    msg.RecallEnded(),
    msg.RequestAnswered("st-j-3-0-1-2", ROWS, 0, 5),
    msg.RequestFailed("st-j-3-0-1-2", "late", msg.Fault.ATTEMPT),
    msg.DumpPublished("st-j-3-0-1-2", plugin_dump("x", 0, ROWS)),
    msg.CaptureLost("st-j-3-0-1-2", "late"),
    msg.LifecycleClosed("st-j-3-0-1-2"),
    msg.CaptureOverdue("st-j-3-0-1-2"),
    msg.DumpsDigested("st-j-3-0-1-2", {"x": 1}),
    msg.CaptureInspected("st-j-3-0-1-2", 1, None),
    msg.UnitWritten(OBJECTS),
    msg.WriteFailed("late", final=True),
    msg.CommitRecorded(),
    msg.Abandoned("late", release=False),
]
ILLEGAL = {
    UnitPhase.COLLECTING: (msg.UnitWritten, msg.WriteFailed, msg.CommitRecorded),
    UnitPhase.WRITING: (msg.Assigned, msg.Recalled, msg.CommitRecorded),
    UnitPhase.COMMITTING: (msg.Assigned, msg.Recalled, msg.UnitWritten, msg.WriteFailed),
    UnitPhase.COMMITTED: (msg.Assigned, msg.Recalled, msg.UnitWritten, msg.WriteFailed, msg.CommitRecorded, msg.Abandoned),
}


@pytest.mark.parametrize("phase", ILLEGAL)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_out_of_place_raises_with_the_history(phase, event):
    unit = reach(phase)
    if type(event) not in ILLEGAL[phase]:
        if not (phase is UnitPhase.COLLECTING and isinstance(event, msg.Assigned)):
            unit.handle(event)
        return
    history, held = unit.history, unit.held_dumps()
    with pytest.raises(IllegalTransition, match="unit 3 of job j") as raised:
        unit.handle(event)
    assert (unit.state, unit.held_dumps()) == (phase, held)
    assert (raised.value.event, raised.value.history) == (event, history)
    assert phase is UnitPhase.COLLECTING or f"--> {phase.value}" in str(raised.value)
