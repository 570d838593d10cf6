"""Store, shard writer and inspector in memory, for tests of what drives them.

A `FakeStore` keeps every location as a `StoredGroup` of numpy arrays; a `FakeShardWriter` writes into them. They pass the same
contract suite as the real ones. Each can be told to raise once: `store.fail_once("write_tokens", StoreFull("full"))`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import xxhash
from numpy.typing import NDArray
from statetap.core.capture import Refusal, RefusalReason
from statetap.core.norms import ArrayNorms, sampled_rows
from statetap.core.placement import Geometry
from statetap.core.records import SampleStatus, ShardObject
from statetap.core.spec import Compression, HiddenArray
from statetap.ports import (
    CapturePart,
    CaptureReport,
    SampleColumns,
    StoreError,
    StoreFacts,
    StoreMismatch,
    StorePlan,
    TokenBlock,
    UnitWrite,
)
from statetap_client import layout
from statetap_sglang.checksum import row_checksums
from statetap_sglang.format import MODEL_DTYPES, TensorView

NUMPY_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}


class Faults:
    """Errors that a fake was told to raise, each once, by method."""

    def __init__(self) -> None:
        self._faults: dict[str, list[Exception]] = {}

    def fail_once(self, method: str, error: Exception) -> None:
        """The next call of `method` raises `error` and does nothing. Several queue up."""
        if not hasattr(self, method):
            raise ValueError(f"{type(self).__name__} has no method {method!r}")
        self._faults.setdefault(method, []).append(error)

    def _raise_if_told(self, method: str) -> None:
        if self._faults.get(method):
            raise self._faults[method].pop(0)


@dataclass
class StoredGroup:
    """One location: `hidden` by name in the model's dtype, `columns` are `samples/*`.

    `objects` are the published shards by key, `digests` those of their bytes.
    """

    arrays: tuple[HiddenArray, ...]
    geometry: Geometry
    attributes: dict[str, Any]
    compression: Compression
    hidden: dict[str, NDArray[Any]] = field(default_factory=dict)
    input_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    loss_mask: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    objects: dict[str, ShardObject] = field(default_factory=dict)
    digests: dict[str, int] = field(default_factory=dict)

    def grow(self, rows: int, samples: int) -> None:
        self.input_ids = _grown(self.input_ids, rows, 0)
        self.loss_mask = _grown(self.loss_mask, rows, 0)
        for array in self.arrays:
            empty = np.zeros((0, *array.row_shape), NUMPY_DTYPES[array.dtype])
            self.hidden[array.name] = _grown(self.hidden.get(array.name, empty), rows, 0)
        for name, dtype in layout.SAMPLE_ARRAYS.items():
            empty = np.zeros(0, object if dtype == "string" else dtype)
            fill: Any = {"id": "", "next_token": -1}.get(name, 0)
            self.columns[name] = _grown(self.columns.get(name, empty), samples, fill)

    @property
    def statuses(self) -> list[SampleStatus]:
        return [SampleStatus(int(value)) for value in self.columns["status"]]


class FakeStore(Faults):
    """A Store. `groups` are its locations; `free` is what `free_bytes` answers."""

    def __init__(self, *, free: int | None = 1 << 50) -> None:
        super().__init__()
        self.groups: dict[str, StoredGroup] = {}
        self.free = free

    async def describe(self, location: str) -> StoreFacts | None:
        self._raise_if_told("describe")
        group = self.groups.get(location)
        if group is None:
            return None
        return StoreFacts(rows=len(group.input_ids), samples=len(group.columns["status"]), attributes=group.attributes)

    async def check(self, location: str, plan: StorePlan) -> None:
        self._raise_if_told("check")
        trial = FakeStore()
        trial.groups = copy.deepcopy({location: self.groups[location]} if location in self.groups else {})
        await trial.prepare(location, plan)

    async def prepare(self, location: str, plan: StorePlan) -> None:
        self._raise_if_told("prepare")
        wanted = json.loads(json.dumps(dict(plan.attributes)))
        group = self.groups.get(location)
        if group is None:
            group = self.groups[location] = StoredGroup(plan.arrays, plan.geometry, wanted, plan.compression)
        else:
            for name in sorted({*group.attributes, *wanted} - {"datasets", "statetap_version"}):
                if group.attributes.get(name) != wanted.get(name):
                    raise StoreMismatch(name, group.attributes.get(name), wanted.get(name))
            if group.arrays != plan.arrays:
                raise StoreMismatch("arrays", group.arrays, plan.arrays)
            if group.geometry != plan.geometry:
                raise StoreMismatch("geometry", group.geometry, plan.geometry)
            if group.compression != plan.compression:
                raise StoreMismatch("compression", str(group.compression), str(plan.compression))
            new = [dataset for dataset in wanted.get("datasets", []) if dataset not in group.attributes["datasets"]]
            group.attributes["datasets"] += new
        group.grow(plan.rows, plan.samples)

    async def write_tokens(self, location: str, blocks: Iterable[TokenBlock]) -> None:
        self._raise_if_told("write_tokens")
        group = self.groups[location]
        free_from = 0
        for block in blocks:
            end = block.row + len(block.input_ids)
            if block.row < free_from or end > len(group.input_ids):
                raise StoreError(f"token rows [{block.row}, {end}) are out of order or beyond the store")
            free_from = end
            group.input_ids[block.row : end] = block.input_ids
            group.loss_mask[block.row : end] = block.loss_mask

    async def write_samples(self, location: str, columns: SampleColumns) -> None:
        self._raise_if_told("write_samples")
        group = self.groups[location]
        span = slice(columns.first, columns.first + len(columns.ids))
        if span.stop > len(group.columns["status"]):
            raise StoreError(f"samples up to {span.stop} are beyond the store")
        for name in layout.SAMPLE_ARRAYS:
            group.columns[name][span] = columns.ids if name == "id" else getattr(columns, name)

    async def free_bytes(self, location: str) -> int | None:
        self._raise_if_told("free_bytes")
        return self.free


class FakeShardWriter(Faults):
    """A ShardWriter into the arrays of a FakeStore. `written` are the units that it wrote, in order."""

    def __init__(self, store: FakeStore) -> None:
        super().__init__()
        self._store = store
        self.written: list[UnitWrite] = []

    async def write(self, unit: UnitWrite) -> tuple[ShardObject, ...]:
        self._raise_if_told("write")
        group = self._store.groups[unit.location]
        objects: dict[str, ShardObject] = {}
        digests: dict[str, int] = {}
        pending: dict[str, NDArray[Any]] = {}
        shard_rows = unit.geometry.rows_per_shard
        for array in unit.arrays:
            rows = np.zeros((unit.rows, *array.row_shape), NUMPY_DTYPES[array.dtype])
            touched = set()
            for segment in (s for s in unit.segments if s.array == array.name):
                data = np.frombuffer(segment.data.cast("B"), NUMPY_DTYPES[array.dtype]).reshape(-1, *array.row_shape)
                rows[segment.row : segment.row + len(data)] = data
                touched |= set(layout.shards_of(segment.row, len(data), shard_rows))
            pending[array.name] = rows
            for shard in sorted(touched):
                key = layout.shard_key(array.name, unit.row_start // shard_rows + shard, array.row_shape)
                payload = rows[shard * shard_rows : (shard + 1) * shard_rows].tobytes()
                objects[key] = ShardObject(key=key, nbytes=len(payload))
                digests[key] = xxhash.xxh3_64_intdigest(payload)
        for key in objects:
            if key in group.objects and group.digests[key] != digests[key]:
                raise StoreError(f"{key} is there already, with other bytes: discard the unit first")
        group.objects.update(objects)
        group.digests.update(digests)
        for name, rows in pending.items():
            group.hidden[name][unit.row_start : unit.row_start + unit.rows] = rows
        self.written.append(unit)
        return tuple(objects.values())

    async def discard(self, location: str, arrays: Sequence[HiddenArray], geometry: Geometry, row_start: int, rows: int) -> None:
        self._raise_if_told("discard")
        group = self._store.groups[location]
        for array in arrays:
            group.hidden[array.name][row_start : row_start + rows] = 0
            for shard in layout.shards_of(row_start, rows, geometry.rows_per_shard):
                group.objects.pop(layout.shard_key(array.name, shard, array.row_shape), None)


class FakeInspector(Faults):
    """A CaptureInspector that looks at values as floats. `refuse_once` makes it refuse the next capture, whatever it holds."""

    def __init__(self) -> None:
        super().__init__()
        self._refusals: list[str] = []

    def refuse_once(self, reason: str) -> None:
        self._refusals.append(reason)

    async def inspect(self, parts: Sequence[CapturePart], arrays: Sequence[HiddenArray]) -> CaptureReport:
        self._raise_if_told("inspect")
        payloads = {array: b"".join(bytes(part.views[array.name]) for part in parts) for array in arrays}
        faults = ([self._refusals.pop(0)] if self._refusals else []) + [
            reason for array, data in payloads.items() if (reason := _fault(array, data)) is not None
        ]
        refusal = _difference(parts, arrays) or (Refusal(RefusalReason.BAD_VALUES, faults[0]) if faults else None)
        norms = () if refusal else tuple(_norms(array, data) for array, data in payloads.items())
        return CaptureReport(digest=xxhash.xxh3_64_intdigest(b"".join(payloads.values())), refusal=refusal, norms=norms)

    async def digest(self, views: Mapping[str, memoryview]) -> int:
        self._raise_if_told("digest")
        return xxhash.xxh3_64_intdigest(b"".join(bytes(views[name]) for name in layout.HIDDEN_ARRAYS if name in views))


def _difference(parts: Sequence[CapturePart], arrays: Sequence[HiddenArray]) -> Refusal | None:
    """By the dump format's own sums."""
    rows: list[bool] = []
    for part in parts:
        tensors = {a.name: _tensor(a, part.views[a.name]) for a in arrays}
        sums = row_checksums(tensors)
        given = sums if part.row_checksums is None else np.frombuffer(part.row_checksums, np.int64)
        rows += (sums != given).tolist()
    if not any(rows):
        return None
    detail = f"{sum(rows)} rows, the first of them row {rows.index(True)}, are not what their source computed"
    return Refusal(RefusalReason.WRONG_CHECKSUM, detail)


def _tensor(array: HiddenArray, data: memoryview) -> TensorView:
    return TensorView(MODEL_DTYPES[array.dtype], (data.nbytes // array.row_bytes, *array.row_shape), data)


def _norms(array: HiddenArray, data: bytes) -> ArrayNorms:
    vectors = (
        np.frombuffer(data, NUMPY_DTYPES[array.dtype])
        .astype(np.float64)
        .reshape(-1, *([1] * (2 - len(array.row_shape))), *array.row_shape)
    )
    rows = sampled_rows(len(vectors))
    return ArrayNorms(array.name, rows, tuple(tuple(np.linalg.norm(vectors[row], axis=-1).tolist()) for row in rows))


def _fault(array: HiddenArray, data: bytes) -> str | None:
    vectors = np.frombuffer(data, NUMPY_DTYPES[array.dtype]).astype(np.float64).reshape(-1, array.row_shape[-1])
    per_row = array.row_shape[0] if len(array.row_shape) == 2 else 1
    for number, vector in enumerate(vectors):
        for fault, found in (
            ("is not finite", not np.isfinite(vector).all()),
            ("is all zero", not vector.any()),
            ("is constant", len(vector) > 1 and (vector == vector[0]).all()),
        ):
            if found:
                layer = f" in layer {number % per_row + 1} of {per_row}" if per_row > 1 else ""
                return f"{array.name}: row {number // per_row} {fault}{layer}"
    return None


def _grown(array: NDArray[Any], length: int, fill: Any) -> NDArray[Any]:
    missing = max(0, length - len(array))
    return np.concatenate([array, np.full((missing, *array.shape[1:]), fill, array.dtype)])
