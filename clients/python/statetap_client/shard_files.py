"""Reads rows of one hidden array by byte range from local, uncompressed shard files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from statetap_client import layout, sharding


class MissingRows(Exception):
    """Rows that were never written, or whose object is damaged. The message names the object."""


class ShardFiles:
    """The shard files of one hidden array, as `document` (its zarr.json) lays them out."""

    def __init__(self, root: Path, array: str, document: dict[str, Any]) -> None:
        shard_shape = document["chunk_grid"]["configuration"]["chunk_shape"]
        self._root = root
        self._array = array
        self._row_shape = tuple(shard_shape[1:])
        self._row_bytes = layout.row_bytes(self._row_shape, document["data_type"])
        self._rows_per_shard: int = shard_shape[0]
        self._rows_per_chunk: int = document["codecs"][0]["configuration"]["chunk_shape"][0]

    def read_into(self, rows: NDArray[np.uint8], row_start: int) -> None:
        """Fill `rows` (bytes, `[count, row bytes]`, contiguous) with the array's rows from `row_start` on.

        Raises:
            MissingRows: an object or a chunk of it is not there, or is damaged.
        """
        done = 0
        while done < len(rows):
            shard, first = divmod(row_start + done, self._rows_per_shard)
            count = min(len(rows) - done, self._rows_per_shard - first)
            self._read_shard(rows[done : done + count], shard, first)
            done += count

    def _read_shard(self, rows: NDArray[np.uint8], shard: int, first: int) -> None:
        key = layout.shard_key(self._array, shard, self._row_shape)
        chunks = self._rows_per_shard // self._rows_per_chunk
        try:
            descriptor = os.open(self._root / key, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise MissingRows(f"its object {key} is missing") from None
        try:
            size = os.fstat(descriptor).st_size
            index_start = max(0, size - sharding.index_bytes(chunks))
            index = sharding.decode_index(os.pread(descriptor, size - index_start, index_start), chunks)
            for offset, piece in self._ranges(index, rows, first):
                _pread_exactly(descriptor, piece, offset)
        except ValueError as e:
            raise MissingRows(f"its object {key} is damaged: {e}") from e
        finally:
            os.close(descriptor)

    def _ranges(self, index: NDArray[np.uint64], rows: NDArray[np.uint8], first: int) -> list[tuple[int, NDArray[np.uint8]]]:
        """(offset in the object, where its bytes go), neighbours in one."""
        ranges: list[tuple[int, NDArray[np.uint8]]] = []
        done, expected = 0, -1
        run_start = run_offset = 0
        while done < len(rows):
            chunk, inside = divmod(first + done, self._rows_per_chunk)
            count = min(len(rows) - done, self._rows_per_chunk - inside)
            offset, length = (int(number) for number in index[chunk])
            if offset == sharding.MISSING:
                raise ValueError(f"chunk {chunk} was never written")
            if length != self._rows_per_chunk * self._row_bytes:
                raise ValueError(f"chunk {chunk} has {length} bytes, {self._rows_per_chunk * self._row_bytes} were expected")
            offset += inside * self._row_bytes
            if offset != expected:
                if done:
                    ranges.append((run_offset, rows[run_start:done]))
                run_start, run_offset = done, offset
            expected = offset + count * self._row_bytes
            done += count
        ranges.append((run_offset, rows[run_start:done]))
        return ranges


def _pread_exactly(descriptor: int, rows: NDArray[np.uint8], offset: int) -> None:
    view = rows.data.cast("B")
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise ValueError(f"it ends at byte {offset + done}")
        done += count
