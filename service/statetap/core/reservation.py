"""How many bytes a unit's dumps may take in a dump directory: what is reserved before the unit is leased."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from statetap.core.capture import TOKEN_BYTES
from statetap.core.placement import PAGE_BYTES
from statetap.core.spec import HiddenArray


def dump_bytes(length: int, arrays: Sequence[HiddenArray], chunk: int | None) -> int:
    """Bytes of the dumps of one sample of `length` tokens: a pass is one dump, a header takes a page, every tensor starts on one.

    `chunk` is the worker's chunk size in tokens, None if it never splits a prompt. A short prompt may still be split once, where
    it shares a pass.
    """
    passes = 2 if chunk is None else -(-length // chunk) + 1
    row_bytes = TOKEN_BYTES + sum(array.row_bytes for array in arrays)
    return length * row_bytes + passes * PAGE_BYTES * (len(arrays) + 2)


def unit_dump_bytes(lengths: Iterable[int], arrays: Sequence[HiddenArray], chunk: int | None) -> int:
    return sum(dump_bytes(length, arrays, chunk) for length in lengths)
