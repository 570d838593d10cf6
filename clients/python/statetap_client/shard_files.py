"""Reads rows of one hidden array by byte range from local, uncompressed shard files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from statetap_client import layout, sharding
from statetap_client.byte_ranges import ByteRange, RangeFile


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows `[row_start, row_start + rows)` of an array, and the memory whose first bytes they become.

    What follows them in `memory` may be written over too.
    """

    row_start: int
    rows: int
    memory: memoryview


class MissingRows(Exception):
    """Rows that were never written, or whose object is damaged: they are of the range that starts at `row_start`."""

    def __init__(self, row_start: int, message: str) -> None:
        super().__init__(message)
        self.row_start = row_start


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a range that lies in one shard, from the shard's row `first` on."""

    whole: RowRange
    first: int
    rows: int
    memory: memoryview


class ShardFiles:
    """The shard files of one hidden array, as `document` (its zarr.json) lays them out. It holds none of them open.

    `direct`: read past the page cache what is whole pages of file and memory.
    """

    def __init__(self, root: Path, array: str, document: dict[str, Any], *, direct: bool = False) -> None:
        shard_shape = document["chunk_grid"]["configuration"]["chunk_shape"]
        self._root = root
        self._array = array
        self._direct = direct
        self._row_shape = tuple(shard_shape[1:])
        self._rows_per_shard: int = shard_shape[0]
        self._rows_per_chunk: int = document["codecs"][0]["configuration"]["chunk_shape"][0]
        self.row_bytes = layout.row_bytes(self._row_shape, document["data_type"])

    def read(self, wanted: Sequence[RowRange]) -> None:
        """Fill every range's memory; each object is opened once, and neighbours are read in one call.

        Raises:
            MissingRows: an object or a chunk of it is not there, or is damaged.
        """
        shards: dict[int, list[_Piece]] = {}
        for rows in wanted:
            for shard, piece in self._cut(rows):
                shards.setdefault(shard, []).append(piece)
        for shard, pieces in shards.items():
            self._read_shard(shard, pieces)

    def _cut(self, wanted: RowRange) -> Iterator[tuple[int, _Piece]]:
        done = 0
        while done < wanted.rows:
            shard, first = divmod(wanted.row_start + done, self._rows_per_shard)
            count = min(wanted.rows - done, self._rows_per_shard - first)
            rest = wanted.memory[done * self.row_bytes :]
            yield shard, _Piece(wanted, first, count, rest if done + count == wanted.rows else rest[: count * self.row_bytes])
            done += count

    def _read_shard(self, shard: int, pieces: Sequence[_Piece]) -> None:
        key = layout.shard_key(self._array, shard, self._row_shape)
        of = pieces[0].whole.row_start
        try:
            file = RangeFile(self._root / key, direct=self._direct)
        except FileNotFoundError:
            raise MissingRows(of, f"its object {key} is missing") from None
        try:
            chunks = self._rows_per_shard // self._rows_per_chunk
            index_start = max(0, file.nbytes - sharding.index_bytes(chunks))
            index = sharding.decode_index(file.read(index_start, file.nbytes - index_start), chunks)
            ranges: list[ByteRange] = []
            for piece in pieces:
                of = piece.whole.row_start
                ranges += self._ranges(index, piece)
            file.read_into(ranges)
        except ValueError as e:
            raise MissingRows(of, f"its object {key} is damaged: {e}") from e
        finally:
            file.close()

    def _ranges(self, index: NDArray[np.uint64], piece: _Piece) -> Iterator[ByteRange]:
        """Where the piece's bytes are in the object: one range, unless its chunks do not follow each other."""
        first_chunk, skipped = divmod(piece.first, self._rows_per_chunk)
        end_chunk = -(-(piece.first + piece.rows) // self._rows_per_chunk)
        entries = index[first_chunk:end_chunk]
        chunk_bytes = self._rows_per_chunk * self.row_bytes
        if (missing := np.flatnonzero(entries[:, 0] == sharding.MISSING)).size:
            raise ValueError(f"chunk {first_chunk + missing[0]} was never written")
        if (odd := np.flatnonzero(entries[:, 1] != chunk_bytes)).size:
            raise ValueError(f"chunk {first_chunk + odd[0]} has {entries[odd[0], 1]} bytes, {chunk_bytes} were expected")
        offsets = entries[:, 0].astype(np.int64)
        # Runs of chunks that follow each other, as numbers of chunks from the first.
        starts = [0, *(np.flatnonzero(np.diff(offsets) != chunk_bytes) + 1).tolist()]
        done = 0
        for start, end in zip(starts, [*starts[1:], len(offsets)], strict=True):
            inside = skipped if start == 0 else 0
            rows = min((end - start) * self._rows_per_chunk - inside, piece.rows - done)
            memory = piece.memory[done * self.row_bytes :]
            last = done + rows == piece.rows
            nbytes = rows * self.row_bytes
            yield ByteRange(int(offsets[start]) + inside * self.row_bytes, nbytes, memory if last else memory[:nbytes])
            done += rows
