"""Rows that are not what their source computed: their bytes do not add up to the checksums that came with them.

A source sums the bits of each row before anything copies it (`statetap_sglang.checksum`), so a buffer that was used again, or
copied half, cannot pass for what stood there. The sum is taken anew here, block by block, in the pass that hashes the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from statetap_sglang.checksum import word_bytes

from statetap.core.spec import ITEM_BYTES, HiddenArray


class RowSums:
    """The sums of one capture, dump by dump. `checksums` are those that came with its dumps, None where none did."""

    def __init__(self, checksums: Sequence[memoryview | None]) -> None:
        self._wanted = [None if given is None else np.frombuffer(given, "<i8") for given in checksums]
        self._sums = [np.zeros(0 if wanted is None else len(wanted), np.int64) for wanted in self._wanted]
        self._rows = [0 for _ in checksums]

    def add(self, part: int, row: int, array: HiddenArray, block: memoryview) -> None:
        """Count in whole rows of one array: the first of `block` is row `row` of the capture's dump number `part`."""
        count = len(block) // array.row_bytes
        self._rows[part] = max(self._rows[part], row + count)
        if self._wanted[part] is not None:
            words = np.frombuffer(block, f"<i{word_bytes(array.row_shape[-1] * ITEM_BYTES[array.dtype])}")
            self._sums[part][row : row + count] += words.reshape(count, -1).sum(axis=1, dtype=np.int64)

    def difference(self) -> str | None:
        """Which rows differ, counted from the capture's first; None if none does. All arrays must have been counted in."""
        differing: list[int] = []
        first_row = 0
        for wanted, sums, rows in zip(self._wanted, self._sums, self._rows, strict=True):
            if wanted is not None:
                differing += (np.flatnonzero(wanted != sums) + first_row).tolist()
            first_row += rows
        if not differing:
            return None
        return f"{len(differing)} rows, the first of them row {differing[0]}, are not what their source computed"
