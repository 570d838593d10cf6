"""core/unit.py: from a lease to a commit. Each test plays the shell: events in, commands out, nothing else."""

import pytest
from statetap.core import unit_messages as msg
from statetap.core.machine import IllegalTransition
from statetap.core.records import SampleStatus, SampleVerdict, ShardObject
from statetap.core.requests import RequestName
from statetap.core.spec import Identity
from statetap.core.unit import UnitKey, UnitMachine, UnitPhase, UnitSample

from tests.unit.core.dump_facts import expected, plain_dump, plugin_dump

ROWS = 10
OBJECTS = (ShardObject(key="aux_hidden_states/c/0/0/0", nbytes=4096, digest=17),)
OLD = RequestName("j", 3, 0, 1, 1).rid
OLDER = RequestName("j", 3, 0, 1, 0).rid


class Unit(UnitMachine):
    """A unit machine with the shell's moves as methods."""

    def __init__(self, *, samples=1, attempts=3):
        wanted = [UnitSample(i, expected(ROWS + i)) for i in range(samples)]
        super().__init__(UnitKey("j", 3, 2), wanted, attempts_per_sample=attempts)

    def ask(self, sample=0, *, worker="gpu0", identity=Identity.TOKENS, chunk=None):
        (sent,) = self.handle(msg.Assigned(sample, worker, identity, chunk))
        assert (sent.sample, sent.worker) == (sample, worker)
        return sent.rid

    def answer(self, rid, *, tokens=None, cached=0, next_token=5):
        sample = RequestName.parse(rid).sample
        return self.handle(msg.RequestAnswered(rid, ROWS + sample if tokens is None else tokens, cached, next_token))

    def publish(self, rid, dump):
        return self.handle(msg.DumpPublished(rid, dump))

    def whole(self, rid, dump_id="d"):
        """Publish the whole capture in one dump."""
        return self.publish(rid, plugin_dump(dump_id, 0, ROWS + RequestName.parse(rid).sample, rid=rid))

    def inspect(self, rid, *, digest=99, refusal=None):
        return self.handle(msg.CaptureInspected(rid, digest, refusal))

    def capture(self, sample=0, **asked):
        rid = self.ask(sample, **asked)
        self.answer(rid)
        self.whole(rid, f"d{sample}")
        self.inspect(rid)
        return rid

    def reason(self, sample=0):
        return self.verdicts()[sample].reason


def stored(sample, attempts, worker, next_token, digest):
    return SampleVerdict(
        sample=sample,
        status=SampleStatus.STORED,
        reason=None,
        attempts=attempts,
        worker=worker,
        next_token=next_token,
        digest=digest,
    )


def lost(sample, reason, attempts, worker):
    return SampleVerdict(sample=sample, status=SampleStatus.FAILED, reason=reason, attempts=attempts, worker=worker)


def failed(rid, reason, *, sample=0, worker="gpu0", final=False):
    return msg.AttemptFailed(rid, sample, worker, reason, final)


def stray(*dump_ids):
    return msg.ReleaseDumps(dump_ids, stray=True)


# --- the straight way ---------------------------------------------------------------------------------------------------


def test_from_a_lease_to_a_commit():
    unit = Unit(samples=2)
    first, second = unit.ask(0), unit.ask(1)
    assert first == "st-j-3-0-1-2"
    assert unit.waiting() == []
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
    assert released == [msg.ReleaseDumps(("a",), stray=False), msg.ReleaseDumps(("c", "b"), stray=False)]
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
    assert (unit.waiting(), unit.failed_on(0)) == ([0], ("gpu0",))
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
        msg.CaptureInspected(old, 1, "NaN"),
    ):
        assert unit.handle(event) == []
    assert unit.waiting() == []
    unit.answer(new)
    assert unit.whole(new, "d") == [msg.InspectCapture(new, ("d",))]


def test_a_loss_while_a_capture_is_inspected_gives_it_up():
    unit = Unit()
    rid = unit.ask()
    unit.answer(rid)
    unit.whole(rid)
    assert unit.handle(msg.CaptureLost(rid, "torn")) == [stray("d"), failed(rid, "lost_by_publisher: torn")]
    assert unit.inspect(rid) == []
    assert unit.waiting() == [0]


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
    assert unit.waiting() == [0]


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


# --- by count -----------------------------------------------------------------------------------------------------------


def strict(*counts, chunk=None, samples=1):
    """A strict attempt at sample 0 that was answered, and these dumps."""
    unit = Unit(samples=samples)
    rid = unit.ask(identity=Identity.COUNT, chunk=chunk)
    commands = []
    for place, rows in enumerate(counts):
        commands += unit.publish(rid, plain_dump(f"p{place}", place, rows))
    return unit, rid, [*commands, *unit.answer(rid)]


def test_by_count_a_capture_waits_for_the_end_of_its_lifecycle():
    unit, rid, commands = strict(3, ROWS, samples=2)
    assert commands == [msg.CloseLifecycle(rid)]
    assert unit.publish(rid, plain_dump("p2", 2, 1)) == []
    assert unit.handle(msg.LifecycleClosed(rid)) == [msg.InspectCapture(rid, ("p1",))]
    assert unit.inspect(rid) == [msg.CaptureAccepted(rid, 0, "gpu0", recalled=False), stray("p0", "p2")]


def test_by_count_another_that_fits_before_the_end_is_refused():
    unit, rid, _ = strict(ROWS)
    assert unit.publish(rid, plain_dump("p1", 1, ROWS)) == [msg.DigestDumps(rid, ("p0", "p1"))]
    assert unit.handle(msg.LifecycleClosed(rid)) == []
    assert unit.handle(msg.DumpsDigested(rid, {"p0": 1, "p1": 2}))[-1] == failed(
        rid, "ambiguous: dumps p0 and p1 both fit and differ"
    )


def test_by_count_the_same_bytes_twice_are_one_reading():
    unit, rid, commands = strict(ROWS, ROWS)
    assert commands == [msg.DigestDumps(rid, ("p0", "p1"))]
    assert unit.handle(msg.DumpsDigested(rid, {"p0": 1, "p1": 1})) == [msg.CloseLifecycle(rid)]
    assert unit.handle(msg.LifecycleClosed(rid)) == [msg.InspectCapture(rid, ("p0",))]


def test_by_count_chunks_are_assembled():
    unit, rid, commands = strict(6, 1, 4, chunk=6)
    assert commands == [msg.CloseLifecycle(rid)]
    assert unit.handle(msg.LifecycleClosed(rid)) == [msg.InspectCapture(rid, ("p0", "p2"))]


def test_by_count_a_prefix_hit_is_refused_even_if_a_dump_fits():
    unit = Unit()
    rid = unit.ask(identity=Identity.COUNT)
    unit.publish(rid, plain_dump("own", 0, 1))
    unit.publish(rid, plain_dump("foreign", 1, ROWS))
    reason = "prefix_cached: 9 of 10 tokens came from the worker's prefix cache"
    assert unit.answer(rid, cached=9) == [stray("own", "foreign"), failed(rid, reason)]


@pytest.mark.parametrize(
    ("counts", "missing"),
    [((3,), "rows 0 to 10 of 10"), ((ROWS,), "the end of its lifecycle")],
)
def test_by_count_what_is_overdue_is_refused(counts, missing):
    unit, rid, _ = strict(*counts)
    assert unit.handle(msg.CaptureOverdue(rid))[-1] == failed(rid, f"missing_rows: {missing} did not appear in time")
    assert unit.handle(msg.LifecycleClosed(rid)) == []


# --- what an earlier lease left -----------------------------------------------------------------------------------------


def recalled(*rids, samples=1, attempts=3):
    unit = Unit(samples=samples, attempts=attempts)
    for rid in rids:
        assert unit.handle(msg.Recalled(rid, RequestName.parse(rid).sample, "gpu0", 42)) == []
    return unit


def test_a_recalled_attempt_that_is_whole_needs_no_request():
    unit = recalled(OLD)
    assert unit.whole(OLD) == [msg.InspectCapture(OLD, ("d",))]
    assert unit.waiting() == []
    assert unit.handle(msg.RecallEnded()) == []
    assert unit.inspect(OLD) == [msg.CaptureAccepted(OLD, 0, "gpu0", recalled=True), msg.WriteUnit(((0, ("d",)),))]
    assert unit.verdicts() == [stored(0, 1, "gpu0", 42, 99)]


def test_what_came_back_in_part_is_given_up_and_asked_for_anew():
    unit = recalled(OLD)
    unit.publish(OLD, plugin_dump("part", 0, 4))
    assert unit.handle(msg.RecallEnded()) == [stray("part")]
    assert unit.waiting() == [0]
    assert unit.publish(OLD, plugin_dump("rest", 4, ROWS)) == [stray("rest")]
    rid = unit.ask()
    assert rid == "st-j-3-0-1-2"
    assert unit.failed_on(0) == ()


def test_a_recalled_attempt_without_dumps_is_forgotten():
    unit = recalled(OLD)
    assert unit.handle(msg.RecallEnded()) == []
    assert unit.whole(OLD, "late") == [stray("late")]
    assert unit.waiting() == [0]


def test_a_dump_of_an_earlier_lease_without_an_answer_on_record_is_a_stray():
    unit = recalled(samples=1)
    assert unit.whole(OLD) == [stray("d")]
    assert unit.handle(msg.RecallEnded()) == []
    assert unit.waiting() == [0]


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
    assert unit.waiting() == [0]
    unit.capture(0)
    assert unit.verdicts()[0].status is SampleStatus.STORED


def test_a_loss_that_an_earlier_attempt_reported_stands():
    unit = recalled(OLD)
    unit.publish(OLD, plugin_dump("part", 0, 4))
    assert unit.handle(msg.CaptureLost(OLD, "over budget")) == [stray("part")]
    assert unit.handle(msg.RecallEnded()) == []
    assert unit.waiting() == [0]


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


# --- the end ------------------------------------------------------------------------------------------------------------


def test_a_unit_without_samples_is_committed_as_such():
    unit = Unit(samples=0)
    assert unit.waiting() == []
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
