"""Where every row goes, decided before the first request.

Invariants: ranges of samples never overlap; a sample's rows never cross a unit; units are whole shards; every sample starts at a
multiple of the geometry's alignment. Given the same lengths, geometry and order, the placement is the same, always.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import gcd, lcm

from statetap.core.spec import HiddenArray

PAGE_BYTES = 4096
MAX_ALIGNMENT_ROWS = 64
TARGET_CHUNK_BYTES = 1 << 20
TARGET_SHARD_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Geometry:
    """Rows per shard (S), per chunk (C) and the alignment of a sample's first row, with `S % C == 0` and `C % alignment == 0`.

    Raises:
        ValueError: sizes that do not divide each other.
    """

    rows_per_shard: int
    rows_per_chunk: int
    alignment: int

    def __post_init__(self) -> None:
        if min(self.rows_per_shard, self.rows_per_chunk, self.alignment) < 1:
            raise ValueError("rows_per_shard, rows_per_chunk and alignment must be at least 1")
        if self.rows_per_chunk % self.alignment:
            raise ValueError(f"rows_per_chunk {self.rows_per_chunk} must be a multiple of the alignment, {self.alignment} rows")
        if self.rows_per_shard % self.rows_per_chunk:
            raise ValueError(f"rows_per_shard {self.rows_per_shard} must be a multiple of rows_per_chunk, {self.rows_per_chunk}")


def alignment_rows(arrays: Sequence[HiddenArray]) -> int:
    """The fewest rows whose bytes are whole pages in every hidden array; 1 where that would exceed 64 rows."""
    rows = lcm(*(PAGE_BYTES // gcd(PAGE_BYTES, a.row_bytes) for a in arrays))
    return rows if rows <= MAX_ALIGNMENT_ROWS else 1


def choose_geometry(
    arrays: Sequence[HiddenArray], *, rows_per_shard: int | None = None, rows_per_chunk: int | None = None
) -> Geometry:
    """A geometry near 1 MiB a chunk of the widest array and 256 MiB a unit over all arrays, unless told otherwise.

    Raises:
        ValueError: the given sizes do not fit the alignment or each other.
    """
    alignment = alignment_rows(arrays)
    if rows_per_chunk is None:
        wanted = max(1, TARGET_CHUNK_BYTES // max(a.row_bytes for a in arrays))
        if rows_per_shard is not None:
            wanted = min(wanted, rows_per_shard)
        rows_per_chunk = max(alignment, wanted - wanted % alignment)
        if rows_per_shard is not None and rows_per_shard % rows_per_chunk:
            rows_per_chunk = max(alignment, gcd(rows_per_shard, rows_per_chunk))
    if rows_per_shard is None:
        wanted = TARGET_SHARD_BYTES // sum(a.row_bytes for a in arrays)
        rows_per_shard = max(rows_per_chunk, wanted - wanted % rows_per_chunk)
    return Geometry(rows_per_shard, rows_per_chunk, alignment)


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """A unit: positions `[first, first + count)` of the placement's order, rows `[row_start, row_start + rows)` of the store."""

    index: int
    first: int
    count: int
    row_start: int
    rows: int


@dataclass(frozen=True, slots=True)
class Placement:
    """`order[position]` is a dataset index; `row_starts[position]` is that sample's first row in the store."""

    order: array[int]
    row_starts: array[int]
    units: tuple[UnitPlan, ...]
    first_row: int
    rows: int

    def samples_of(self, unit: UnitPlan) -> Iterator[tuple[int, int]]:
        """(dataset index, row_start) of the unit's samples, in placement order."""
        span = slice(unit.first, unit.first + unit.count)
        return zip(self.order[span], self.row_starts[span], strict=True)


def permutation(count: int, seed: int) -> array[int]:
    """A permutation of `range(count)` that depends on `seed` alone: indexes sorted by BLAKE2b of (seed, index).

    Not `random.shuffle`, whose result Python does not promise to keep: a store that grows or is planned again years later
    must come out the same.
    """
    key = (seed % (1 << 64)).to_bytes(8, "little")
    return array("q", sorted(range(count), key=lambda i: blake2b(i.to_bytes(8, "little"), digest_size=16, key=key).digest()))


def dataset_order(count: int) -> array[int]:
    return array("q", range(count))


def place(
    lengths: Sequence[int], order: Sequence[int], geometry: Geometry, *, first_row: int = 0, first_unit: int = 0
) -> Placement:
    """Cut `order` (dataset indexes) into units of whole shards, each sample's rows within one unit.

    `lengths[i]` is the rows of dataset index i. A sample longer than one shard gets a unit of its own, of as many
    consecutive shards as it needs.

    Raises:
        ValueError: `first_row` is not at a shard boundary, or a sample has no rows.
    """
    shard, align = geometry.rows_per_shard, geometry.alignment
    if first_row % shard:
        raise ValueError(f"first_row {first_row} is not at a boundary of {shard}-row shards")
    row_starts = array("q", bytes(8 * len(order)))
    units: list[UnitPlan] = []
    unit_first, unit_row, used = 0, first_row, 0

    def close(end: int) -> None:
        nonlocal unit_first, unit_row, used
        if end > unit_first:
            rows = -(-used // shard) * shard
            units.append(UnitPlan(first_unit + len(units), unit_first, end - unit_first, unit_row, rows))
            unit_first, unit_row, used = end, unit_row + rows, 0

    for position, index in enumerate(order):
        length = lengths[index]
        if length < 1:
            raise ValueError(f"sample {index} has no rows")
        start = -(-used // align) * align
        if start + length > shard:
            close(position)
            start = 0
        row_starts[position] = unit_row + start
        used = start + length
    close(len(order))
    return Placement(array("q", order), row_starts, tuple(units), first_row, unit_row - first_row)
