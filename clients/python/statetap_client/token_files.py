"""Reads rows of `input_ids` and `loss_mask` from local shard files: small zstd chunks, a few of them kept decoded.

It does what zarr-python would, without its event loop's thread: a forked DataLoader worker may use it at once.
"""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any, cast

import numpy as np
from numcodecs import zstd
from numpy.typing import NDArray

from statetap_client import layout, sharding
from statetap_client.byte_ranges import RangeFile

CACHED_CHUNKS = 16


class TokenFiles:
    """The shard files of one token array, as `document` (its zarr.json) lays them out. It holds none of them open."""

    def __init__(self, root: Path, array: str, document: dict[str, Any]) -> None:
        self._root = root
        self._array = array
        self._dtype = np.dtype(document["data_type"]).newbyteorder("<")
        self._rows: int = document["shape"][0]
        self._rows_per_shard: int = document["chunk_grid"]["configuration"]["chunk_shape"][0]
        self._rows_per_chunk: int = document["codecs"][0]["configuration"]["chunk_shape"][0]
        self._decoded: OrderedDict[int, NDArray[Any]] = OrderedDict()

    def rows(self, first: int, last: int) -> NDArray[Any]:
        """Rows `[first, last)` as far as the array has them, zero where nothing was written.

        Raises:
            ValueError: an object is damaged; the message names it.
        """
        last = min(last, self._rows)
        found = np.empty(max(0, last - first), self._dtype.newbyteorder("="))
        row = first
        while row < last:
            number, inside = divmod(row, self._rows_per_chunk)
            part = self._chunk(number)[inside : inside + last - row]
            found[row - first : row - first + len(part)] = part
            row += len(part)
        return found

    def _chunk(self, number: int) -> NDArray[Any]:
        if number in self._decoded:
            self._decoded.move_to_end(number)
            return self._decoded[number]
        decoded = self._read_chunk(number)
        self._decoded[number] = decoded
        if len(self._decoded) > CACHED_CHUNKS:
            self._decoded.popitem(last=False)
        return decoded

    def _read_chunk(self, number: int) -> NDArray[Any]:
        chunks = self._rows_per_shard // self._rows_per_chunk
        shard, chunk = divmod(number, chunks)
        key = layout.chunk_key(self._array, shard)
        try:
            file = RangeFile(self._root / key)
        except FileNotFoundError:
            return np.zeros(self._rows_per_chunk, self._dtype)
        try:
            index_start = max(0, file.nbytes - sharding.index_bytes(chunks))
            index = sharding.decode_index(file.read(index_start, file.nbytes - index_start), chunks)
            offset, length = (int(n) for n in index[chunk])
            if offset == sharding.MISSING:
                return np.zeros(self._rows_per_chunk, self._dtype)
            data = cast("bytes", zstd.decompress(file.read(offset, length)))
            if len(data) != self._rows_per_chunk * self._dtype.itemsize:
                raise ValueError(f"chunk {chunk} has {len(data)} bytes, not {self._rows_per_chunk * self._dtype.itemsize}")
            return np.frombuffer(data, self._dtype)
        except (ValueError, RuntimeError) as e:
            raise ValueError(f"the object {key} is damaged: {e}") from e
        finally:
            file.close()
