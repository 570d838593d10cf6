"""core/strict.py: the guards that keep one lifecycle's dumps from being taken for another's."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statetap.core.capture import chunk_pattern
from statetap.core.strict import SERVER_LENGTHS, StrictGate, fence_length, fence_tokens, tells_itself_apart


def fenced_gate(chunk=None):
    gate = StrictGate(chunk)
    assert gate.appeared(gate.begin_fence({40}))
    return gate


def first_of(gate, pending):
    """The first of the pending lengths that may be sent."""
    return next(filter(gate.may_send, pending), None)


def test_nothing_may_be_sent_before_the_first_fence():
    gate = StrictGate(None)
    assert first_of(gate, [5, 6]) is None
    length = gate.begin_fence({5, 6, 7})
    assert length == 8
    assert not gate.appeared(5)
    assert first_of(gate, [5]) is None
    assert gate.appeared(8)
    assert first_of(gate, [5]) == 5


@pytest.mark.parametrize(("pending", "following"), [([5, 6], 6), ([6, 5], 6), ([5, 5, 9], 9), ([5, 5], None), ([], None)])
def test_never_two_samples_of_equal_length_in_a_row(pending, following):
    gate = fenced_gate()
    gate.sent(5)
    assert first_of(gate, pending) == following


def test_a_sample_as_long_as_the_fence_waits_for_another():
    gate = fenced_gate()
    assert first_of(gate, [7]) is None
    assert gate.begin_fence({7}) == 8


@pytest.mark.parametrize("event", [lambda gate: gate.doubt(30), lambda gate: gate.restart()])
def test_after_anything_that_may_leave_a_dump_behind_a_fence_comes_first(event):
    gate = fenced_gate()
    event(gate)
    assert first_of(gate, [5]) is None
    assert gate.appeared(gate.begin_fence({5}))
    assert first_of(gate, [30, 5]) == 30, "the fence accounts for what came before it"


def test_a_doubted_length_is_no_fence():
    gate = fenced_gate()
    gate.doubt(8)
    assert gate.begin_fence({9}) == 10


def test_a_fence_that_failed_is_sent_again_and_its_second_dump_expected():
    gate = StrictGate(None)
    first = gate.begin_fence({9})
    gate.fence_failed()
    assert not gate.appeared(first), "nobody waits for it now"
    assert gate.begin_fence({9}) == first
    assert gate.appeared(first)
    assert first_of(gate, [first, 9]) == 9
    gate.sent(9)
    assert first_of(gate, [first]) is None, "the other fence may still appear"
    assert gate.appeared(gate.begin_fence({first}))
    assert first_of(gate, [first]) == first


@pytest.mark.parametrize(
    ("length", "chunk", "apart"),
    [(1, None, False), (2, None, True), (64, 64, True), (65, 64, False), (66, 64, True), (1, 64, False)],
)
def test_a_dump_of_one_row_is_nobodys(length, chunk, apart):
    assert tells_itself_apart(length, chunk) is apart


@pytest.mark.parametrize(
    ("avoid", "chunk", "length"),
    [
        ((), None, 7),
        ({7, 8}, None, 9),
        ({8}, None, 7),
        ({67}, 60, 8),
        ({67, 128}, 60, 9),
        ({67}, None, 7),
        ((), 8, 7),
    ],
)
def test_a_fence_has_a_length_of_its_own(avoid, chunk, length):
    assert fence_length(avoid, chunk) == length


@settings(deadline=None)
@given(st.sets(st.integers(1, 200), max_size=30), st.none() | st.integers(64, 128))
def test_no_dump_that_may_still_come_looks_like_a_fence(avoid, chunk):
    length = fence_length(avoid, chunk)
    assert length not in SERVER_LENGTHS
    assert all(length not in chunk_pattern(other, chunk) for other in avoid)
    assert chunk is None or length < chunk


@pytest.mark.parametrize(("avoid", "chunk"), [((), 7), ((), 2), ({7}, 8), ({7, 8}, 9)])
def test_a_chunk_too_small_for_a_fence_is_refused(avoid, chunk):
    with pytest.raises(ValueError, match=f"no length below its chunk size of {chunk} tokens is free"):
        fence_length(avoid, chunk)


@pytest.mark.parametrize(("length", "vocab_size"), [(7, 3), (40, 16), (40, 100_000), (9, 1)])
def test_a_fence_is_valid_in_any_vocabulary(length, vocab_size):
    tokens = fence_tokens(length, vocab_size)
    assert len(tokens) == length
    assert all(0 <= token < vocab_size for token in tokens)


@pytest.mark.parametrize(
    ("first", "avoid", "chunk", "length"),
    [(20, (), None, 20), (20, {20, 21}, None, 22), (20, (), 24, 20), (20, {20, 21, 22, 23}, 24, 7), (40, (), 24, 7)],
)
def test_fences_begin_at_the_workers_own_length_where_there_is_room(first, avoid, chunk, length):
    assert fence_length(avoid, chunk, first) == length
