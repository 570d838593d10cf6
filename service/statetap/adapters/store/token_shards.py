"""Writes `input_ids` and `loss_mask` shard by shard, holding three shards of each: one that fills, two that are written.

A shard that is not there yet is put together here, byte for byte as zarr-python would, whose codecs take several times as long
for its many small chunks; one that is there is changed by zarr-python. Compression lets go of the interpreter's lock, and a sync
waits for the disk: shards are written by threads. Each is an object of its own, so their order does not matter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import starmap
from typing import Any, cast

import numpy as np
import zarr
from numcodecs.zstd import Zstd
from numpy.typing import NDArray
from statetap_client import layout, sharding

from statetap.adapters.store.objects import Objects
from statetap.ports import StoreError, TokenBlock

WRITERS = 2


@dataclass(slots=True)
class _Shard:
    """A shard's values of every token array, 0 where no block came, and the rows `[first, stop)` that blocks covered."""

    number: int
    values: dict[str, NDArray[Any]]
    covered: list[tuple[int, int]]

    @classmethod
    def empty(cls, number: int) -> _Shard:
        return cls(
            number, {name: np.zeros(layout.TOKEN_ROWS_PER_SHARD, dtype) for name, dtype in layout.TOKEN_ARRAYS.items()}, []
        )

    def put(self, block: TokenBlock, span: slice) -> None:
        """Take the rows `span` of a block that comes after all others."""
        first = block.row + span.start - self.number * layout.TOKEN_ROWS_PER_SHARD
        stop = first + span.stop - span.start
        for name, values in self.values.items():
            values[first:stop] = getattr(block, name)[span]
        if self.covered and self.covered[-1][1] == first:
            first, _ = self.covered.pop()
        self.covered.append((first, stop))


def write_token_blocks(objects: Objects, blocks: Iterable[TokenBlock]) -> None:
    """Write blocks that come in row order. Rows that no block covers keep what they have.

    Raises:
        StoreError: the place failed, or blocks are out of order or beyond the store's rows.
    """
    with objects.failing("writing the tokens of"):
        group = zarr.open_group(objects.zarr_store(), mode="r+", use_consolidated=False)
        arrays = {name: cast("zarr.Array[Any]", group[name]) for name in layout.TOKEN_ARRAYS}
        rows = arrays[layout.INPUT_IDS].shape[0]
        writing: deque[Future[None]] = deque()
        # However it ends, no thread writes any more then.
        with ThreadPoolExecutor(WRITERS, thread_name_prefix="token-writer") as writers:
            for shard in _by_shard(blocks, rows):
                writing.append(writers.submit(_write_shard, objects, arrays, shard))
                if len(writing) == WRITERS:
                    writing.popleft().result()
            for written in writing:
                written.result()


def _by_shard(blocks: Iterable[TokenBlock], rows: int) -> Iterator[_Shard]:
    """Shard by shard, those that blocks have rows of."""
    shard: _Shard | None = None
    free_from = 0
    for block in blocks:
        start, end = block.row, block.row + len(block.input_ids)
        if start < free_from or end > rows or len(block.loss_mask) != len(block.input_ids):
            raise StoreError(
                f"token rows [{start}, {end}) overlap others, are out of order, have a mask of another length, "
                f"or leave the store's {rows} rows"
            )
        free_from = end
        while start < end:
            number = start // layout.TOKEN_ROWS_PER_SHARD
            stop = min(end, (number + 1) * layout.TOKEN_ROWS_PER_SHARD)
            if shard is None or shard.number != number:
                if shard is not None:
                    yield shard
                shard = _Shard.empty(number)
            shard.put(block, slice(start - block.row, stop - block.row))
            start = stop
    if shard is not None:
        yield shard


def _write_shard(objects: Objects, arrays: dict[str, zarr.Array[Any]], shard: _Shard) -> None:
    first = shard.number * layout.TOKEN_ROWS_PER_SHARD
    for name, array in arrays.items():
        key = layout.chunk_key(name, shard.number)
        if not objects.exists(key):
            _create(objects, key, shard.values[name])
            continue
        stored = cast("NDArray[Any]", array[first : first + layout.TOKEN_ROWS_PER_SHARD])
        wanted = stored.copy()
        for covered in starmap(slice, shard.covered):
            wanted[covered] = shard.values[name][covered]
        if not np.array_equal(wanted, stored):
            array[first : first + len(wanted)] = wanted
            objects.settle(key)


def _create(objects: Objects, key: str, values: NDArray[Any]) -> None:
    """Write a shard object of these values; chunks of nothing but zeros are left out, and so is a shard of only those."""
    codec = Zstd(level=layout.ZSTD_LEVEL)
    chunks = values.astype(values.dtype.newbyteorder("<"), copy=False).reshape(-1, layout.TOKEN_ROWS_PER_CHUNK)
    encoded = [bytes(codec.encode(chunk)) if chunk.any() else b"" for chunk in chunks]
    if any(encoded):
        lengths = np.array([len(chunk) for chunk in encoded], np.int64)
        objects.replace(key, b"".join([*encoded, sharding.encode_lengths(lengths)]))
