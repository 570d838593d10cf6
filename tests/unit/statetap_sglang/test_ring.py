from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from statetap_sglang.ring import Ring, Span


def test_what_does_not_fit_is_refused_and_nothing_waits() -> None:
    ring = Ring(100)
    assert ring.reserve(101) is None
    first = ring.reserve(60)
    assert first is not None
    assert ring.reserve(50) is None
    ring.release(first)
    assert ring.reserve(100) is not None


def test_a_span_goes_round_the_end() -> None:
    ring = Ring(100)
    first, second = ring.reserve(40), ring.reserve(40)
    assert first is not None
    assert second is not None
    ring.release(first)
    third = ring.reserve(30)
    assert third is not None
    assert third.start == 0
    assert ring.reserve(20) is None
    ring.release(second)
    fourth = ring.reserve(70)
    assert fourth is not None
    assert fourth.start == 30


class RingMachine(RuleBasedStateMachine):
    """Spans that are held never overlap, and an empty ring takes anything up to its capacity."""

    def __init__(self) -> None:
        super().__init__()
        self.ring = Ring(1000)
        self.held: list[Span] = []

    @rule(nbytes=st.integers(1, 500))
    def reserve(self, nbytes: int) -> None:
        if (span := self.ring.reserve(nbytes)) is not None:
            self.held.append(span)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.ring.release(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def no_overlap(self) -> None:
        spans = sorted(self.held, key=lambda span: span.start)
        assert all(span.start >= 0 and span.start + span.nbytes <= 1000 for span in spans)
        assert all(a.start + a.nbytes <= b.start for a, b in pairwise(spans))

    def teardown(self) -> None:
        for span in self.held:
            self.ring.release(span)
        assert self.ring.held == 0
        assert self.ring.reserve(1000) is not None


TestRing = RingMachine.TestCase
