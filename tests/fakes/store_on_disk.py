"""Writes whole stores with the service's own adapters, for tests of what reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from statetap.adapters.store.local_shard_writer import LocalShardWriter
from statetap.adapters.store.zarr_store import ZarrStore
from statetap.core.placement import Geometry, place
from statetap.core.spec import Compression, HiddenArray
from statetap.ports import SampleColumns, Segment, StorePlan, TokenBlock, UnitWrite
from statetap_client.layout import Status

from tests.fakes.store import NUMPY_DTYPES

AUX = "aux_hidden_states"
LAST = "last_hidden_states"
PRENORM = "last_hidden_states_prenorm"


def hidden_arrays(dtype: str = "bfloat16", layers: int = 2, hidden: int = 8) -> tuple[HiddenArray, ...]:
    """All three arrays."""
    return (
        HiddenArray(AUX, (layers, hidden), dtype),
        HiddenArray(LAST, (hidden,), dtype),
        HiddenArray(PRENORM, (hidden,), dtype),
    )


def attributes(dtype: str = "bfloat16", **changes: Any) -> dict[str, Any]:
    return {
        "format_version": 1,
        "statetap_version": "0.1.0",
        "model": "org/model",
        "model_fingerprint": "f" * 8,
        "aux_layer_ids": [0, 1],
        "final": "both",
        "dtype": dtype,
        "datasets": ["a" * 64],
    } | changes


def random_rows(array: HiddenArray, rows: int, rng: np.random.Generator) -> NDArray[Any]:
    """Finite values of the array's dtype, `[rows, *row_shape]`."""
    return rng.standard_normal((rows, *array.row_shape)).astype(NUMPY_DTYPES[array.dtype])


def as_view(rows: NDArray[Any]) -> memoryview:
    return memoryview(np.ascontiguousarray(rows).view(np.uint8)).cast("B")


def write_store(
    path: Path,
    arrays: Sequence[HiddenArray],
    samples: Sequence[Mapping[str, NDArray[Any]]],
    *,
    geometry: Geometry,
    input_ids: Sequence[NDArray[np.int32]] | None = None,
    failed: frozenset[int] = frozenset(),
    compression: Compression = Compression.NONE,
    **changes: Any,
) -> None:
    """A store of `samples`, each its hidden arrays' rows by name; those in `failed` are placed, not written.

    Sample i has id `sample-<i>`, mask 1, next token i, and unless `input_ids` says otherwise the ids 0, 1, 2, ….
    """
    lengths = [len(sample[arrays[0].name]) for sample in samples]
    placement = place(lengths, range(len(samples)), geometry)
    ids = input_ids or [np.arange(length, dtype=np.int32) for length in lengths]
    statuses = [Status.FAILED if i in failed else Status.STORED for i in range(len(samples))]
    columns = SampleColumns(
        first=0,
        ids=[f"sample-{i}" for i in range(len(samples))],
        row_start=np.array(placement.row_starts, np.int64),
        length=np.array(lengths, np.int32),
        status=np.array(statuses, np.uint8),
        next_token=np.arange(len(samples), dtype=np.int32),
        digest=np.array([0 if i in failed else digest_of(arrays, samples[i]) for i in range(len(samples))], np.uint64),
    )
    plan = StorePlan(
        arrays=tuple(arrays),
        geometry=geometry,
        rows=placement.rows,
        samples=len(samples),
        compression=compression,
        attributes=attributes(
            arrays[0].dtype,
            **{"rows_per_shard": geometry.rows_per_shard, "rows_per_chunk": geometry.rows_per_chunk} | changes,
        ),
    )
    blocks = [
        TokenBlock(start, tokens, np.ones(len(tokens), np.uint8)) for start, tokens in zip(placement.row_starts, ids, strict=True)
    ]

    async def write() -> None:
        store, writer = ZarrStore(), LocalShardWriter()
        await store.prepare(str(path), plan)
        await store.write_tokens(str(path), blocks)
        for unit in placement.units:
            placed = [(sample, start) for sample, start in placement.samples_of(unit) if sample not in failed]
            segments = [
                Segment(array.name, start - unit.row_start, as_view(samples[sample][array.name]))
                for array in arrays
                for sample, start in placed
            ]
            await writer.write(
                UnitWrite(
                    location=str(path),
                    arrays=tuple(arrays),
                    geometry=geometry,
                    row_start=unit.row_start,
                    rows=unit.rows,
                    fence=1,
                    segments=segments,
                    compression=compression,
                )
            )
        await store.write_samples(str(path), columns)
        writer.close()

    asyncio.run(write())


def digest_of(arrays: Sequence[HiddenArray], sample: Mapping[str, NDArray[Any]]) -> int:
    return xxhash.xxh3_64_intdigest(b"".join(sample[array.name].tobytes() for array in arrays))
