"""Writes a run of `samples/*`: the projection of the ledger that readers go by."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import zarr
from numpy.typing import NDArray
from statetap_client import layout

from statetap.adapters.store.objects import Objects
from statetap.ports import SampleColumns, StoreError


def write_sample_columns(objects: Objects, columns: SampleColumns) -> None:
    """Write one run of every column, `status` last: a sample seen as stored has its place and digest.

    Raises:
        StoreError: the place failed, or the run goes beyond the store's samples.
    """
    count = len(columns.ids)
    if not count:
        return
    with objects.failing("writing the samples of"):
        group = cast("zarr.Group", zarr.open_group(objects.zarr_store(), mode="r+", use_consolidated=False)[layout.SAMPLES_GROUP])
        for name in layout.SAMPLE_ARRAYS:
            array = cast("zarr.Array[Any]", group[name])
            if columns.first + count > array.shape[0]:
                raise StoreError(
                    f"samples [{columns.first}, +{count}) go beyond the {array.shape[0]} of the store at {objects}: grow it"
                )
            array[columns.first : columns.first + count] = _column(columns, name)
            for chunk in layout.shards_of(columns.first, count, layout.SAMPLES_PER_CHUNK):
                objects.settle(layout.chunk_key(f"{layout.SAMPLES_GROUP}/{name}", chunk))


def _column(columns: SampleColumns, name: str) -> NDArray[Any]:
    if name == "id":
        return np.array(columns.ids, dtype=np.dtypes.StringDType())
    return cast("NDArray[Any]", getattr(columns, name))
