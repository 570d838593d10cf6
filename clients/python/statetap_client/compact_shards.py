"""Turns shards of uncompressed chunks into shards of compressed ones, and vouches for every stored sample on the way.

Invariants: only rows of stored samples are carried over, into zeros; a sample's digest is taken over what its compressed chunks
decode to; one shard is in memory at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numcodecs.blosc import Blosc
from numpy.typing import NDArray

from statetap_client import layout, sharding
from statetap_client.samples import StoreReadError
from statetap_client.shard_files import MissingRows, RowRange, ShardFiles

_BLOSC = Blosc(layout.BLOSC_NAME, layout.BLOSC_LEVEL, Blosc.SHUFFLE, layout.BLOSC_BLOCK_BYTES)


class CorruptSample(StoreReadError):
    """A sample that is marked stored is not what was written; the message names it."""


@dataclass(frozen=True, slots=True)
class PlacedSample:
    """A stored sample: rows `[start, end)` of the store, and the digest that was recorded of them."""

    index: int
    id: str
    start: int
    end: int
    digest: int

    def corrupt(self, reason: str) -> CorruptSample:
        return CorruptSample(f"sample {self.index} (id {self.id!r}) is marked stored, but {reason}")


@dataclass(slots=True)
class ShardRun:
    """Consecutive shards that belong together: no sample reaches beyond them. Every one has rows of its `samples`."""

    first: int
    end: int
    samples: list[PlacedSample] = field(default_factory=list)


def shard_runs(samples: Sequence[PlacedSample], rows_per_shard: int) -> list[ShardRun]:
    """The shards that stored samples have rows in, in the store's order: as many runs as there can be."""
    runs: list[ShardRun] = []
    for sample in sorted(samples, key=lambda placed: placed.start):
        shards = layout.shards_of(sample.start, sample.end - sample.start, rows_per_shard)
        if not runs or shards.start >= runs[-1].end:
            runs.append(ShardRun(shards.start, shards.stop))
        runs[-1].end = max(runs[-1].end, shards.stop)
        runs[-1].samples.append(sample)
    return runs


@dataclass(frozen=True, slots=True)
class _Part:
    """What a sample has in a shard, whose rows are counted from its first."""

    sample: PlacedSample
    hasher: xxhash.xxh3_64
    first: int
    last: int


class CompactArray:
    """One hidden array, `document` its metadata in the store at `source`; its compressed shards go below `target`."""

    def __init__(self, source: Path, target: Path, name: str, document: dict[str, Any]) -> None:
        shard_shape = document["chunk_grid"]["configuration"]["chunk_shape"]
        self._files = ShardFiles(source, name, document)
        self._target = target
        self._name = name
        self._row_shape = tuple(shard_shape[1:])
        self._rows_per_shard: int = shard_shape[0]
        self._rows_per_chunk: int = document["codecs"][0]["configuration"]["chunk_shape"][0]
        # Blosc takes the size of what it shuffles from the array that it is given.
        self._item = np.dtype(f"u{layout.ITEM_BYTES[document['data_type']]}")

    def chunk_bytes(self, run: ShardRun) -> int:
        """Bytes of the chunks that the run's samples have rows in, before compression."""
        size = self._rows_per_chunk
        chunks = {chunk for sample in run.samples for chunk in range(sample.start // size, -(-sample.end // size))}
        return len(chunks) * size * self._files.row_bytes

    def compact(self, shard: int, samples: Sequence[tuple[PlacedSample, xxhash.xxh3_64]]) -> None:
        """Write a shard's object, synced, and feed each sample's hasher with the rows that it has in it.

        Raises:
            CorruptSample: rows of a sample were never written, or are damaged.
        """
        row = shard * self._rows_per_shard
        parts = [
            _Part(sample, hasher, max(sample.start - row, 0), min(sample.end - row, self._rows_per_shard))
            for sample, hasher in samples
            if sample.start < row + self._rows_per_shard and sample.end > row
        ]
        rows = self._read(row, parts)
        self._write(layout.shard_key(self._name, shard, self._row_shape), rows, parts)
        for part in parts:
            part.hasher.update(rows[part.first : part.last].data)

    def _read(self, row: int, parts: Sequence[_Part]) -> NDArray[np.uint8]:
        """The shard's rows as bytes, zero where no part is."""
        rows = np.zeros((self._rows_per_shard, self._files.row_bytes), np.uint8)
        wanted = [
            RowRange(row + part.first, part.last - part.first, rows[part.first : part.last].reshape(-1).data) for part in parts
        ]
        try:
            self._files.read(wanted)
        except MissingRows as e:
            sample = next(part.sample for part in parts if row + part.first == e.row_start)
            raise sample.corrupt(str(e)) from e
        return rows

    def _write(self, key: str, rows: NDArray[np.uint8], parts: Sequence[_Part]) -> None:
        """Chunks with rows of a part, then the index. Afterwards `rows` holds what was read back from the compressed chunks."""
        chunks = rows.reshape(-1, self._rows_per_chunk * self._files.row_bytes)
        touched = np.zeros(len(chunks), np.bool_)
        for part in parts:
            touched[part.first // self._rows_per_chunk : -(-part.last // self._rows_per_chunk)] = True
        lengths = np.zeros(len(chunks), np.int64)
        path = self._target / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            for chunk in np.flatnonzero(touched):
                encoded = _BLOSC.encode(chunks[chunk].view(self._item))
                _BLOSC.decode(encoded, out=chunks[chunk])
                lengths[chunk] = file.write(encoded)
            file.write(sharding.encode_lengths(lengths))
            file.flush()
            os.fsync(file.fileno())


def compact_run(run: ShardRun, arrays: Sequence[CompactArray], check: Callable[[], None]) -> None:
    """Compress a run's shards, array by array as digests are taken. `check` may raise, shard by shard.

    Raises:
        CorruptSample: a sample's digest is not the recorded one, or rows of it are missing.
    """
    samples = [(sample, xxhash.xxh3_64(seed=0)) for sample in run.samples]
    for array in arrays:
        for shard in range(run.first, run.end):
            check()
            array.compact(shard, samples)
    for sample, hasher in samples:
        if hasher.intdigest() != sample.digest:
            raise sample.corrupt(f"the digest of its bytes is {hasher.intdigest():016x}, {sample.digest:016x} was recorded")
