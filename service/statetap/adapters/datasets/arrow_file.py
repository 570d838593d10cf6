"""A dataset's file: an Arrow IPC file with the columns `id`, `input_ids` and `loss_mask`, in dataset order.

The schema's metadata says what the dataset is bound to. Its sha256 is known only at the end, and so stands in the metadata of a
last record batch that has no rows (`statetap_client.dataset_digest` says what it is over).
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator
from mmap import ACCESS_READ, MADV_DONTNEED, mmap
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

COLUMNS = pa.schema([("id", pa.string()), ("input_ids", pa.large_list(pa.int32())), ("loss_mask", pa.large_list(pa.uint8()))])

RESIDENT_BYTES = 64 << 20

Values = TypeVar("Values", NDArray[np.int32], NDArray[np.uint8])


class DatasetFile:
    """Writes one dataset's file; `path` is a temporary name until the caller renames it. Blocking: for a thread."""

    def __init__(self, path: Path, metadata: dict[str, str]) -> None:
        self._path = path
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, COLUMNS.with_metadata(metadata))

    def append(self, records: bytes) -> None:
        """Write a record batch (an IPC message with this file's columns)."""
        self._writer.write_batch(pa.ipc.read_record_batch(pa.py_buffer(records), COLUMNS))

    def finish(self, sha256: str) -> None:
        """Write the end and make the file durable."""
        self._writer.write_batch(pa.RecordBatch.from_pylist([], schema=COLUMNS), custom_metadata={"sha256": sha256})
        self.close()
        with self._path.open("rb") as file:
            os.fsync(file.fileno())

    def close(self) -> None:
        """Let go of the file, finished or not. Idempotent."""
        if self._sink.closed:
            return
        try:
            self._writer.close()
        finally:
            self._sink.close()


class ArrowDataset:
    """A dataset's file, mapped: samples are slices of the mapping. Implements `OpenDataset`.

    Whoever reads it from end to end does not come to hold all of it: every RESIDENT_BYTES that were given out, its pages are let
    go of. They are the file's own, and come back from the page cache when they are touched.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._mapping = mmap(file.fileno(), 0, access=ACCESS_READ)
        self._given_bytes = 0
        reader = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(self._mapping)))
        batches = [batch for batch in map(reader.get_batch, range(reader.num_record_batches)) if batch.num_rows]
        self._ids: list[Any] = [batch.column("id") for batch in batches]
        self._tokens = [_array(batch.column("input_ids").values) for batch in batches]
        self._masks = [_array(batch.column("loss_mask").values) for batch in batches]
        self._offsets = [_array(batch.column("input_ids").offsets) for batch in batches]
        self._starts: list[int] = np.cumsum([0, *(batch.num_rows for batch in batches)]).tolist()
        self._lengths = np.concatenate([np.empty(0, np.int64), *map(np.diff, self._offsets)])

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self._lengths

    def id(self, index: int) -> str:
        batch, row = self._find(index)
        return str(self._ids[batch][row].as_py())

    def ids(self, first: int, stop: int) -> list[str]:
        parts = (self._ids[batch].slice(row, end - row).to_pylist() for batch, row, end in self._parts(first, stop))
        return [id_ for part in parts for id_ in part]

    def input_ids(self, index: int) -> NDArray[np.int32]:
        batch, row = self._find(index)
        return self._given(self._tokens[batch][self._offsets[batch][row] : self._offsets[batch][row + 1]])

    def loss_mask(self, index: int) -> NDArray[np.uint8]:
        batch, row = self._find(index)
        return self._given(self._masks[batch][self._offsets[batch][row] : self._offsets[batch][row + 1]])

    def tokens(self, first: int, stop: int) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """Views of the file, unless the samples are of several of its batches."""
        ids: list[NDArray[np.int32]] = []
        masks: list[NDArray[np.uint8]] = []
        for batch, row, end in self._parts(first, stop):
            offsets = self._offsets[batch]
            span = slice(offsets[row], offsets[end])
            ids.append(self._given(self._tokens[batch][span]))
            masks.append(self._given(self._masks[batch][span]))
        return (ids[0], masks[0]) if len(ids) == 1 else (np.concatenate(ids), np.concatenate(masks))

    def _parts(self, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Batch by batch: which rows `[row, end)` of it are samples `[first, stop)`."""
        if not 0 <= first <= stop <= len(self._lengths):
            raise IndexError(f"samples [{first}, {stop}) of a dataset with {len(self._lengths)}")
        while first < stop:
            batch, row = self._find(first)
            end = min(stop, self._starts[batch + 1])
            yield batch, row, end - self._starts[batch]
            first = end

    def _given(self, values: Values) -> Values:
        self._given_bytes += values.nbytes
        if self._given_bytes > RESIDENT_BYTES:
            self._given_bytes = 0
            self._mapping.madvise(MADV_DONTNEED)
        return values

    def _find(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self._lengths):
            raise IndexError(f"sample {index} of a dataset with {len(self._lengths)}")
        batch = bisect_right(self._starts, index) - 1
        return batch, index - self._starts[batch]


def _array(numbers: Any) -> NDArray[Any]:
    """A view of them. Not `to_numpy`, which imports pandas where it is installed: that takes half a second, and 60 MB."""
    dtype = np.dtype(str(numbers.type))
    _, data = numbers.buffers()
    return np.frombuffer(data or b"", dtype, len(numbers), numbers.offset * dtype.itemsize)
