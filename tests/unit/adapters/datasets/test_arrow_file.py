"""`ArrowDataset`: runs of samples, within one of the file's batches and across several."""

import numpy as np
import pyarrow as pa
import pytest
from statetap.adapters.datasets.arrow_file import COLUMNS, ArrowDataset, DatasetFile

BATCHES = ([3, 1], [2], [4, 1, 2])
LENGTHS = [length for lengths in BATCHES for length in lengths]


@pytest.fixture
def opened(tmp_path):
    file = DatasetFile(tmp_path / "data.arrow", {"name": "data"})
    index = 0
    for lengths in BATCHES:
        rows = [
            {
                "id": f"s{index + i}",
                "input_ids": [10 * (index + i) + n for n in range(length)],
                "loss_mask": [(index + i) % 2] * length,
            }
            for i, length in enumerate(lengths)
        ]
        file.append(pa.RecordBatch.from_pylist(rows, schema=COLUMNS).serialize().to_pybytes())
        index += len(lengths)
    file.finish("0" * 64)
    return ArrowDataset(tmp_path / "data.arrow")


@pytest.mark.parametrize(("first", "stop"), [(0, 1), (0, 2), (1, 3), (2, 3), (1, 5), (3, 6), (0, 6), (5, 6)])
def test_a_run_is_its_samples_one_after_the_other(opened, first, stop) -> None:
    ids, mask = opened.tokens(first, stop)
    assert (ids.dtype, mask.dtype) == ("int32", "uint8")
    assert ids.tolist() == np.concatenate([opened.input_ids(index) for index in range(first, stop)]).tolist()
    assert mask.tolist() == np.concatenate([opened.loss_mask(index) for index in range(first, stop)]).tolist()
    assert opened.ids(first, stop) == [opened.id(index) for index in range(first, stop)]


def test_a_run_within_a_batch_is_a_slice_of_the_mapping(opened) -> None:
    assert not any(values.flags.owndata for values in opened.tokens(3, 6))


def test_no_run_goes_beyond_the_samples(opened) -> None:
    assert opened.lengths.tolist() == LENGTHS
    assert opened.ids(4, 4) == []
    for first, stop in ((-1, 2), (5, 7), (3, 2)):
        with pytest.raises(IndexError, match="of a dataset with 6"):
            opened.tokens(first, stop)
