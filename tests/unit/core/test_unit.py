"""core/unit.py: from requests to captures. Each test plays the shell: events in, commands out, nothing else."""

import pytest
from statetap.core import unit_messages as msg
from statetap.core.capture import Refusal, RefusalReason
from statetap.core.requests import RequestName
from statetap.core.unit import UnitPhase

from tests.unit.core.dump_facts import plugin_dump
from tests.unit.core.unit_play import OBJECTS, ROWS, Unit, failed, lost, stored, stray

# --- the straight way ---------------------------------------------------------------------------------------------------


def test_from_a_lease_to_a_commit():
    unit = Unit(samples=2)
    first, second = unit.ask(0), unit.ask(1)
    assert first == "st-j-3-0-1-2"
    assert list(unit.waiting()) == []
    assert unit.answer(first) == []
    assert unit.whole(first, "a") == [msg.InspectCapture(first, ("a",))]
    assert unit.inspect(first) == [msg.CaptureAccepted(first, 0, "gpu0", recalled=False)]
    assert unit.publish(second, plugin_dump("c", 8, 11)) == []
    assert unit.publish(second, plugin_dump("b", 0, 8)) == []
    assert unit.answer(second, next_token=6) == [msg.InspectCapture(second, ("b", "c"))]
    assert unit.inspect(second, digest=7) == [
        msg.CaptureAccepted(second, 1, "gpu0", recalled=False),
        msg.WriteUnit(((0, ("a",)), (1, ("b", "c")))),
    ]
    assert unit.state is UnitPhase.WRITING
    verdicts = (
        stored(0, 1, "gpu0", 5, 99),
        stored(1, 1, "gpu0", 6, 7),
    )
    assert unit.handle(msg.UnitWritten(OBJECTS)) == [msg.RecordCommit(verdicts, OBJECTS)]
    assert unit.held_dumps() == {"a", "b", "c"}
    released = unit.handle(msg.CommitRecorded())
    assert released == [msg.ReleaseDumps(("a", "c", "b"), stray=False)]
    assert (unit.state, unit.held_dumps()) == (UnitPhase.COMMITTED, set())


def test_rows_without_an_answer_are_no_capture():
    unit = Unit()
    rid = unit.ask()
    assert unit.whole(rid) == []
    assert unit.handle(msg.CaptureOverdue(rid)) == []
    assert unit.answer(rid) == [msg.InspectCapture(rid, ("d",))]


def test_decode_passes_are_released_at_once_and_spare_dumps_when_the_capture_is_accepted():
    unit = Unit(samples=2)
    rid = unit.ask()
    assert unit.publish(rid, plugin_dump("decode", ROWS, ROWS + 1)) == [stray("decode")]
    unit.publish(rid, plugin_dump("twin", 0, ROWS))
    unit.whole(rid, "d")
    assert unit.answer(rid) == [msg.DigestDumps(rid, ("twin", "d"))]
    assert unit.handle(msg.DumpsDigested(rid, {"twin": 1, "d": 1})) == [msg.InspectCapture(rid, ("twin",))]
    assert unit.whole(rid, "late") == [stray("late")]
    assert unit.inspect(rid) == [msg.CaptureAccepted(rid, 0, "gpu0", recalled=False), stray("d")]
    assert unit.whole(rid, "later") == [stray("later")]
    assert unit.held_dumps() == {"twin"}


def test_an_answer_may_name_more_dumps_than_are_needed_and_dumps_may_come_before_it_or_after():
    unit = Unit()
    rid = unit.ask()
    unit.publish(rid, plugin_dump("a", 0, 4))
    assert unit.answer(rid, named=frozenset({"tap/a", "tap/b", "tap/lost"})) == []
    assert unit.publish(rid, plugin_dump("b", 4, ROWS)) == [msg.InspectCapture(rid, ("a", "b"))]


def test_digests_are_asked_for_once():
    unit = Unit()
    rid = unit.ask()
    unit.answer(rid)
    unit.publish(rid, plugin_dump("a", 0, 6))
    assert unit.publish(rid, plugin_dump("b", 0, 6)) == [msg.DigestDumps(rid, ("a", "b"))]
    assert unit.publish(rid, plugin_dump("c", 6, ROWS)) == []
    assert unit.handle(msg.DumpsDigested(rid, {"a": 1, "b": 1})) == [msg.InspectCapture(rid, ("a", "c"))]


def test_a_dump_that_is_reported_again_stays():
    """Before its capture is chosen, while it is inspected, written and committed."""
    unit = Unit()
    rid = unit.ask()
    steps = [
        lambda: unit.whole(rid),
        lambda: unit.answer(rid),
        lambda: unit.inspect(rid),
        lambda: unit.handle(msg.UnitWritten(OBJECTS)),
    ]
    for step in steps:
        step()
        assert unit.whole(rid) == []
        assert unit.held_dumps() == {"d"}


# --- failed attempts ----------------------------------------------------------------------------------------------------


def refuse_wrong_prompt(unit, rid):
    return unit.answer(rid, tokens=ROWS - 1)


def refuse_wrong_tokens(unit, rid):
    unit.answer(rid)
    return unit.publish(rid, plugin_dump("d", 0, ROWS, ids=range(ROWS)))


def refuse_cached(unit, rid):
    unit.publish(rid, plugin_dump("d", ROWS - 1, ROWS))
    return unit.answer(rid, cached=ROWS - 1)


def refuse_values(unit, rid):
    unit.answer(rid)
    unit.whole(rid)
    return unit.inspect(rid, refusal="layer 3 has NaN in row 2")


def refuse_torn_rows(unit, rid):
    unit.answer(rid)
    unit.whole(rid)
    return unit.inspect(rid, refusal="1 rows differ", reason=RefusalReason.WRONG_CHECKSUM)


def refuse_unnamed(unit, rid):
    unit.publish(rid, plugin_dump("d", 0, ROWS))
    return unit.answer(rid, named=frozenset({"tap/e"}))


def refuse_missing(unit, rid):
    unit.publish(rid, plugin_dump("d", 0, 4))
    unit.answer(rid)
    return unit.handle(msg.CaptureOverdue(rid))


def refuse_lost(unit, rid):
    unit.publish(rid, plugin_dump("d", 0, 4))
    return unit.handle(msg.CaptureLost(rid, "over budget"))


def refuse_error(unit, rid):
    unit.publish(rid, plugin_dump("d", 0, 4))
    return unit.handle(msg.RequestFailed(rid, "worker gpu0: HTTP 500", msg.Fault.ATTEMPT))


@pytest.mark.parametrize(
    ("refuse", "reason"),
    [
        (refuse_wrong_prompt, "wrong_prompt_length: the worker saw 9 tokens, the sample has 10"),
        (refuse_wrong_tokens, "wrong_tokens: dump d has other token ids in its 10 rows from 0 than the sample"),
        (refuse_cached, "prefix_cached: 9 of 10 tokens came from the worker's prefix cache"),
        (refuse_values, "bad_values: layer 3 has NaN in row 2"),
        (refuse_torn_rows, "wrong_checksum: 1 rows differ"),
        (refuse_unnamed, "unnamed_dump: the answer names tap/e; dump d is not among them"),
        (refuse_missing, "missing_rows: rows 4 to 10 of 10 did not appear in time"),
        (refuse_lost, "lost_by_publisher: over budget"),
        (refuse_error, "worker gpu0: HTTP 500"),
    ],
)
def test_a_failed_attempt_drops_its_dumps_and_its_sample_waits_again(refuse, reason):
    unit = Unit()
    rid = unit.ask()
    *released, failure = refuse(unit, rid)
    assert failure == failed(rid, reason)
    assert released in ([], [stray("d")])
    assert unit.held_dumps() == set()
    assert (list(unit.waiting()), unit.failed_on(0)) == ([0], ("gpu0",))
    again = unit.ask(worker="gpu1")
    assert again == "st-j-3-0-2-2"
    unit.answer(again)
    assert unit.whole(again, "new") == [msg.InspectCapture(again, ("new",))]
    assert unit.inspect(again)[1] == msg.WriteUnit(((0, ("new",)),))
    assert unit.verdicts() == [stored(0, 2, "gpu1", 5, 99)]


def test_two_readings_of_an_attempt_are_refused():
    unit = Unit()
    rid = unit.ask()
    unit.whole(rid, "a")
    unit.whole(rid, "b")
    assert unit.answer(rid) == [msg.DigestDumps(rid, ("a", "b"))]
    assert unit.handle(msg.DumpsDigested(rid, {"a": 1, "b": 2})) == [
        stray("a", "b"),
        failed(rid, "ambiguous: dumps a and b both fit and differ"),
    ]


def test_attempts_are_used_up():
    unit = Unit(samples=2, attempts=2)
    unit.capture(1)
    rids = []
    for attempt in (1, 2):
        rids.append(unit.ask(0, worker=f"gpu{attempt}"))
        commands = unit.handle(msg.RequestFailed(rids[-1], f"try {attempt}", msg.Fault.ATTEMPT))
        assert commands[0] == failed(rids[-1], f"try {attempt}", worker=f"gpu{attempt}", final=attempt == 2)
    assert len(set(rids)) == 2
    assert commands[1:] == [msg.WriteUnit(((1, ("d1",)),))]
    assert unit.verdicts()[0] == lost(0, "try 2", 2, "gpu2")
    assert unit.failed_on(0) == ("gpu1", "gpu2")


def test_a_fault_of_the_sample_is_final():
    unit = Unit()
    rid = unit.ask()
    failure, commit = unit.handle(msg.RequestFailed(rid, "token id 9 is outside the model's vocabulary", msg.Fault.SAMPLE))
    assert failure.final
    assert commit == msg.RecordCommit((lost(0, failure.reason, 1, "gpu0"),), ())
    assert unit.state is UnitPhase.COMMITTING
    assert unit.handle(msg.CommitRecorded()) == []
    assert unit.state is UnitPhase.COMMITTED


def test_nothing_that_comes_late_of_a_failed_attempt_counts():
    unit = Unit()
    old = unit.ask()
    unit.handle(msg.RequestFailed(old, "timed out", msg.Fault.ATTEMPT))
    new = unit.ask()
    assert unit.whole(old, "late") == [stray("late")]
    for event in (
        msg.RequestAnswered(old, ROWS, 0, 5),
        msg.RequestFailed(old, "once more", msg.Fault.ATTEMPT),
        msg.CaptureLost(old, "once more"),
        msg.CaptureOverdue(old),
        msg.LifecycleClosed(old),
        msg.DumpsDigested(old, {"late": 1}),
        msg.CaptureInspected(old, 1, None),
        msg.CaptureInspected(old, 1, Refusal(RefusalReason.BAD_VALUES, "NaN")),
    ):
        assert unit.handle(event) == []
    assert list(unit.waiting()) == []
    unit.answer(new)
    assert unit.whole(new, "d") == [msg.InspectCapture(new, ("d",))]


def test_a_loss_while_a_capture_is_inspected_gives_it_up():
    unit = Unit()
    rid = unit.ask()
    unit.answer(rid)
    unit.whole(rid)
    assert unit.handle(msg.CaptureLost(rid, "torn")) == [stray("d"), failed(rid, "lost_by_publisher: torn")]
    assert unit.inspect(rid) == []
    assert list(unit.waiting()) == [0]


def test_an_accepted_capture_is_final():
    unit = Unit(samples=2)
    rid = unit.capture(0)
    for event in (msg.CaptureLost(rid, "late"), msg.CaptureOverdue(rid), msg.RequestFailed(rid, "late", msg.Fault.SAMPLE)):
        assert unit.handle(event) == []
    assert unit.held_dumps() == {"d0"}


def test_what_is_said_of_an_unknown_attempt_changes_nothing():
    unit = Unit()
    other = RequestName("j", 3, 0, 9, 1).rid
    assert unit.whole(other, "x") == [stray("x")]
    assert unit.handle(msg.RequestAnswered(other, ROWS, 0, 5)) == []
    assert unit.handle(msg.CaptureLost(other, "gone")) == []
    assert list(unit.waiting()) == [0]


def test_a_sample_is_asked_for_by_one_worker_at_a_time():
    unit = Unit(samples=2)
    unit.ask(0)
    with pytest.raises(ValueError, match="unit 3 of job j \\(fence 2\\): sample 0 is not waiting for a worker"):
        unit.ask(0, worker="gpu1")
    unit.capture(1)
    with pytest.raises(ValueError, match="sample 1 is not waiting"):
        unit.ask(1)


@pytest.mark.parametrize("in_answer", ["answered", "failed"])
def test_an_answer_may_come_after_its_attempt_was_settled_by_a_loss(in_answer):
    """The publisher reports a loss while the request still runs; with that the last sample is settled, and the unit goes on."""
    unit = Unit(samples=2, attempts=1)
    unit.capture(0)
    rid = unit.ask(1)
    unit.handle(msg.CaptureLost(rid, "over budget"))
    late = (
        msg.RequestAnswered(rid, ROWS + 1, 0, 5)
        if in_answer == "answered"
        else msg.RequestFailed(rid, "timed out", msg.Fault.ATTEMPT)
    )
    assert (unit.handle(late), unit.state) == ([], UnitPhase.WRITING)
    unit.handle(msg.UnitWritten(OBJECTS))
    assert (unit.handle(late), unit.state) == ([], UnitPhase.COMMITTING)
    unit.handle(msg.CommitRecorded())
    assert (unit.handle(late), unit.state) == ([], UnitPhase.COMMITTED)
    assert unit.reason(1) == "lost_by_publisher: over budget"
