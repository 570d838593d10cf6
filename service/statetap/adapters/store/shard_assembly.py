"""How a unit's segments become shard objects: pure arithmetic on buffers, no copy of any payload.

A chunk that no segment touches is missing and takes no space; rows of a touched chunk without a segment are zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from statetap_client import layout, sharding

from statetap.adapters.store.object_files import WINDOW_BYTES
from statetap.core.placement import Geometry
from statetap.core.spec import HiddenArray
from statetap.ports import Segment, UnitWrite

_ZEROS = memoryview(bytes(1 << 20))


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one shard: `data` goes to row `row` of the shard."""

    row: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One shard object to be: its key, and its pieces in row order. It has at least one piece."""

    key: str
    array: HiddenArray
    geometry: Geometry
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """The object's size: its chunks that are there, and the index."""
        present = self._present()
        chunk_bytes = self.geometry.rows_per_chunk * self.array.row_bytes
        return int(np.count_nonzero(present)) * chunk_bytes + sharding.index_bytes(len(present))

    def windows(self) -> Iterator[list[memoryview]]:
        """The object's bytes in order, as many buffers at a time as make WINDOW_BYTES or less."""
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
        """The object's bytes in order, in buffers of at most WINDOW_BYTES."""
        row_bytes = self.array.row_bytes
        chunk_rows = self.geometry.rows_per_chunk
        row = 0
        for piece in self.pieces:
            yield from _zeros(self._gap_rows(row, piece.row) * row_bytes)
            yield from _windows(piece.data)
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
            plans.append(ShardPlan(key, array, unit.geometry, tuple(pieces[shard])))
    return plans


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
        done = 0
        while done < rows:
            shard, row = divmod(segment.row + done, shard_rows)
            count = min(rows - done, shard_rows - row)
            piece = data[done * array.row_bytes : (done + count) * array.row_bytes]
            pieces.setdefault(shard, []).append(Piece(row, piece))
            done += count
    return pieces


def _windows(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), WINDOW_BYTES):
        yield data[start : start + WINDOW_BYTES]


def _zeros(count: int) -> Iterator[memoryview]:
    while count > 0:
        yield _ZEROS[:count]
        count -= min(count, len(_ZEROS))
