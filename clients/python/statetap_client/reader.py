"""Reads a store sample by sample, as torch tensors or numpy arrays.

A stored sample is one byte range of each hidden array; where the store is local and uncompressed it is read as such, straight
into the memory it is wanted in, else through zarr-python. Statuses and placement are read when the store is opened: open it again
to see more of a store that is being written. A reader may be pickled and forked: it holds no file open.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ml_dtypes
import numpy as np
import xxhash
import zarr
import zarr.storage
from numpy.typing import NDArray

from statetap_client import layout
from statetap_client.layout import Status
from statetap_client.object_stores import ObstoreMissing, connect, first_line, is_object_url, object_store_errors
from statetap_client.sample_memory import Block, SampleBuffer, Shapes, bytes_for, memory_of, new_block, parts
from statetap_client.samples import DigestMismatch, NotAStore, Sample, SampleNotStored, StoreReadError
from statetap_client.shard_files import MissingRows, RowRange, ShardFiles
from statetap_client.store_files import hidden_files, reads_directly, token_files
from statetap_client.token_files import TokenFiles

if TYPE_CHECKING:
    import torch

__all__ = ["DigestMismatch", "NotAStore", "Sample", "SampleBuffer", "SampleNotStored", "StoreReadError", "StoreReader"]

_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


class StoreReader:
    """A store, open for reading. Samples are numbered in dataset order.

    `path` is a directory, or a URL: of an object store (`s3://bucket/run.zarr`), else one that zarr-python opens.

    `direct`: read past the page cache. By default so where the hidden arrays are more than half of this machine's memory, so that
    most of what is read would be gone from the cache by the time that it is wanted again.

    Raises:
        NotAStore: nothing there, not a Statetap store, or a format version that this reader does not know; or an object store
            that cannot be connected to or read from here.
    """

    def __init__(self, path: str | os.PathLike[str], *, direct: bool | None = None) -> None:
        self.path = os.fspath(path)
        self._group = _group(self.path)
        self.attributes = _attributes(self.path, self._group)
        self._hidden = {name: cast("zarr.Array[Any]", self._group[name]) for name in layout.HIDDEN_ARRAYS if name in self._group}
        if "samples/status" not in self._group:
            raise NotAStore(f"{self.path} was not created whole: samples/status is missing; prepare it again")
        if direct is None:
            direct = reads_directly(sum(array.nbytes for array in self._hidden.values()))
        local = None if "://" in self.path else Path(self.path)
        self._files: Mapping[str, ShardFiles] = {} if local is None else hidden_files(local, self._hidden, direct=direct)
        self._token_files: Mapping[str, TokenFiles] = {} if local is None else token_files(local)
        self.statuses: NDArray[np.uint8] = self._column("status")
        self._row_start = self._column("row_start")
        self._length = self._column("length")
        self._next_token = self._column("next_token")
        self._digest = self._column("digest")

    def __len__(self) -> int:
        return len(self.statuses)

    def __iter__(self) -> Iterator[Sample[torch.Tensor]]:
        return (self.sample(int(index)) for index in self.stored)

    @property
    def stored(self) -> NDArray[np.int64]:
        """Indexes of the stored samples, ascending."""
        return np.flatnonzero(self.statuses == Status.STORED)

    @property
    def hidden_arrays(self) -> tuple[str, ...]:
        """Names of the hidden arrays that this store has, in the layout's order."""
        return tuple(self._hidden)

    @property
    def dtype(self) -> str:
        """`bfloat16`, `float16` or `float32`."""
        return str(self.attributes["dtype"])

    @cached_property
    def ids(self) -> list[str]:
        """Every sample's id, in dataset order. Read once."""
        return [str(sample_id) for sample_id in self._column("id")]

    def row_range(self, index: int) -> tuple[int, int]:
        """The sample's rows in the store's arrays, end exclusive, whatever its status."""
        start = int(self._row_start[self._position(index)])
        return start, start + int(self._length[index])

    def recorded_digest(self, index: int) -> int:
        """`samples/digest`: what the writer saw."""
        return int(self._digest[self._position(index)])

    def sample(
        self, index: int, *, rows: tuple[int, int] | None = None, buffer: SampleBuffer | None = None, verify: bool = False
    ) -> Sample[torch.Tensor]:
        """A stored sample as torch tensors; bfloat16 stays bfloat16, bit for bit.

        `rows`, end exclusive and counted from the sample's first, asks for those alone. The tensors have memory of their own, or
        lie in `buffer` until that is read into again. `verify` compares the whole sample's digest with the recorded one.

        Raises:
            IndexError: no such sample, or no such rows of it.
            SampleNotStored: it has another status.
            DigestMismatch: its bytes are not those that were written.
            StoreReadError: its objects are missing or damaged.
        """
        return self._sample(index, rows, buffer, as_torch=True, verify=verify)

    def sample_as_numpy(
        self, index: int, *, rows: tuple[int, int] | None = None, buffer: SampleBuffer | None = None, verify: bool = False
    ) -> Sample[NDArray[Any]]:
        """The same as numpy arrays; bfloat16 is `ml_dtypes.bfloat16`. Raises what `sample` raises."""
        return self._sample(index, rows, buffer, as_torch=False, verify=verify)

    def samples(self, indexes: Sequence[int], *, buffers: Sequence[SampleBuffer] | None = None) -> list[Sample[torch.Tensor]]:
        """Several stored samples, in the order asked for; those that are neighbours in the store are read in one go.

        `buffers` are as many as `indexes`. Raises what `sample` raises.
        """
        if buffers is not None and len(buffers) != len(indexes):
            raise ValueError(f"{len(buffers)} buffers for {len(indexes)} samples: each needs one of its own")
        taken = [_Taken(self, index, None, None if buffers is None else buffers[i]) for i, index in enumerate(indexes)]
        self._fill(taken)
        return [one.sample(as_torch=True) for one in taken]

    def token_rows(self, name: str, first: int, last: int) -> NDArray[Any]:
        """Rows `[first, last)` of `input_ids` or `loss_mask`, as far as the store has them, whosever they are."""
        if name not in self._token_files:
            return cast("NDArray[Any]", self._array(name)[first:last])
        try:
            return self._token_files[name].rows(first, last)
        except ValueError as e:
            raise StoreReadError(f"{self.path}: {e}") from e

    def by_id(self, id: str) -> Sample[torch.Tensor]:  # noqa: A002 (the contract's word)
        """The sample of that id, as `sample` gives it.

        Raises:
            KeyError: no sample has it.
        """
        return self.sample(self.index_of(id))

    def index_of(self, id: str) -> int:  # noqa: A002 (the contract's word)
        """The index of the sample of that id; of the last one where several jobs put the same id into the store."""
        if id not in self._index_by_id:
            raise KeyError(f"no sample of {self.path} has the id {id!r}")
        return self._index_by_id[id]

    def digest(self, index: int) -> int:
        """XXH3-64, seed 0, of the sample's bytes as they stand in the hidden arrays. Raises what `sample` raises."""
        taken = _Taken(self, index, None, None)
        self._fill([taken])
        return taken.digest()

    @cached_property
    def _index_by_id(self) -> Mapping[str, int]:
        return {sample_id: index for index, sample_id in enumerate(self.ids)}

    def _position(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} is outside of the store's {len(self)} samples")
        return index % len(self)

    def _stored_position(self, index: int) -> int:
        index = self._position(index)
        if self.statuses[index] != Status.STORED:
            raise SampleNotStored(index, self.ids[index], Status(int(self.statuses[index])))
        return index

    def _sample(
        self, index: int, rows: tuple[int, int] | None, buffer: SampleBuffer | None, *, as_torch: bool, verify: bool
    ) -> Sample[Any]:
        taken = _Taken(self, index, rows, buffer)
        self._fill([taken])
        if verify:
            whole = taken.digest() if rows is None else self.digest(index)
            if whole != self.recorded_digest(index):
                raise DigestMismatch(
                    f"sample {taken.index} (id {self.ids[taken.index]!r}) has the digest {whole:016x}, "
                    f"{self.recorded_digest(index):016x} was recorded when it was written"
                )
        return taken.sample(as_torch=as_torch)

    def _shapes(self, rows: int) -> Shapes:
        hidden = {name: ((rows, *array.shape[1:]), _NUMPY_DTYPES[self.dtype]) for name, array in self._hidden.items()}
        return hidden | {name: ((rows,), np.dtype(dtype)) for name, dtype in layout.TOKEN_ARRAYS.items()}

    def _fill(self, taken: Sequence[_Taken]) -> None:
        for name, array in self._hidden.items():
            if name in self._files:
                wanted = [RowRange(one.start, one.end - one.start, memory_of(one.block, one.arrays[name])) for one in taken]
                try:
                    self._files[name].read(wanted)
                except MissingRows as e:
                    index = next(one.index for one in taken if one.start == e.row_start)
                    raise StoreReadError(f"sample {index} (id {self.ids[index]!r}) is marked stored, but {e}") from e
                continue
            for one in taken:
                try:
                    one.arrays[name][...] = cast("NDArray[Any]", array[one.start : one.end])
                except object_store_errors() as e:
                    raise StoreReadError(f"sample {one.index}: {name} of {self.path} could not be read: {first_line(e)}") from e
        for one in taken:
            for name in layout.TOKEN_ARRAYS:
                one.arrays[name][...] = self.token_rows(name, one.start, one.end)

    def _array(self, name: str) -> zarr.Array[Any]:
        return cast("zarr.Array[Any]", self._group[name])

    def _column(self, name: str) -> NDArray[Any]:
        return cast("NDArray[Any]", self._array(f"{layout.SAMPLES_GROUP}/{name}")[:])


class _Taken:
    """Rows of one stored sample, `[start, end)` of the store, and the memory that they are read into."""

    def __init__(self, reader: StoreReader, index: int, rows: tuple[int, int] | None, buffer: SampleBuffer | None) -> None:
        self._reader = reader
        self.index = reader._stored_position(index)
        start, end = reader.row_range(self.index)
        first, last = (0, end - start) if rows is None else rows
        if not 0 <= first <= last <= end - start:
            raise IndexError(f"rows [{first}, {last}) are outside of the {end - start} rows of sample {self.index}")
        self.start, self.end = start + first, start + last
        shapes = reader._shapes(last - first)
        nbytes = bytes_for(shapes)
        self.block: Block = new_block(nbytes) if buffer is None else buffer.block(nbytes)
        self.arrays = parts(self.block, shapes)

    def digest(self) -> int:
        hasher = xxhash.xxh3_64(seed=0)
        for name in self._reader.hidden_arrays:
            hasher.update(self.arrays[name].view(np.uint8).data)
        return hasher.intdigest()

    def sample(self, *, as_torch: bool) -> Sample[Any]:
        dtypes = dict.fromkeys(self._reader.hidden_arrays, self._reader.dtype) | layout.TOKEN_ARRAYS
        found = {name: self.block.tensor_of(array, dtypes[name]) if as_torch else array for name, array in self.arrays.items()}
        return Sample(self.index, self._reader.ids[self.index], int(self._reader._next_token[self.index]), **found)


def _group(path: str) -> zarr.Group:
    unreadable: tuple[type[Exception], ...] = (FileNotFoundError, ValueError, *object_store_errors())
    try:
        store = zarr.storage.ObjectStore(connect(path), read_only=True) if is_object_url(path) else path
        return zarr.open_group(store, mode="r", use_consolidated=False)
    except ObstoreMissing as e:
        raise NotAStore(str(e)) from e
    except unreadable as e:
        raise NotAStore(f"{path} is not a Statetap store: no Zarr v3 group can be opened there ({first_line(e)})") from e


def _attributes(path: str, group: zarr.Group) -> Mapping[str, Any]:
    attributes = group.attrs.asdict().get(layout.ATTRIBUTES_KEY)
    if not isinstance(attributes, dict):
        raise NotAStore(f"{path} is a Zarr group, but not a Statetap store: it has no attribute {layout.ATTRIBUTES_KEY!r}")
    version = attributes.get("format_version")
    if version != layout.FORMAT_VERSION:
        raise NotAStore(
            f"{path} has store format {version!r}, this statetap-client reads format {layout.FORMAT_VERSION}; "
            "install the version of statetap-client that goes with the service that wrote it"
        )
    return attributes
