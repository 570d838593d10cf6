"""Rows that cannot be hidden states: not finite, all zero, or one value throughout.

Everything is done on the bits, as integers: converting to float would cost more than reading. A row of a capture is K vectors of
H elements (or one); each vector is looked at by itself, since one dead layer among K is a fault too.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from statetap.core.spec import HiddenArray

# The bits of the exponent, all set in infinities and NaNs, and all bits but the sign.
_EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}
_MAGNITUDE = {"bfloat16": 0x7FFF, "float16": 0x7FFF, "float32": 0x7FFFFFFF}
_INTEGER: dict[str, type[np.unsignedinteger[Any]]] = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}


class RowChecker:
    """Checks one hidden array of one capture, block by block: small ones are still in the cache from their hashing."""

    def __init__(self, array: HiddenArray) -> None:
        self._array = array
        self._integer = _INTEGER[array.dtype]
        self._signed = np.dtype(self._integer).str.replace("u", "i")
        self._magnitude = self._integer(_MAGNITUDE[array.dtype])
        self._infinity = self._integer(_EXPONENT[array.dtype])
        self._negative_infinity = self._integer(_EXPONENT[array.dtype] + _MAGNITUDE[array.dtype] + 1)
        self._vectors = array.row_shape[0] if len(array.row_shape) == 2 else 1

    def fault(self, block: memoryview, first_row: int) -> str | None:
        """What is wrong with the first faulty row, such as `aux_hidden_states: row 17 is not finite`; None if nothing is.

        `block` is whole rows, the first of which is the capture's row `first_row`.
        """
        bits = np.frombuffer(block, self._integer).reshape(-1, self._array.row_shape[-1])
        # The largest number is that of a negative, the largest signed one of a positive: no copy without the signs is needed.
        if bits.max() >= self._negative_infinity or bits.view(self._signed).max() >= self._infinity:
            vector = int(np.flatnonzero(((bits & self._magnitude) >= self._infinity).any(axis=1))[0])
            return self._describe(vector, first_row, "is not finite")
        # Three elements tell nearly every vector apart from a constant one; the rest is looked at whole.
        first, middle, last = (bits[:, [0, bits.shape[1] // 2, -1]] & self._magnitude).T
        for vector in np.flatnonzero((first == middle) & (first == last)).tolist():
            if not (bits[vector] & self._magnitude).any():
                return self._describe(vector, first_row, "is all zero")
            if bits.shape[1] > 1 and (bits[vector] == bits[vector, 0]).all():
                return self._describe(vector, first_row, "is constant")
        return None

    def _describe(self, vector: int, first_row: int, fault: str) -> str:
        row, slot = divmod(vector, self._vectors)
        layer = f" in layer {slot + 1} of {self._vectors}" if self._vectors > 1 else ""
        return f"{self._array.name}: row {first_row + row} {fault}{layer}"
