"""What is inside a shard object: the sharding codec's format, index at the end, chunks uncompressed and in row order.

    chunk bytes …  |  (offset, length) of every chunk, two little-endian uint64 each  |  crc32c of those, little-endian uint32

A chunk that is not there has all bits set in both numbers. Source: the Zarr v3 codec `sharding_indexed`, version 1.0.
"""

from __future__ import annotations

import crc32c
import numpy as np
from numpy.typing import NDArray

MISSING = (1 << 64) - 1
ENTRY_BYTES = 16
CHECKSUM_BYTES = 4


def index_bytes(chunks: int) -> int:
    """Size of the index of a shard of `chunks` chunks, its checksum included."""
    return chunks * ENTRY_BYTES + CHECKSUM_BYTES


def encode_index(present: NDArray[np.bool_], chunk_bytes: int) -> bytes:
    """The index of a shard whose present chunks (bool `[chunks]`) stand one after the other from offset 0."""
    return encode_lengths(present * np.int64(chunk_bytes))


def encode_lengths(lengths: NDArray[np.int64]) -> bytes:
    """The same for chunks of different lengths (int64 `[chunks]`, in bytes); one of no length is not there."""
    entries = np.full((len(lengths), 2), MISSING, "<u8")
    present = lengths > 0
    entries[present, 0] = (np.cumsum(lengths) - lengths)[present]
    entries[present, 1] = lengths[present]
    body = entries.tobytes()
    return body + crc32c.crc32c(body).to_bytes(CHECKSUM_BYTES, "little")


def decode_index(data: bytes, chunks: int) -> NDArray[np.uint64]:
    """(offset, length) of every chunk, uint64 `[chunks, 2]`, both MISSING where a chunk is not there.

    Raises:
        ValueError: the wrong size or checksum: this is not a whole shard object.
    """
    if len(data) != index_bytes(chunks):
        raise ValueError(f"the index has {len(data)} bytes, {index_bytes(chunks)} were expected")
    body, checksum = data[:-CHECKSUM_BYTES], int.from_bytes(data[-CHECKSUM_BYTES:], "little")
    if crc32c.crc32c(body) != checksum:
        raise ValueError("the index's checksum does not fit its bytes")
    return np.frombuffer(body, "<u8").reshape(chunks, 2)
