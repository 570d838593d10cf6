"""core/placement.py: where every row goes."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from statetap.core.placement import (
    PAGE_BYTES,
    Geometry,
    alignment_rows,
    choose_geometry,
    dataset_order,
    permutation,
    place,
)
from statetap.core.spec import HiddenArray


def hidden(width, layers=3, dtype="bfloat16"):
    return (HiddenArray("aux_hidden_states", (layers, width), dtype), HiddenArray("last_hidden_states", (width,), dtype))


@pytest.mark.parametrize(
    ("width", "rows"),
    [(7168, 2), (576, 32), (4096, 1), (2048, 1), (64, 32), (1000, 1)],
    ids=["the contract's example", "SmolLM2", "whole pages", "one page", "narrow", "too far apart: unaligned"],
)
def test_alignment_makes_whole_pages_of_every_array(width, rows):
    assert alignment_rows(hidden(width)) == rows


@given(st.integers(1, 8192), st.integers(1, 5), st.sampled_from(["bfloat16", "float32"]))
def test_alignment_is_whole_pages_or_none(width, layers, dtype):
    arrays = hidden(width, layers, dtype)
    rows = alignment_rows(arrays)
    assert 1 <= rows <= 64
    if rows > 1:
        assert all(rows * array.row_bytes % PAGE_BYTES == 0 for array in arrays)


@given(st.integers(1, 8192), st.integers(1, 5))
def test_a_chosen_geometry_is_near_its_targets(width, layers):
    arrays = hidden(width, layers)
    geometry = choose_geometry(arrays)
    assert geometry.alignment == alignment_rows(arrays)
    unit_bytes = geometry.rows_per_shard * sum(array.row_bytes for array in arrays)
    assert 128 << 20 <= unit_bytes <= 256 << 20
    chunk_bytes = geometry.rows_per_chunk * max(array.row_bytes for array in arrays)
    assert chunk_bytes <= max(1 << 20, geometry.alignment * max(array.row_bytes for array in arrays))


def test_given_rows_per_shard_is_kept_and_the_chunk_divides_it():
    geometry = choose_geometry(hidden(576), rows_per_shard=96)
    assert geometry == Geometry(rows_per_shard=96, rows_per_chunk=96, alignment=32)
    assert choose_geometry(hidden(576), rows_per_shard=5 * 288).rows_per_chunk == 288


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"rows_per_shard": 100}, "rows_per_shard 100 must be a multiple of rows_per_chunk"),
        ({"rows_per_chunk": 33}, "rows_per_chunk 33 must be a multiple of the alignment, 32 rows"),
        ({"rows_per_shard": 96, "rows_per_chunk": 64}, "rows_per_shard 96 must be a multiple of rows_per_chunk, 64"),
        ({"rows_per_shard": 64, "rows_per_chunk": 0}, "must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_each_other_are_refused(sizes, reason):
    with pytest.raises(ValueError, match=reason):
        choose_geometry(hidden(576), **sizes)


def test_a_permutation_is_the_same_for_ever():
    # Stores were placed by it: these figures may never change.
    assert list(permutation(8, seed=0)) == [1, 5, 6, 0, 7, 4, 2, 3]
    assert list(permutation(8, seed=7)) == [2, 1, 3, 5, 0, 6, 7, 4]


@given(st.integers(0, 300), st.integers())
def test_a_permutation_holds_every_index_once(count, seed):
    assert sorted(permutation(count, seed)) == list(range(count))


def test_samples_start_aligned_and_fill_a_shard():
    placement = place([30, 3, 40, 10], dataset_order(4), Geometry(64, 32, 32))
    assert list(placement.row_starts) == [0, 32, 64, 128]
    assert [(unit.first, unit.count, unit.row_start, unit.rows) for unit in placement.units] == [
        (0, 2, 0, 64),
        (2, 1, 64, 64),
        (3, 1, 128, 64),
    ]
    assert placement.rows == 192


def test_a_long_sample_has_consecutive_shards_of_its_own():
    placement = place([5, 130, 5], dataset_order(3), Geometry(64, 32, 1))
    assert [(list(placement.samples_of(unit)), unit.row_start, unit.rows) for unit in placement.units] == [
        ([(0, 0)], 0, 64),
        ([(1, 64)], 64, 192),
        ([(2, 256)], 256, 64),
    ]


def test_a_grown_store_goes_on_where_it_ended():
    geometry = Geometry(64, 32, 1)
    placement = place([64, 64], dataset_order(2), geometry, first_row=640, first_unit=10)
    assert [(unit.index, unit.row_start) for unit in placement.units] == [(10, 640), (11, 704)]
    assert (placement.first_row, placement.rows) == (640, 128)
    with pytest.raises(ValueError, match="first_row 650 is not at a boundary of 64-row shards"):
        place([64], dataset_order(1), geometry, first_row=650)


def test_a_sample_without_rows_is_refused():
    with pytest.raises(ValueError, match="sample 1 has no rows"):
        place([4, 0], dataset_order(2), Geometry(64, 32, 1))


@st.composite
def plans(draw):
    alignment = draw(st.sampled_from([1, 2, 32]))
    chunk = alignment * draw(st.integers(1, 4))
    geometry = Geometry(chunk * draw(st.integers(1, 6)), chunk, alignment)
    lengths = draw(st.lists(st.integers(1, 3 * geometry.rows_per_shard), max_size=60))
    order = permutation(len(lengths), draw(st.integers(0, 9))) if draw(st.booleans()) else dataset_order(len(lengths))
    return lengths, order, geometry, draw(st.integers(0, 5)) * geometry.rows_per_shard


@given(plans())
def test_every_placement_keeps_the_invariants(plan):
    lengths, order, geometry, first_row = plan
    placement = place(lengths, order, geometry, first_row=first_row, first_unit=3)

    # Units: consecutive whole shards from the first row on, and consecutive positions of the order.
    row, position = first_row, 0
    for at, unit in enumerate(placement.units):
        assert (unit.index, unit.row_start, unit.first) == (3 + at, row, position)
        assert unit.rows > 0
        assert unit.count > 0
        assert unit.rows % geometry.rows_per_shard == 0
        row, position = row + unit.rows, position + unit.count
    assert (row - first_row, position) == (placement.rows, len(lengths))

    # Samples: each once, in order, aligned within its unit, none over another.
    placed = [(index, start, unit) for unit in placement.units for index, start in placement.samples_of(unit)]
    assert [index for index, _, _ in placed] == list(order)
    for index, start, unit in placed:
        assert (start - unit.row_start) % geometry.alignment == 0
        assert unit.row_start <= start
        assert start + lengths[index] <= unit.row_start + unit.rows
    for (before, start, _), (_, following, _) in pairwise(placed):
        assert start + lengths[before] <= following

    # Only a sample longer than a shard has more than one, and then it has the unit for itself and no shard too many.
    for unit in placement.units:
        if unit.rows > geometry.rows_per_shard:
            assert unit.count == 1
            assert unit.rows - geometry.rows_per_shard < lengths[placement.order[unit.first]]


@given(plans())
def test_a_unit_is_only_closed_when_the_next_sample_does_not_fit(plan):
    lengths, order, geometry, _ = plan
    placement = place(lengths, order, geometry)
    for unit, following in pairwise(placement.units):
        last = unit.first + unit.count - 1
        end = placement.row_starts[last] + lengths[order[last]] - unit.row_start
        aligned = -(-end // geometry.alignment) * geometry.alignment
        assert aligned + lengths[order[following.first]] > geometry.rows_per_shard
