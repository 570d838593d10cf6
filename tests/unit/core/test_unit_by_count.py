"""core/unit.py in strict mode: a capture is complete when its lifecycle is closed, and no sooner."""

import pytest
from statetap.core import unit_messages as msg
from statetap.core.spec import Identity

from tests.unit.core.dump_facts import plain_dump
from tests.unit.core.unit_play import ROWS, Unit, failed, stray


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
