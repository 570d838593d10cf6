"""The Zarr groups that jobs write to: metadata by the orchestrator, whole shards by threads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from statetap.core.capture import Refusal
from statetap.core.norms import ArrayNorms
from statetap.core.placement import Geometry
from statetap.core.records import (
    ShardObject,
)
from statetap.core.spec import Compression, HiddenArray


class StoreError(Exception):
    """The store refused; the message says why. Nothing half-written is visible."""


class StoreMismatch(StoreError):
    """The store at that location was made for another model, spec or layout: `field` differs."""

    def __init__(self, field: str, stored: object, wanted: object) -> None:
        super().__init__(
            f"the store has {field} = {stored!r}, the job needs {wanted!r}; use another store, or make the job agree with it"
        )
        self.field = field


class StoreFull(StoreError):
    """No space left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """An existing store: its size in rows and samples, and its `statetap` attributes."""

    rows: int
    samples: int
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlan:
    """What a job needs of its store: at least `rows` rows and `samples` samples, these arrays, so compressed, these attributes.

    Of `attributes`, `datasets` is a list that is appended to; `statetap_version` may differ; the others must be equal.
    """

    arrays: tuple[HiddenArray, ...]
    geometry: Geometry
    rows: int
    samples: int
    attributes: Mapping[str, Any]
    compression: Compression = Compression.NONE


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """Consecutive rows of `input_ids` (int32 `[n]`) and `loss_mask` (uint8 `[n]`) that start at row `row`."""

    row: int
    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleColumns:
    """A run of `samples/*` that starts at sample `first`; arrays of one length, dtypes as in contract §3."""

    first: int
    ids: Sequence[str]
    row_start: NDArray[np.int64]
    length: NDArray[np.int32]
    status: NDArray[np.uint8]
    next_token: NDArray[np.int32]
    digest: NDArray[np.uint64]


class Store(Protocol):
    """The Zarr groups that jobs write to; `location` is a path or a URL. Metadata has one writer: the orchestrator."""

    async def describe(self, location: str) -> StoreFacts | None:
        """What is there, None if nothing is. StoreError: something else is there."""
        ...

    async def check(self, location: str, plan: StorePlan) -> None:
        """StoreMismatch: what is there was made for something else; StoreError: the place cannot take it. Changes nothing."""
        ...

    async def prepare(self, location: str, plan: StorePlan) -> None:
        """Create the store, or check it and grow it. StoreMismatch: it was made for something else."""
        ...

    async def write_tokens(self, location: str, blocks: Iterable[TokenBlock]) -> None: ...

    async def write_samples(self, location: str, columns: SampleColumns) -> None: ...

    async def free_bytes(self, location: str) -> int | None:
        """Free space where the store is (or will be), None where that is not a question."""
        ...


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of one hidden array: `data` goes to row `row` of the unit (0 is the unit's first row)."""

    array: str
    row: int
    data: memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitWrite:
    """A unit to write: whole shards of every array, rows `[row_start, row_start + rows)` of the store.

    Segments are in row order per array and do not overlap; rows without a segment read as zero.
    """

    location: str
    arrays: tuple[HiddenArray, ...]
    geometry: Geometry
    row_start: int
    rows: int
    fence: int
    segments: Sequence[Segment]
    compression: Compression = Compression.NONE


class ShardWriter(Protocol):
    """Writes units as whole shard objects, in threads: durable when it returns, published without replacing.

    An object that is already there with the same bytes is adopted. One with other bytes is a StoreError: what an uncommitted
    lease left is removed by `discard` first, and committed units are never written again.
    """

    async def write(self, unit: UnitWrite) -> tuple[ShardObject, ...]:
        """Raises StoreFull or StoreError; then nothing new is visible."""
        ...

    async def discard(self, location: str, arrays: Sequence[HiddenArray], geometry: Geometry, row_start: int, rows: int) -> None:
        """Remove what an unfinished attempt left of an uncommitted unit, temporary files included."""
        ...


@dataclass(frozen=True, slots=True)
class CapturePart:
    """One dump of a capture: its hidden tensors' bytes, rows first, and the checksums that its source took of its rows.

    `row_checksums` are the bytes of little-endian int64 `[T]`; None where the publisher gave none.
    """

    views: Mapping[str, memoryview]
    row_checksums: memoryview | None = None


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """A look at a capture's bytes: its digest (XXH3-64, hidden arrays in store order), and why it must be refused, if so.

    `norms` has every array's norms in `sampled_rows` of the capture; empty where it is refused.
    """

    digest: int
    refusal: Refusal | None
    norms: tuple[ArrayNorms, ...] = ()


class CaptureInspector(Protocol):
    """Reads captures in threads: digest, each row what its source computed, finite, not all zero, not constant; norms."""

    async def inspect(self, parts: Sequence[CapturePart], arrays: Sequence[HiddenArray]) -> CaptureReport:
        """`parts` are a capture's dumps in row order, which hold these arrays and no others."""
        ...

    async def digest(self, views: Mapping[str, memoryview]) -> int:
        """XXH3-64 of one dump's hidden tensors, to tell two readings apart."""
        ...
