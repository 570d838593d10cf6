"""core/reservation.py: what is reserved covers what a unit's dumps take, page by page, however the worker splits them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statetap.core.capture import TOKEN_BYTES
from statetap.core.placement import PAGE_BYTES
from statetap.core.reservation import dump_bytes, unit_dump_bytes
from statetap.core.spec import HiddenArray

widths = st.integers(1, 8192)
shapes = st.lists(st.tuples(widths) | st.tuples(st.integers(1, 5), widths), min_size=1, max_size=3)
arrays = shapes.map(lambda rows: tuple(HiddenArray(f"array{i}", shape, "bfloat16") for i, shape in enumerate(rows)))


def pages(nbytes):
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def file_bytes(rows, arrays):
    """A dump of so many rows: its header's page, and every tensor from a page boundary on (contract §2)."""
    return PAGE_BYTES + pages(TOKEN_BYTES * rows) + sum(pages(array.row_bytes * rows) for array in arrays)


@settings(deadline=None)
@given(st.integers(1, 600), arrays, st.integers(1, 200), st.integers(0, 200))
def test_the_reservation_covers_every_split(length, arrays, chunk, first):
    """Also one where the first pass was shared, so that it took only `first` tokens."""
    cuts = [min(first, chunk, length)] if first else []
    while sum(cuts) < length:
        cuts.append(min(chunk, length - sum(cuts)))
    assert sum(file_bytes(rows, arrays) for rows in cuts) <= dump_bytes(length, arrays, chunk)


@settings(deadline=None)
@given(st.integers(2, 3000), arrays, st.data())
def test_a_worker_that_never_splits_may_still_share_a_pass(length, arrays, data):
    first = data.draw(st.integers(1, length))
    parts = [rows for rows in (first, length - first) if rows]
    assert sum(file_bytes(rows, arrays) for rows in parts) <= dump_bytes(length, arrays, None)


@pytest.mark.parametrize("chunk", [None, 64])
def test_a_unit_takes_what_its_samples_take(chunk):
    eagle = (HiddenArray("aux_hidden_states", (3, 4096), "bfloat16"), HiddenArray("last_hidden_states", (4096,), "bfloat16"))
    lengths = [1, 64, 65, 4000]
    assert unit_dump_bytes(lengths, eagle, chunk) == sum(dump_bytes(length, eagle, chunk) for length in lengths)
    assert unit_dump_bytes([], eagle, chunk) == 0


def test_it_is_not_much_more_than_the_rows():
    eagle = (HiddenArray("aux_hidden_states", (3, 4096), "bfloat16"), HiddenArray("last_hidden_states", (4096,), "bfloat16"))
    assert 4000 * 4 * 4096 * 2 < dump_bytes(4000, eagle, 8192) < 1.01 * 4000 * 4 * 4096 * 2
