"""core/strict.py: the guards that keep one lifecycle's dumps from being taken for another's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from statetap.core.capture import chunk_pattern
from statetap.core.strict import SERVER_LENGTHS, SHORTEST_SAMPLE, fence_length, fence_tokens, next_length


def test_a_decode_pass_is_shorter_than_any_sample():
    assert SHORTEST_SAMPLE == 2


@pytest.mark.parametrize(
    ("pending", "previous", "following"),
    [
        ([5, 6], None, 5),
        ([5, 6], 5, 6),
        ([5, 5, 6], 5, 6),
        ([6, 5], 5, 6),
        ([5, 5], 5, None),
        ([], None, None),
        ([], 5, None),
    ],
)
def test_never_two_samples_of_equal_length_in_a_row(pending, previous, following):
    assert next_length(pending, previous) == following


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


@given(st.sets(st.integers(1, 200), max_size=30), st.none() | st.integers(64, 128))
def test_no_dump_that_may_still_come_looks_like_a_fence(avoid, chunk):
    length = fence_length(avoid, chunk)
    assert length not in SERVER_LENGTHS
    assert all(length not in chunk_pattern(other, chunk) for other in avoid)
    assert chunk is None or length < chunk


@pytest.mark.parametrize(("avoid", "chunk"), [((), 7), ((), 2), ({7}, 8), ({7, 8}, 9)])
def test_a_chunk_too_small_for_a_fence_is_refused(avoid, chunk):
    with pytest.raises(ValueError, match=f"no free length below its chunk size of {chunk} tokens; use a larger one"):
        fence_length(avoid, chunk)


@pytest.mark.parametrize(("length", "vocab_size"), [(7, 3), (40, 16), (40, 100_000), (9, 1)])
def test_a_fence_is_valid_in_any_vocabulary(length, vocab_size):
    tokens = fence_tokens(length, vocab_size)
    assert len(tokens) == length
    assert all(0 <= token < vocab_size for token in tokens)
