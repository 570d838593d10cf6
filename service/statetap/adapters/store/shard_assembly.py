"""How a unit's segments become shard objects: pure arithmetic on buffers, no copy of any payload.

A chunk that no segment touches is missing and takes no space; rows of a touched chunk without a segment are zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray
from statetap_client import layout, sharding

from statetap.adapters.store.object_files import WINDOW_BYTES
from statetap.core.placement import Geometry
from statetap.core.spec import Compression, HiddenArray
from statetap.ports import Segment, UnitWrite

_ZEROS = memoryview(bytes(1 << 20))


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one shard or chunk: `data` goes to its row `row`."""

    row: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One shard object to be: its key, and its pieces in row order. It has at least one piece."""

    key: str
    array: HiddenArray
    geometry: Geometry
    pieces: tuple[Piece, ...]
    compression: Compression = Compression.NONE

    @property
    def nbytes(self) -> int:
        """The object's size, uncompressed: its chunks that are there, and the index."""
        present = self._present()
        return int(np.count_nonzero(present)) * self.chunk_bytes + sharding.index_bytes(len(present))

    @property
    def chunk_bytes(self) -> int:
        """A chunk's size, uncompressed."""
        return self.geometry.rows_per_chunk * self.array.row_bytes

    def chunks(self) -> Iterator[tuple[int, list[Piece]]]:
        """The chunks that are there, in order, each its number in the shard and its pieces, whose rows count from its first."""
        size, row_bytes = self.geometry.rows_per_chunk, self.array.row_bytes
        cut = (part for piece in self.pieces for part in _cut_rows(piece.row, piece.data, row_bytes, size))
        for chunk, parts in groupby(cut, key=itemgetter(0)):
            yield chunk, [piece for _, piece in parts]

    def windows(self) -> Iterator[list[memoryview]]:
        """The uncompressed object's bytes in order, as many buffers at a time as make WINDOW_BYTES or less."""
        window: list[memoryview] = []
        nbytes = 0
        for buffer in self.buffers():
            if nbytes + len(buffer) > WINDOW_BYTES:
                yield window
                window, nbytes = [], 0
            window.append(buffer)
            nbytes += len(buffer)
        yield window

    def buffers(self) -> Iterator[memoryview]:
        """The uncompressed object's bytes in order, in buffers of at most WINDOW_BYTES."""
        row_bytes = self.array.row_bytes
        chunk_rows = self.geometry.rows_per_chunk
        row = 0
        for piece in self.pieces:
            yield from _zeros(self._gap_rows(row, piece.row) * row_bytes)
            yield from in_windows(piece.data)
            row = piece.row + len(piece.data) // row_bytes
        yield from _zeros(-row % chunk_rows * row_bytes)
        yield memoryview(sharding.encode_index(self._present(), chunk_rows * row_bytes))

    def _present(self) -> NDArray[np.bool_]:
        present = np.zeros(self.geometry.rows_per_shard // self.geometry.rows_per_chunk, np.bool_)
        for piece in self.pieces:
            end = piece.row + len(piece.data) // self.array.row_bytes
            present[piece.row // self.geometry.rows_per_chunk : -(-end // self.geometry.rows_per_chunk)] = True
        return present

    def _gap_rows(self, start: int, end: int) -> int:
        """How many of the rows `[start, end)`, between two pieces, lie in chunks that a piece touches: the ends' alone."""
        size = self.geometry.rows_per_chunk
        return end - start if start // size == end // size else -start % size + end % size


def plan_shards(unit: UnitWrite) -> list[ShardPlan]:
    """The shard objects of a unit, array by array, in row order; shards without any segment have no object.

    Raises:
        ValueError: the unit is not whole shards, or its segments are not what the port asks for.
    """
    shard_rows = unit.geometry.rows_per_shard
    if unit.row_start % shard_rows or unit.rows % shard_rows or unit.rows < 1:
        raise ValueError(f"rows [{unit.row_start}, +{unit.rows}) are not whole shards of {shard_rows} rows")
    known = {array.name for array in unit.arrays}
    strangers = {segment.array for segment in unit.segments} - known
    if strangers:
        raise ValueError(f"segments of {sorted(strangers)}, the unit has {sorted(known)}")
    first_shard = unit.row_start // shard_rows
    plans = []
    for array in unit.arrays:
        pieces = _cut(array, [s for s in unit.segments if s.array == array.name], unit.rows, shard_rows)
        for shard in sorted(pieces):
            key = layout.shard_key(array.name, first_shard + shard, array.row_shape)
            plans.append(ShardPlan(key, array, unit.geometry, tuple(pieces[shard]), unit.compression))
    return plans


def shard_keys(arrays: Sequence[HiddenArray], geometry: Geometry, row_start: int, rows: int) -> list[str]:
    """The keys of all objects that a unit of these rows can have."""
    shards = layout.shards_of(row_start, rows, geometry.rows_per_shard)
    return [layout.shard_key(array.name, shard, array.row_shape) for array in arrays for shard in shards]


def _cut(array: HiddenArray, segments: Sequence[Segment], unit_rows: int, shard_rows: int) -> dict[int, list[Piece]]:
    """Segments of one array as pieces by shard of the unit."""
    pieces: dict[int, list[Piece]] = {}
    free_from = 0
    for segment in segments:
        data = segment.data.cast("B")
        rows, rest = divmod(len(data), array.row_bytes)
        if rest:
            raise ValueError(f"{array.name}: a segment of {len(data)} bytes is not whole rows of {array.row_bytes}")
        if segment.row < free_from or segment.row + rows > unit_rows:
            raise ValueError(
                f"{array.name}: rows [{segment.row}, {segment.row + rows}) overlap others, "
                f"are out of order, or leave the unit's {unit_rows} rows"
            )
        free_from = segment.row + rows
        for shard, piece in _cut_rows(segment.row, data, array.row_bytes, shard_rows):
            pieces.setdefault(shard, []).append(piece)
    return pieces


def _cut_rows(row: int, data: memoryview, row_bytes: int, size: int) -> Iterator[tuple[int, Piece]]:
    """Rows from `row` on, cut where a part of `size` rows ends: the parts' numbers, and what lies in each."""
    rows, done = len(data) // row_bytes, 0
    while done < rows:
        part, first = divmod(row + done, size)
        count = min(rows - done, size - first)
        yield part, Piece(first, data[done * row_bytes : (done + count) * row_bytes])
        done += count


def in_windows(data: memoryview) -> Iterator[memoryview]:
    """`data` in buffers of at most WINDOW_BYTES."""
    for start in range(0, len(data), WINDOW_BYTES):
        yield data[start : start + WINDOW_BYTES]


def _zeros(count: int) -> Iterator[memoryview]:
    while count > 0:
        yield _ZEROS[:count]
        count -= min(count, len(_ZEROS))
