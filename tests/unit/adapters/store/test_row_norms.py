"""Norms of sampled rows, against numpy in float64."""

from itertools import pairwise

import numpy as np
import pytest
from statetap.adapters.store.row_norms import sampled_norms
from statetap.adapters.store.threaded_capture_inspector import ThreadedCaptureInspector
from statetap.core.norms import sampled_rows
from statetap.core.spec import HiddenArray
from statetap.ports import CapturePart

from tests.fakes.store_on_disk import AUX, LAST, as_view, random_rows

DTYPES = ["bfloat16", "float16", "float32"]
LARGEST = {"bfloat16": 3.3e38, "float16": 65504.0, "float32": 3.4e38}
SMALLEST = {"bfloat16": 1e-38, "float16": 6e-8, "float32": 1e-44}


def in_float64(rows):
    return np.linalg.norm(rows.astype(np.float64), axis=-1)


def told(array, rows, *bounds):
    norms = sampled_norms([as_view(rows[a:b]) for a, b in pairwise((0, *bounds, len(rows)))], array)
    assert norms.array == array.name
    assert norms.rows == sampled_rows(len(rows))
    return np.array(norms.norms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 8), (1, 7), (5, 1), (2, 4096), (8,), (7,), (1,)])
@pytest.mark.parametrize(("rows", "bounds"), [(1, ()), (2, (1,)), (300, ()), (300, (1, 120, 299)), (5000, (2500,))])
def test_they_are_those_of_the_sampled_rows(dtype, shape, rows, bounds):
    if rows == 5000 and shape == (2, 4096):
        rows = 600
        bounds = (300,)
    array = HiddenArray("aux_hidden_states", shape, dtype)
    capture = random_rows(array, rows, np.random.default_rng(5)) * np.arange(1, rows + 1).reshape(-1, *[1] * len(shape))
    capture = capture.astype(random_rows(array, 1, np.random.default_rng()).dtype)
    wanted = in_float64(capture[list(sampled_rows(rows))]).reshape(len(sampled_rows(rows)), -1)
    np.testing.assert_allclose(told(array, capture, *bounds), wanted, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", [LARGEST, SMALLEST])
def test_the_largest_and_the_smallest_values_neither_overflow_nor_vanish(dtype, values):
    array = HiddenArray("last_hidden_states", (64,), dtype)
    rows = random_rows(array, 3, np.random.default_rng(0))
    rows[2] = values[dtype]
    rows[2, 1] = -rows[2, 0]
    with np.errstate(all="raise"):
        norms = told(array, rows)
    assert 0 < norms[1, 0] < np.inf
    np.testing.assert_allclose(norms[:, 0], in_float64(rows[[0, 2]]), rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
async def test_an_inspection_takes_them_of_every_array_unless_it_refuses(dtype):
    arrays = (HiddenArray(AUX, (3, 8), dtype), HiddenArray(LAST, (8,), dtype))
    capture = {array.name: random_rows(array, 12, np.random.default_rng(3)) for array in arrays}
    inspector = ThreadedCaptureInspector()
    parts = [CapturePart({name: as_view(rows[a:b]) for name, rows in capture.items()}) for a, b in ((0, 5), (5, 12))]
    report = await inspector.inspect(parts, arrays)
    assert [norms.array for norms in report.norms] == [AUX, LAST]
    for norms in report.norms:
        wanted = in_float64(capture[norms.array][[0, 11]]).reshape(2, -1)
        np.testing.assert_allclose(np.array(norms.norms), wanted, rtol=1e-5)
    capture[LAST][3] = 0
    refused = await inspector.inspect([CapturePart({name: as_view(rows) for name, rows in capture.items()})], arrays)
    inspector.close()
    assert refused.refusal is not None
    assert refused.norms == ()
