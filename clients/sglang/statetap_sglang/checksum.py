"""Row checksums: an exact sum of each row's bits, so that aliased or torn buffers cannot pass for what was computed.

A row's checksum is the sum, modulo 2**64 and as a signed number, of its bytes in all hidden tensors of the dump, read as
little-endian signed words of `word_bytes` bytes. The source takes it on the device before the copy to the host
(`source_row_checksums`), a reader from what it has got (`row_checksums`). A sum of integers does not depend on the order of
its parts, so both come to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from statetap_sglang.format import HIDDEN_TENSORS, ITEM_BYTES, ROW_CHECKSUMS, TensorView

if TYPE_CHECKING:
    import torch

Checksums = npt.NDArray[np.int64]


def word_bytes(row_bytes: int) -> int:
    """The largest of 8, 4 and 2 that divides `row_bytes`, the bytes of one row of one layer.

    Raises:
        ValueError: none of them does; hidden states have items of 2 or 4 bytes.
    """
    for width in (8, 4, 2):
        if row_bytes % width == 0:
            return width
    raise ValueError(f"a row of {row_bytes} bytes is no row of hidden states")


def row_checksums(tensors: Mapping[str, TensorView]) -> Checksums:
    """Checksums `[T]` of a dump's hidden tensors; others in `tensors` are passed over. Copies no more than small blocks."""
    total: Checksums | None = None
    for name in HIDDEN_TENSORS:
        if name not in tensors:
            continue
        tensor = tensors[name]
        width = word_bytes(tensor.shape[-1] * ITEM_BYTES[tensor.dtype])
        words = np.frombuffer(tensor.data, np.dtype(f"<i{width}")).reshape(tensor.rows, -1)
        sums: Checksums = words.sum(axis=1, dtype=np.int64)
        total = sums if total is None else total + sums
    if total is None:
        raise ValueError("no hidden states")
    return total


def differing_rows(tensors: Mapping[str, TensorView]) -> list[int]:
    """The rows whose bytes do not add up to the checksum that came with them; none where the dump carries no checksums."""
    if ROW_CHECKSUMS not in tensors:
        return []
    carried = np.frombuffer(tensors[ROW_CHECKSUMS].data, "<i8")
    return [int(row) for row in np.flatnonzero(carried != row_checksums(tensors))]


def source_row_checksums(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Checksums int64 `[T]` of contiguous hidden tensors `[T, …, H]`, computed where they are, on their current stream."""
    import torch

    words = {8: torch.int64, 4: torch.int32, 2: torch.int16}
    total: torch.Tensor | None = None
    for tensor in tensors:
        width = word_bytes(tensor.shape[-1] * tensor.element_size())
        sums = tensor.flatten(1).view(words[width]).sum(1, dtype=torch.int64)
        total = sums if total is None else total + sums
    if total is None:
        raise ValueError("no hidden states")
    return total
