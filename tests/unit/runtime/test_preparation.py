"""The blocks that a job's tokens are written in: as few as may be, and the rows that each sample alone would have had."""

import numpy as np
import pytest
from statetap.runtime.preparation import _blocks

from tests.fakes.datasets import MemoryDataset

SHARD = 16


def dataset(*lengths):
    return MemoryDataset(
        [(f"s{i}", [10 * i + n for n in range(1, length + 1)], [i % 2] * length) for i, length in enumerate(lengths)]
    )


def blocks(tokens, starts, lengths=None):
    lengths = tokens.lengths if lengths is None else np.array(lengths, np.int64)
    return list(_blocks(tokens, np.array(starts, np.int64), lengths, SHARD))


def one_by_one(tokens, starts, lengths=None, rows=64):
    """What the rows must hold, said plainly: 0 where no sample is."""
    ids, mask = np.zeros(rows, np.int32), np.zeros(rows, np.uint8)
    for index, start in enumerate(starts):
        if start >= 0:
            length = len(tokens.input_ids(index)) if lengths is None else lengths[index]
            ids[start : start + length], mask[start : start + length] = (
                tokens.input_ids(index)[:length],
                tokens.loss_mask(index)[:length],
            )
    return ids, mask


def written(made, rows=64):
    ids, mask = np.zeros(rows, np.int32), np.zeros(rows, np.uint8)
    end = 0
    for block in made:
        assert block.row >= end
        end = block.row + len(block.input_ids)
        assert len(block.loss_mask) == len(block.input_ids) > 0
        ids[block.row : end], mask[block.row : end] = block.input_ids, block.loss_mask
    return ids, mask


@pytest.mark.parametrize(
    ("starts", "lengths", "spans"),
    [
        # One after the other: one block; a gap, a sample that was left out, and another order each begin a new one.
        ([0, 3, 7, 9], None, [(0, 11)]),
        ([0, 4, 8, 10], None, [(0, 3), (4, 8)]),
        ([0, -1, 3, 5], None, [(0, 3), (3, 4)]),
        ([8, 4, 2, 0], None, [(0, 2), (2, 2), (4, 4), (8, 3)]),
        # A sample that is cut short ends its block, but need not begin one.
        ([0, 3, 5, 7], [3, 2, 2, 2], [(0, 5), (5, 4)]),
        # A shard ends one, too.
        ([9, 12, 16, 18], None, [(9, 7), (16, 4)]),
        ([-1, -1, -1, -1], None, []),
    ],
)
def test_samples_that_follow_one_another_are_one_block(starts, lengths, spans) -> None:
    tokens = dataset(3, 4, 2, 2)
    made = blocks(tokens, starts, lengths)
    assert [(block.row, len(block.input_ids)) for block in made] == spans
    for got, wanted in zip(written(made), one_by_one(tokens, starts, lengths), strict=True):
        assert got.tolist() == wanted.tolist()


def test_rows_that_a_sample_left_are_in_no_block() -> None:
    """A sample that is tried again has new rows; its old ones keep what they have, so nothing may be written there."""
    tokens = dataset(3, 4, 2)
    made = blocks(tokens, [0, 32, 7])
    assert [(block.row, len(block.input_ids)) for block in made] == [(0, 3), (7, 2), (32, 4)]
