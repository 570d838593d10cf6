"""The store's layout, version 1: the contract between the service, which writes stores, and whoever reads them.

A store is one Zarr v3 group. This module says which arrays it has, what their metadata is and under which keys their objects
lie; `sharding` says what is inside a shard object. Nothing here does any I/O or imports zarr.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from math import prod
from typing import Any, TypedDict

FORMAT_VERSION = 1
ATTRIBUTES_KEY = "statetap"
METADATA_NAME = "zarr.json"

INPUT_IDS = "input_ids"
LOSS_MASK = "loss_mask"
AUX_HIDDEN_STATES = "aux_hidden_states"
LAST_HIDDEN_STATES = "last_hidden_states"
LAST_HIDDEN_STATES_PRENORM = "last_hidden_states_prenorm"
# In the order that digests are taken in.
HIDDEN_ARRAYS = (AUX_HIDDEN_STATES, LAST_HIDDEN_STATES, LAST_HIDDEN_STATES_PRENORM)
TOKEN_ARRAYS = {INPUT_IDS: "int32", LOSS_MASK: "uint8"}

SAMPLES_GROUP = "samples"
# `status` is last: a store whose `samples/status` is there was created whole.
SAMPLE_ARRAYS = {
    "id": "string",
    "row_start": "int64",
    "length": "int32",
    "next_token": "int32",
    "digest": "uint64",
    "status": "uint8",
}

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}

TOKEN_ROWS_PER_CHUNK = 1 << 14
TOKEN_ROWS_PER_SHARD = 1 << 20
SAMPLES_PER_CHUNK = 1 << 14

_ZSTD = {"name": "zstd", "configuration": {"level": 3, "checksum": False}}
_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
# Of a compact store's chunks. Level 1 and blocks of 1 MiB: higher levels and smaller blocks cost more than they save.
BLOSC_NAME = "zstd"
BLOSC_LEVEL = 1
BLOSC_BLOCK_BYTES = 1 << 20
# One byte has no byte order.
_SINGLE_BYTES = {"name": "bytes"}


class Status(IntEnum):
    """The values of `samples/status`. Only a stored sample's rows mean anything."""

    PENDING = 0
    STORED = 1
    FAILED = 2
    CANCELLED = 3
    SKIPPED = 4


class StoreAttributes(TypedDict):
    """What the group's attributes hold under `statetap`. Nothing that changes from run to run.

    `final` is `post_norm`, `pre_norm`, `both` or `none`; `identity` is `tokens` or `count`; `placement` holds `order` and `seed`;
    `datasets` are the sha256 of the datasets that went in, in order.
    """

    format_version: int
    statetap_version: str
    model: str
    model_fingerprint: str
    tokenizer: str
    chat_template_sha256: str
    aux_layer_ids: list[int]
    layer_convention: str
    final: str
    dtype: str
    identity: str
    rows_per_shard: int
    rows_per_chunk: int
    placement: dict[str, Any]
    datasets: list[str]


def row_bytes(row_shape: Sequence[int], dtype: str) -> int:
    """Bytes of one row of a hidden array whose rows are `row_shape` elements of `dtype`."""
    return prod(row_shape) * ITEM_BYTES[dtype]


def hidden_dimensions(row_shape: Sequence[int]) -> list[str]:
    """`[token, layer, hidden]` for rows of `(K, H)`, `[token, hidden]` for rows of `(H,)`."""
    return ["token", "layer", "hidden"] if len(row_shape) == 2 else ["token", "hidden"]


def shard_key(array: str, shard: int, row_shape: Sequence[int]) -> str:
    """The object of an array's shard, below the store's root: `aux_hidden_states/c/<shard>/0/0`."""
    return "/".join([array, "c", str(shard), *("0" for _ in row_shape)])


def chunk_key(array: str, chunk: int) -> str:
    """The object of a one-dimensional array's chunk (or shard), below the store's root: `samples/status/c/<chunk>`."""
    return f"{array}/c/{chunk}"


def metadata_key(node: str) -> str:
    """The metadata document of an array or group; the root group is the empty string."""
    return f"{node}/{METADATA_NAME}" if node else METADATA_NAME


def group_document(attributes: dict[str, Any] | None = None) -> dict[str, Any]:
    """A group's metadata; `attributes` are the ones under `statetap`."""
    own = {} if attributes is None else {ATTRIBUTES_KEY: attributes}
    return {"zarr_format": 3, "node_type": "group", "attributes": own}


def hidden_document(
    row_shape: Sequence[int], dtype: str, *, rows: int, rows_per_shard: int, rows_per_chunk: int
) -> dict[str, Any]:
    """A hidden array's metadata: shards of whole rows, uncompressed chunks."""
    return _array_document(
        shape=[rows, *row_shape],
        dtype=dtype,
        fill_value=0.0,
        chunk_shape=[rows_per_shard, *row_shape],
        codecs=[_sharding([rows_per_chunk, *row_shape], [_BYTES])],
        dimensions=hidden_dimensions(row_shape),
    )


def compact_document(document: dict[str, Any]) -> dict[str, Any]:
    """A hidden array's metadata in a compact store: those of `hidden_document`, its chunks compressed by blosc."""
    blosc = {
        "cname": BLOSC_NAME,
        "clevel": BLOSC_LEVEL,
        "shuffle": "shuffle",
        "typesize": ITEM_BYTES[document["data_type"]],
        "blocksize": BLOSC_BLOCK_BYTES,
    }
    chunk_shape = document["codecs"][0]["configuration"]["chunk_shape"]
    return document | {"codecs": [_sharding(chunk_shape, [_BYTES, {"name": "blosc", "configuration": blosc}])]}


def token_document(dtype: str, *, rows: int) -> dict[str, Any]:
    """`input_ids` or `loss_mask`: sharded, zstd."""
    return _array_document(
        shape=[rows],
        dtype=dtype,
        fill_value=0,
        chunk_shape=[TOKEN_ROWS_PER_SHARD],
        codecs=[_sharding([TOKEN_ROWS_PER_CHUNK], [_serializer(dtype), _ZSTD])],
        dimensions=["token"],
    )


def sample_document(name: str, *, samples: int) -> dict[str, Any]:
    """An array of `samples/`: zstd. A sample that nobody wrote is pending, with no known next token."""
    dtype = SAMPLE_ARRAYS[name]
    fill: int | str = ""
    if name != "id":
        fill = -1 if name == "next_token" else 0
    return _array_document(
        shape=[samples],
        dtype=dtype,
        fill_value=fill,
        chunk_shape=[SAMPLES_PER_CHUNK],
        codecs=[_serializer(dtype), _ZSTD],
        dimensions=["sample"],
    )


def shards_of(row_start: int, rows: int, rows_per_shard: int) -> range:
    """The shards that rows `[row_start, row_start + rows)` touch."""
    return range(row_start // rows_per_shard, -(-(row_start + rows) // rows_per_shard))


def is_uncompressed_sharding(codecs: Iterable[Any]) -> bool:
    """Whether an array's codecs are those of `hidden_document`: then a sample is a byte range of a shard object."""
    chain = list(codecs)
    if len(chain) != 1 or chain[0].get("name") != "sharding_indexed":
        return False
    configuration = chain[0].get("configuration", {})
    wanted = _sharding([], [_BYTES])["configuration"]
    return configuration.get("index_location", "end") == "end" and all(
        configuration.get(key) == wanted[key] for key in ("codecs", "index_codecs")
    )


def is_token_sharding(document: dict[str, Any]) -> bool:
    """Whether an array's metadata are those of `token_document`, whatever its sizes."""
    if document.get("data_type") not in TOKEN_ARRAYS.values() or document.get("fill_value") != 0:
        return False
    wanted = token_document(document["data_type"], rows=document["shape"][0])
    codecs = document.get("codecs", [])
    if len(codecs) != 1 or len(document["shape"]) != 1 or codecs[0].get("name") != "sharding_indexed":
        return False
    found, expected = codecs[0]["configuration"], wanted["codecs"][0]["configuration"]
    zstd = len(found["codecs"]) == 2 and found["codecs"][1].get("name") == "zstd"
    return (
        zstd
        and found["codecs"][0] == expected["codecs"][0]
        and all(found.get(key) == expected[key] for key in ("index_codecs", "index_location"))
    )


def _serializer(dtype: str) -> dict[str, Any]:
    if dtype == "string":
        return {"name": "vlen-utf8"}
    return _SINGLE_BYTES if dtype == "uint8" else _BYTES


def _sharding(chunk_shape: list[int], codecs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": chunk_shape,
            "codecs": codecs,
            "index_codecs": [_BYTES, {"name": "crc32c"}],
            "index_location": "end",
        },
    }


def _array_document(
    *, shape: list[int], dtype: str, fill_value: float | str, chunk_shape: list[int], codecs: list[Any], dimensions: list[str]
) -> dict[str, Any]:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill_value,
        "codecs": codecs,
        "dimension_names": dimensions,
        "attributes": {},
        "storage_transformers": [],
    }
