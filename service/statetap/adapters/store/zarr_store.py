"""The Zarr groups that jobs write to: metadata, token arrays and the projection of the samples.

Metadata documents are the layout's own (`statetap_client.layout`), each replaced as a whole and fsynced, the root first and
`samples/status` last: a creation that was cut short is told from a store, and is finished by the next `prepare`. One process
writes a store's metadata, and one call at a time per store writes its arrays. Same inputs, same bytes.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from statetap_client import layout

from statetap.adapters.store.durable_files import as_store_error, make_directories, replace_file
from statetap.adapters.store.locations import local_path
from statetap.adapters.store.sample_columns import write_sample_columns
from statetap.adapters.store.token_shards import write_token_blocks
from statetap.core.spec import Compression
from statetap.ports import SampleColumns, StoreError, StoreFacts, StoreMismatch, StorePlan, TokenBlock

_STATUS = f"{layout.SAMPLES_GROUP}/status"
# Attributes of a store that a job need not share.
_APPENDED = "datasets"
_FREE = "statetap_version"


class ZarrStore:
    """The Store of local paths. Every method works in a thread."""

    async def describe(self, location: str) -> StoreFacts | None:
        """Its rows are those that every array has: growth that was cut short does not count."""
        return await asyncio.to_thread(_describe, local_path(location))

    async def check(self, location: str, plan: StorePlan) -> None:
        """A location where nothing is fits every plan."""
        await asyncio.to_thread(_check, local_path(location), plan)

    async def prepare(self, location: str, plan: StorePlan) -> None:
        """Nothing is touched where the store does not fit the plan."""
        await asyncio.to_thread(_prepare, local_path(location), plan)

    async def write_tokens(self, location: str, blocks: Iterable[TokenBlock]) -> None:
        """Durable when it returns. Rows that no block covers stay as they are: 0 from the start. One shard is in memory.

        Raises:
            StoreError: the file system failed, or blocks are out of order or beyond the store's rows.
        """
        await asyncio.to_thread(write_token_blocks, local_path(location), blocks)

    async def write_samples(self, location: str, columns: SampleColumns) -> None:
        """Durable when it returns.

        Raises:
            StoreError: the file system failed, or the columns go beyond the store's samples.
        """
        await asyncio.to_thread(write_sample_columns, local_path(location), columns)

    async def free_bytes(self, location: str) -> int | None:
        return await asyncio.to_thread(_free_bytes, local_path(location))


def _free_bytes(root: Path) -> int:
    existing = next(path for path in (root, *root.parents) if path.exists())
    space = os.statvfs(existing)
    return space.f_bavail * space.f_frsize


def _describe(root: Path) -> StoreFacts | None:
    try:
        if _is_vacant(root):
            return None
        attributes = _attributes(root)
        documents = _existing(root)
    except OSError as e:
        raise as_store_error(e, f"reading {root}") from e
    if _STATUS not in documents:
        return StoreFacts(rows=0, samples=0, attributes=attributes)
    rows, samples = _sizes(documents)
    return StoreFacts(rows=min(rows), samples=min(samples), attributes=attributes)


def _check(root: Path, plan: StorePlan) -> tuple[dict[str, Any], dict[str, Any]]:
    """The store's attributes and metadata documents once it fits the plan. Writes nothing."""
    try:
        attributes, existing = dict(plan.attributes), {}
        if not _is_vacant(root):
            stored, existing = _attributes(root), _existing(root)
            _check_attributes(stored, plan.attributes)
            attributes = _with_datasets(stored, plan.attributes)
        documents = _documents(plan, existing)
        _check_arrays(root, existing, documents)
    except OSError as e:
        raise as_store_error(e, f"reading {root}") from e
    return attributes, documents


def _prepare(root: Path, plan: StorePlan) -> None:
    attributes, documents = _check(root, plan)
    try:
        _write(root, "", layout.group_document(attributes))
        for name, document in documents.items():
            _write(root, name, document)
    except OSError as e:
        raise as_store_error(e, f"preparing {root}") from e


def _is_vacant(root: Path) -> bool:
    """Nothing there, or nothing but dot-files: what a creation leaves that was cut short at its very first file."""
    return not root.exists() or (root.is_dir() and all(path.name.startswith(".") for path in root.iterdir()))


def _existing(root: Path) -> dict[str, Any]:
    """The metadata documents of the store's arrays that are there."""
    samples = (f"{layout.SAMPLES_GROUP}/{name}" for name in layout.SAMPLE_ARRAYS)
    names = (*layout.HIDDEN_ARRAYS, *layout.TOKEN_ARRAYS, *samples)
    return {name: _read(root, name) for name in names if (root / layout.metadata_key(name)).exists()}


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


def _check_arrays(root: Path, existing: dict[str, Any], wanted: dict[str, Any]) -> None:
    arrays = {name: document for name, document in wanted.items() if document["node_type"] == "array"}
    if existing.keys() - arrays.keys():
        raise StoreMismatch("arrays", sorted(existing), sorted(arrays))
    if _STATUS in existing and (missing := sorted(arrays.keys() - existing.keys())):
        raise StoreError(f"the store at {root} has lost {', '.join(missing)}: restore the metadata, or use another store")
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


def _attributes(root: Path) -> dict[str, Any]:
    document = _read(root, "") if (root / layout.METADATA_NAME).exists() else {}
    attributes = document.get("attributes", {}).get(layout.ATTRIBUTES_KEY)
    if document.get("node_type") != "group" or not isinstance(attributes, dict):
        raise StoreError(f"{root} is not empty and no Statetap store: use another location, or empty it")
    version = attributes.get("format_version")
    if version != layout.FORMAT_VERSION:
        raise StoreError(f"{root} has store format {version!r}, this service writes {layout.FORMAT_VERSION}: use another store")
    return cast("dict[str, Any]", attributes)


def _read(root: Path, node: str) -> dict[str, Any]:
    path = root / layout.metadata_key(node)
    try:
        return cast("dict[str, Any]", json.loads(path.read_bytes()))
    except ValueError as e:
        raise StoreError(f"{path} is no JSON: {e}; restore it, or use another store") from e


def _write(root: Path, node: str, document: dict[str, Any]) -> None:
    path = root / layout.metadata_key(node)
    data = json.dumps(document, indent=2, sort_keys=True).encode()
    make_directories(path.parent)
    if not path.exists() or path.read_bytes() != data:
        replace_file(path, data)
