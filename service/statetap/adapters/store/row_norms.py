"""The L2 norms of a few rows of a capture (`core.norms` says which, and what for)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod, sqrt

import numpy as np
from numpy.typing import NDArray

from statetap.core.norms import ArrayNorms, sampled_rows
from statetap.core.spec import HiddenArray

_ITEM = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}
# Sums of squares that float32 holds with all its digits. Others are taken again in float64, which holds them for every float32.
_LEAST_SQUARES, _MOST_SQUARES = 1e-30, 1e38


def sampled_norms(views: Sequence[memoryview], array: HiddenArray) -> ArrayNorms:
    """Of one hidden array, whose rows are those of `views` one after the other. All values must be finite."""
    views = [view.cast("B") for view in views]
    rows = sampled_rows(sum(map(len, views)) // array.row_bytes)
    taken = _Norms(array)
    norms: list[tuple[float, ...]] = []
    first = 0
    with np.errstate(over="ignore", under="ignore"):
        for view in views:
            after = first + len(view) // array.row_bytes
            while len(norms) < len(rows) and rows[len(norms)] < after:
                norms.append(taken.of(view, rows[len(norms)] - first))
            first = after
    return ArrayNorms(array.name, rows, tuple(norms))


class _Norms:
    """Row by row, in one buffer that stays in the cache."""

    def __init__(self, array: HiddenArray) -> None:
        self._row_bytes = array.row_bytes
        self._item = _ITEM[array.dtype]
        self._floats = np.empty((prod(array.row_shape[:-1]), array.row_shape[-1]), np.float32)
        # bfloat16 is the upper half of a float32.
        self._bits = self._floats.view(np.uint32)
        self._across, self._down = self._floats[:, None, :], self._floats[:, :, None]

    def of(self, view: memoryview, row: int) -> tuple[float, ...]:
        """The norm of each vector of a row."""
        values = np.frombuffer(view, self._item, self._floats.size, row * self._row_bytes).reshape(self._floats.shape)
        if self._item is np.uint16:
            self._bits[...] = values
            np.left_shift(self._bits, np.uint32(16), out=self._bits)
        else:
            self._floats[...] = values
        squares = (self._across @ self._down).ravel().tolist()
        return tuple(
            sqrt(square if _LEAST_SQUARES < square < _MOST_SQUARES else _exactly(vector))
            for square, vector in zip(squares, self._floats, strict=True)
        )


def _exactly(vector: NDArray[np.float32]) -> float:
    doubles = vector.astype(np.float64)
    return float(doubles @ doubles)
