"""The bytes of a compressed shard object: chunk by chunk, each decoded again and compared before any of it is written.

As in an uncompressed object, a chunk that no piece touches is missing, and rows of a touched chunk without a piece are zero. One
chunk is in memory at a time, three times: as it is, compressed, and decoded again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from statetap_client import chunk_codec, layout, sharding

from statetap.adapters.store.direct_io import SharedMappings
from statetap.adapters.store.shard_assembly import Piece, ShardPlan, in_windows
from statetap.ports import StoreError


def compressed_windows(plan: ShardPlan, mappings: SharedMappings | None) -> Iterator[list[memoryview]]:
    """The object's bytes in order, at most WINDOW_BYTES at a time; of `mappings`, what was read is dropped.

    Raises:
        StoreError: what a chunk was compressed to is not what was compressed.
    """
    chunk, decoded = np.zeros(plan.chunk_bytes, np.uint8), np.empty(plan.chunk_bytes, np.uint8)
    lengths = np.zeros(plan.geometry.rows_per_shard // plan.geometry.rows_per_chunk, np.int64)
    for number, pieces in plan.chunks():
        _fill(chunk, pieces, plan.array.row_bytes)
        if mappings is not None:
            mappings.drop(piece.data for piece in pieces)
        encoded = chunk_codec.encode(chunk, layout.ITEM_BYTES[plan.array.dtype])
        if not _decodes_to(encoded, chunk, decoded):
            raise StoreError(
                f"chunk {number} of {plan.key} is not what was compressed once it is decoded again: "
                "test this machine's memory, or submit the job with compression 'none'"
            )
        lengths[number] = len(encoded)
        for window in in_windows(memoryview(encoded)):
            yield [window]
    for window in in_windows(memoryview(sharding.encode_lengths(lengths))):
        yield [window]


def _fill(chunk: NDArray[np.uint8], pieces: list[Piece], row_bytes: int) -> None:
    end = 0
    for piece in pieces:
        start = piece.row * row_bytes
        chunk[end:start] = 0
        end = start + len(piece.data)
        chunk[start:end] = np.frombuffer(piece.data, np.uint8)
    chunk[end:] = 0


def _decodes_to(encoded: bytes, chunk: NDArray[np.uint8], decoded: NDArray[np.uint8]) -> bool:
    try:
        chunk_codec.decode_into(encoded, decoded)
    except RuntimeError:
        return False
    return np.array_equal(chunk, decoded)
