"""Writes `input_ids` and `loss_mask` shard by shard, holding one shard of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import zarr
from numpy.typing import NDArray
from statetap_client import layout

from statetap.adapters.store.durable_files import as_store_error, sync_object
from statetap.ports import StoreError, TokenBlock


def write_token_blocks(root: Path, blocks: Iterable[TokenBlock]) -> None:
    """Write blocks that come in row order. Rows that no block covers keep what they have.

    Raises:
        StoreError: the file system failed, or blocks are out of order or beyond the store's rows.
    """
    try:
        group = zarr.open_group(root, mode="r+", use_consolidated=False)
        arrays = {name: cast("zarr.Array[Any]", group[name]) for name in layout.TOKEN_ARRAYS}
        rows = arrays[layout.INPUT_IDS].shape[0]
        for shard, pieces in _by_shard(blocks, rows):
            _write_shard(root, arrays, shard, pieces)
    except OSError as e:
        raise as_store_error(e, f"writing the tokens of {root}") from e


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


def _write_shard(root: Path, arrays: dict[str, zarr.Array[Any]], shard: int, pieces: list[TokenBlock]) -> None:
    first = shard * layout.TOKEN_ROWS_PER_SHARD
    for name, array in arrays.items():
        stored = cast("NDArray[Any]", array[first : first + layout.TOKEN_ROWS_PER_SHARD])
        wanted = stored.copy()
        for piece in pieces:
            wanted[piece.row : piece.row + len(piece.input_ids)] = getattr(piece, name)
        if not np.array_equal(wanted, stored):
            array[first : first + len(wanted)] = wanted
            sync_object(root / layout.chunk_key(name, shard))
