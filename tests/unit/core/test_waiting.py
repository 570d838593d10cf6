"""The order in which a unit's samples are asked for, and that finding the next one does not take longer in a larger unit."""

from time import process_time

from hypothesis import given
from hypothesis import strategies as st
from statetap.core import unit_messages as msg
from statetap.core.spec import Identity
from statetap.core.unit import UnitKey, UnitMachine, UnitPhase, UnitSample
from statetap.core.waiting import WaitingSamples

from tests.unit.core.dump_facts import expected, plugin_dump
from tests.unit.core.unit_play import ROWS

KEY = UnitKey("j", 3, 2)
MANY = 20_000


@given(st.permutations(range(6)), st.lists(st.tuples(st.integers(0, 5), st.booleans())))
def test_the_order_is_by_losses_then_by_placement(placement, moves):
    waiting, losses, waits = WaitingSamples(placement), dict.fromkeys(range(6), 0), set(range(6))
    for sample, comes_back in moves:
        waiting.take(sample)
        waits.discard(sample)
        if comes_back:
            losses[sample] += 1
            waiting.put(sample, losses[sample])
            waits.add(sample)
    assert list(waiting) == sorted(waits, key=lambda sample: (losses[sample], placement.index(sample)))


def test_one_that_waits_already_keeps_its_place():
    waiting = WaitingSamples([3, 1, 2])
    waiting.put(3, 0)
    assert list(waiting) == [3, 1, 2]


def test_a_large_unit_takes_a_time_in_proportion_to_its_samples():
    """A look at all of them for each event would take minutes."""
    unit = UnitMachine(KEY, [UnitSample(i, expected(ROWS)) for i in range(MANY)], attempts_per_sample=3)
    began = process_time()
    for sample in range(MANY):
        assert next(unit.waiting()) == sample
        (sent,) = unit.handle(msg.Assigned(sample, "gpu0", Identity.TOKENS, None, False))
        unit.handle(msg.RequestAnswered(sent.rid, ROWS, 0, 5, None))
        unit.handle(msg.DumpPublished(sent.rid, plugin_dump(f"d{sample}", 0, ROWS, rid=sent.rid)))
        unit.handle(msg.CaptureInspected(sent.rid, 99, None))
    assert unit.state is UnitPhase.WRITING
    assert process_time() - began < 30
