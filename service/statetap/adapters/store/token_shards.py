"""Writes `input_ids` and `loss_mask` shard by shard, holding one shard of each.

A shard that is not there yet is put together here, byte for byte as zarr-python would, whose codecs take several times as long
for its many small chunks; one that is there is changed by zarr-python.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import numpy as np
import zarr
from numcodecs.zstd import Zstd
from numpy.typing import NDArray
from statetap_client import layout, sharding

from statetap.adapters.store.objects import Objects
from statetap.ports import StoreError, TokenBlock


def write_token_blocks(objects: Objects, blocks: Iterable[TokenBlock]) -> None:
    """Write blocks that come in row order. Rows that no block covers keep what they have.

    Raises:
        StoreError: the place failed, or blocks are out of order or beyond the store's rows.
    """
    with objects.failing("writing the tokens of"):
        group = zarr.open_group(objects.zarr_store(), mode="r+", use_consolidated=False)
        arrays = {name: cast("zarr.Array[Any]", group[name]) for name in layout.TOKEN_ARRAYS}
        rows = arrays[layout.INPUT_IDS].shape[0]
        for shard, pieces in _by_shard(blocks, rows):
            _write_shard(objects, arrays, shard, pieces)


def _by_shard(blocks: Iterable[TokenBlock], rows: int) -> Iterator[tuple[int, list[TokenBlock]]]:
    """Blocks cut at shard boundaries, shard by shard; rows count from the shard's start. Each list is good until the next."""
    current, free_from = 0, 0
    pieces: list[TokenBlock] = []
    for block in blocks:
        end = block.row + len(block.input_ids)
        if block.row < free_from or end > rows or len(block.loss_mask) != len(block.input_ids):
            raise StoreError(
                f"token rows [{block.row}, {end}) overlap others, are out of order, have a mask of another length, "
                f"or leave the store's {rows} rows"
            )
        free_from = end
        start = block.row
        while start < end:
            shard = start // layout.TOKEN_ROWS_PER_SHARD
            first = shard * layout.TOKEN_ROWS_PER_SHARD
            stop = min(end, first + layout.TOKEN_ROWS_PER_SHARD)
            if shard != current and pieces:
                yield current, pieces
                # In place, so that the taker does not keep the blocks either.
                pieces.clear()
            current = shard
            span = slice(start - block.row, stop - block.row)
            pieces.append(TokenBlock(start - first, block.input_ids[span], block.loss_mask[span]))
            start = stop
    if pieces:
        yield current, pieces


def _write_shard(objects: Objects, arrays: dict[str, zarr.Array[Any]], shard: int, pieces: list[TokenBlock]) -> None:
    first = shard * layout.TOKEN_ROWS_PER_SHARD
    for name, array in arrays.items():
        key = layout.chunk_key(name, shard)
        if not objects.exists(key):
            _create(objects, key, _placed(pieces, name, np.zeros(layout.TOKEN_ROWS_PER_SHARD, layout.TOKEN_ARRAYS[name])))
            continue
        stored = cast("NDArray[Any]", array[first : first + layout.TOKEN_ROWS_PER_SHARD])
        wanted = _placed(pieces, name, stored.copy())
        if not np.array_equal(wanted, stored):
            array[first : first + len(wanted)] = wanted
            objects.settle(key)


def _placed(pieces: list[TokenBlock], name: str, values: NDArray[Any]) -> NDArray[Any]:
    for piece in pieces:
        values[piece.row : piece.row + len(piece.input_ids)] = getattr(piece, name)
    return values


def _create(objects: Objects, key: str, values: NDArray[Any]) -> None:
    """Write a shard object of these values; chunks of nothing but zeros are left out, and so is a shard of only those."""
    codec = Zstd(level=layout.ZSTD_LEVEL)
    chunks = values.astype(values.dtype.newbyteorder("<"), copy=False).reshape(-1, layout.TOKEN_ROWS_PER_CHUNK)
    encoded = [bytes(codec.encode(chunk)) if chunk.any() else b"" for chunk in chunks]
    if any(encoded):
        lengths = np.array([len(chunk) for chunk in encoded], np.int64)
        objects.replace(key, b"".join([*encoded, sharding.encode_lengths(lengths)]))
