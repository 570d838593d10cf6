"""Reads a store sample by sample, as torch tensors or numpy arrays.

A stored sample is one byte range of each hidden array; where the store is local and uncompressed it is read as such, straight
into its own memory, else through zarr-python. Statuses and placement are read when the store is opened: open it again to see more
of a store that is being written. A reader may be pickled and forked: it holds no file open.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import ml_dtypes
import numpy as np
import xxhash
import zarr
from numpy.typing import NDArray

from statetap_client import layout
from statetap_client.layout import Status
from statetap_client.shard_files import MissingRows, ShardFiles

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array")

_NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


class StoreReadError(Exception):
    """The store cannot be read as asked; the message says why."""


class NotAStore(StoreReadError):
    """There is no Statetap store at that path, or it has a format that this version does not read."""


class SampleNotStored(StoreReadError):
    """The sample has no hidden states; `status` says what became of it."""

    def __init__(self, index: int, id: str, status: Status) -> None:  # noqa: A002 (the contract's word)
        super().__init__(
            f"sample {index} (id {id!r}) is {status.name.lower()}, not stored: it has no hidden states; "
            "go by `reader.stored` or `reader.statuses`"
        )
        self.index = index
        self.id = id
        self.status = status


@dataclass(frozen=True, slots=True)
class Sample(Generic[Array]):
    """One stored sample of T tokens: `input_ids` int32 `[T]`, `loss_mask` uint8 `[T]`, hidden states in the store's dtype.

    `aux_hidden_states` is `[T, K, H]`, both final states are `[T, H]`; None where the store does not have them.
    `next_token` is what the worker itself answered at temperature 0, -1 if unknown.
    """

    index: int
    id: str
    next_token: int
    input_ids: Array
    loss_mask: Array
    aux_hidden_states: Array | None = None
    last_hidden_states: Array | None = None
    last_hidden_states_prenorm: Array | None = None


class StoreReader:
    """A store, open for reading. Samples are numbered in dataset order; `path` is a directory or a URL that zarr-python opens.

    Raises:
        NotAStore: nothing there, not a Statetap store, or a format version that this reader does not know.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            self._group = zarr.open_group(self.path, mode="r", use_consolidated=False)
        except (FileNotFoundError, ValueError) as e:
            raise NotAStore(f"{self.path} is not a Statetap store: no Zarr v3 group can be opened there ({e})") from e
        self.attributes = _attributes(self.path, self._group)
        self._hidden = {name: cast("zarr.Array[Any]", self._group[name]) for name in layout.HIDDEN_ARRAYS if name in self._group}
        if "samples/status" not in self._group:
            raise NotAStore(f"{self.path} was not created whole: samples/status is missing; prepare it again")
        self._files = {} if "://" in self.path else _shard_files(Path(self.path), self._hidden)
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

    def sample(self, index: int) -> Sample[torch.Tensor]:
        """A stored sample as torch tensors of its own memory; bfloat16 stays bfloat16, bit for bit.

        Raises:
            IndexError: no such sample.
            SampleNotStored: it has another status.
            StoreReadError: its objects are missing or damaged.
        """
        sample = self.sample_as_numpy(index)
        hidden = {name: _tensor(getattr(sample, name)) for name in self._hidden}
        return Sample(sample.index, sample.id, sample.next_token, _tensor(sample.input_ids), _tensor(sample.loss_mask), **hidden)

    def sample_as_numpy(self, index: int) -> Sample[NDArray[Any]]:
        """The same as numpy arrays; bfloat16 is `ml_dtypes.bfloat16`. Raises what `sample` raises."""
        index = self._stored_position(index)
        start, end = self.row_range(index)
        tokens = {name: cast("NDArray[Any]", self._array(name)[start:end]) for name in layout.TOKEN_ARRAYS}
        return Sample(index, self.ids[index], int(self._next_token[index]), **tokens, **dict(self._hidden_rows(index)))

    def token_rows(self, name: str, first: int, last: int) -> NDArray[Any]:
        """Rows `[first, last)` of `input_ids` or `loss_mask`, as far as the store has them, whosever they are."""
        return cast("NDArray[Any]", self._array(name)[first:last])

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
        hasher = xxhash.xxh3_64(seed=0)
        for _, rows in self._hidden_rows(self._stored_position(index)):
            hasher.update(rows.view(np.uint8).data)
        return hasher.intdigest()

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

    def _hidden_rows(self, index: int) -> Iterator[tuple[str, NDArray[Any]]]:
        start, end = self.row_range(index)
        for name, array in self._hidden.items():
            if name not in self._files:
                yield name, np.ascontiguousarray(cast("NDArray[Any]", array[start:end]))
                continue
            rows = np.empty((end - start, *array.shape[1:]), _NUMPY_DTYPES[self.dtype])
            try:
                self._files[name].read_into(rows.view(np.uint8).reshape(end - start, -1), start)
            except MissingRows as e:
                raise StoreReadError(f"sample {index} (id {self.ids[index]!r}) is marked stored, but {e}") from e
            yield name, rows

    def _array(self, name: str) -> zarr.Array[Any]:
        return cast("zarr.Array[Any]", self._group[name])

    def _column(self, name: str) -> NDArray[Any]:
        return cast("NDArray[Any]", self._array(f"{layout.SAMPLES_GROUP}/{name}")[:])


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


def _shard_files(root: Path, arrays: Mapping[str, zarr.Array[Any]]) -> dict[str, ShardFiles]:
    files = {}
    for name in arrays:
        document = json.loads((root / layout.metadata_key(name)).read_bytes())
        if layout.is_uncompressed_sharding(document["codecs"]):
            files[name] = ShardFiles(root, name, document)
    return files


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)
