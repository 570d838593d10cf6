"""The Zarr groups that jobs write to: metadata, token arrays and the projection of the samples.

Metadata documents are the layout's own (`statetap_client.layout`), each replaced as a whole and durable, the root first and
`samples/status` last: a creation that was cut short is told from a store, and is finished by the next `prepare`. One process
writes a store's metadata, and one call at a time per store writes its arrays. Same inputs, same bytes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, cast

from statetap_client import layout, sharding

from statetap.adapters.store.objects import Objects, objects_at
from statetap.adapters.store.sample_columns import write_sample_columns
from statetap.adapters.store.token_shards import write_token_blocks
from statetap.core.spec import Compression
from statetap.ports import SampleColumns, StoreError, StoreFacts, StoreMismatch, StorePlan, TokenBlock

_STATUS = f"{layout.SAMPLES_GROUP}/status"
# Attributes of a store that a job need not share.
_APPENDED = "datasets"
_FREE = "statetap_version"
# What blosc puts before a chunk that it could not make smaller.
_CHUNK_HEADER_BYTES = 16


class ZarrStore:
    """The Store of local paths and object stores. Every method works in a thread."""

    def __init__(self) -> None:
        # Connections to object stores are kept, and what they know of this machine's credentials.
        self._objects_at = lru_cache(maxsize=16)(objects_at)

    async def describe(self, location: str) -> StoreFacts | None:
        """Its rows are those that every array has: growth that was cut short does not count."""
        return await asyncio.to_thread(lambda: _describe(self._objects_at(location)))

    async def check(self, location: str, plan: StorePlan) -> None:
        """A location where nothing is fits every plan whose shards it can take.

        Raises:
            StoreMismatch: what is there was made for something else.
            StoreError: a shard may be larger than an object can be there, or it could not be looked at.
        """
        await asyncio.to_thread(lambda: _check(self._objects_at(location), plan))

    async def prepare(self, location: str, plan: StorePlan) -> None:
        """Nothing is touched where the store does not fit the plan."""
        await asyncio.to_thread(lambda: _prepare(self._objects_at(location), plan))

    async def write_tokens(self, location: str, blocks: Iterable[TokenBlock]) -> None:
        """Durable when it returns. Rows that no block covers stay as they are: 0 from the start. One shard is in memory.

        Raises:
            StoreError: the place failed, or blocks are out of order or beyond the store's rows.
        """
        await asyncio.to_thread(lambda: write_token_blocks(self._objects_at(location), blocks))

    async def write_samples(self, location: str, columns: SampleColumns) -> None:
        """Durable when it returns.

        Raises:
            StoreError: the place failed, or the columns go beyond the store's samples.
        """
        await asyncio.to_thread(lambda: write_sample_columns(self._objects_at(location), columns))

    async def free_bytes(self, location: str) -> int | None:
        return await asyncio.to_thread(lambda: self._objects_at(location).free_bytes())


def _describe(objects: Objects) -> StoreFacts | None:
    with objects.failing("reading"):
        if objects.is_vacant():
            return None
        attributes = _attributes(objects)
        documents = _existing(objects)
    if _STATUS not in documents:
        return StoreFacts(rows=0, samples=0, attributes=attributes)
    rows, samples = _sizes(documents)
    return StoreFacts(rows=min(rows), samples=min(samples), attributes=attributes)


def _check(objects: Objects, plan: StorePlan) -> tuple[dict[str, Any], dict[str, Any]]:
    """The store's attributes and metadata documents once it fits the plan. Writes nothing."""
    _check_sizes(objects, plan)
    with objects.failing("reading"):
        attributes, existing = dict(plan.attributes), {}
        if not objects.is_vacant():
            stored, existing = _attributes(objects), _existing(objects)
            _check_attributes(stored, plan.attributes)
            attributes = _with_datasets(stored, plan.attributes)
        documents = _documents(plan, existing)
        _check_arrays(objects, existing, documents)
    return attributes, documents


def _check_sizes(objects: Objects, plan: StorePlan) -> None:
    """Each shard must be able to be an object there: its rows, uncompressed, and its index."""
    rows, chunks = plan.geometry.rows_per_shard, plan.geometry.rows_per_shard // plan.geometry.rows_per_chunk
    for array in plan.arrays:
        # A chunk that does not become smaller is stored as it is, with a header.
        index = sharding.index_bytes(chunks) + chunks * _CHUNK_HEADER_BYTES
        nbytes = rows * array.row_bytes + index
        if objects.largest_bytes is not None and nbytes > objects.largest_bytes:
            fitting = (
                (objects.largest_bytes - index) // array.row_bytes // plan.geometry.rows_per_chunk * plan.geometry.rows_per_chunk
            )
            raise StoreError(
                f"a shard of {array.name} may take {nbytes:,} bytes with {rows:,} rows, and an object at {objects} "
                f"{objects.largest_bytes:,} at most: submit the job with a rows_per_shard of {fitting:,} or less"
            )


def _prepare(objects: Objects, plan: StorePlan) -> None:
    attributes, documents = _check(objects, plan)
    with objects.failing("preparing"):
        _write(objects, "", layout.group_document(attributes))
        for name, document in documents.items():
            _write(objects, name, document)


def _existing(objects: Objects) -> dict[str, Any]:
    """The metadata documents of the store's arrays that are there."""
    samples = (f"{layout.SAMPLES_GROUP}/{name}" for name in layout.SAMPLE_ARRAYS)
    names = (*layout.HIDDEN_ARRAYS, *layout.TOKEN_ARRAYS, *samples)
    documents = ((name, _read(objects, name)) for name in names)
    return {name: document for name, document in documents if document is not None}


def _sizes(documents: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The arrays' lengths, those in rows and those in samples."""
    rows: list[int] = []
    samples: list[int] = []
    for name, document in documents.items():
        (samples if name.startswith(layout.SAMPLES_GROUP) else rows).append(document["shape"][0])
    return rows, samples


def _documents(plan: StorePlan, existing: dict[str, Any]) -> dict[str, Any]:
    """Every node of the plan in writing order, no array smaller than it is now."""
    existing_rows, existing_samples = _sizes(existing)
    rows, samples = max([plan.rows, *existing_rows]), max([plan.samples, *existing_samples])
    geometry = plan.geometry
    documents: dict[str, Any] = {}
    for array in plan.arrays:
        document = layout.hidden_document(
            array.row_shape,
            array.dtype,
            rows=rows,
            rows_per_shard=geometry.rows_per_shard,
            rows_per_chunk=geometry.rows_per_chunk,
        )
        documents[array.name] = layout.compact_document(document) if plan.compression is Compression.ZSTD else document
    for name, dtype in layout.TOKEN_ARRAYS.items():
        documents[name] = layout.token_document(dtype, rows=rows)
    documents[layout.SAMPLES_GROUP] = layout.group_document()
    for name in layout.SAMPLE_ARRAYS:
        documents[f"{layout.SAMPLES_GROUP}/{name}"] = layout.sample_document(name, samples=samples)
    return documents


def _check_attributes(stored: Any, wanted: Any) -> None:
    # As JSON gives them back: tuples are lists there.
    wanted = json.loads(json.dumps(dict(wanted)))
    for field in sorted({*stored, *wanted} - {_APPENDED, _FREE}):
        if stored.get(field) != wanted.get(field):
            raise StoreMismatch(field, stored.get(field), wanted.get(field))


def _check_arrays(objects: Objects, existing: dict[str, Any], wanted: dict[str, Any]) -> None:
    arrays = {name: document for name, document in wanted.items() if document["node_type"] == "array"}
    if existing.keys() - arrays.keys():
        raise StoreMismatch("arrays", sorted(existing), sorted(arrays))
    if _STATUS in existing and (missing := sorted(arrays.keys() - existing.keys())):
        raise StoreError(f"the store at {objects} has lost {', '.join(missing)}: restore the metadata, or use another store")
    for name, document in existing.items():
        if name in layout.HIDDEN_ARRAYS:
            _check_compression(document, arrays[name])
        for field in sorted(document.keys() | arrays[name].keys()):
            if field == "shape":
                continue
            if document.get(field) != arrays[name].get(field):
                raise StoreMismatch(f"{name}: {field}", document.get(field), arrays[name].get(field))


def _check_compression(stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Told by the name that a job has for it; codecs that no job writes are left to be compared in full."""
    has, needs = (layout.compression_of(document.get("codecs", [])) for document in (stored, wanted))
    if has is not None and has != needs:
        raise StoreMismatch("compression", has, needs)


def _with_datasets(stored: Any, wanted: Any) -> dict[str, Any]:
    datasets = list(stored.get(_APPENDED, []))
    datasets += [dataset for dataset in wanted.get(_APPENDED, []) if dataset not in datasets]
    return {**stored, _APPENDED: datasets}


def _attributes(objects: Objects) -> dict[str, Any]:
    document = _read(objects, "") or {}
    attributes = document.get("attributes", {}).get(layout.ATTRIBUTES_KEY)
    if document.get("node_type") != "group" or not isinstance(attributes, dict):
        raise StoreError(f"{objects} is not empty and no Statetap store: use another location, or empty it")
    version = attributes.get("format_version")
    if version != layout.FORMAT_VERSION:
        raise StoreError(
            f"{objects} has store format {version!r}, this service writes {layout.FORMAT_VERSION}: use another store"
        )
    return cast("dict[str, Any]", attributes)


def _read(objects: Objects, node: str) -> dict[str, Any] | None:
    key = layout.metadata_key(node)
    data = objects.read(key)
    try:
        return None if data is None else cast("dict[str, Any]", json.loads(data))
    except ValueError as e:
        raise StoreError(f"{objects}/{key} is no JSON: {e}; restore it, or use another store") from e


def _write(objects: Objects, node: str, document: dict[str, Any]) -> None:
    key = layout.metadata_key(node)
    data = json.dumps(document, indent=2, sort_keys=True).encode()
    if objects.read(key) != data:
        objects.replace(key, data)
