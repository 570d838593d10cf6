"""Compact stores, read back bit for bit by everybody: our own reader, zarr-python and tensorstore."""

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from statetap.core.placement import Geometry
from statetap.core.spec import HiddenArray
from statetap_client.compact import compact
from statetap_client.reader import StoreReader
from statetap_client.verify import verify_digests

from tests.fakes.store import NUMPY_DTYPES
from tests.fakes.store_on_disk import AUX, LAST, PRENORM, write_store

# Durability costs nothing in memory, and is not what is tested here.
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@st.composite
def stores(draw: st.DrawFn) -> dict[str, Any]:
    """Samples of any bits, some longer than a shard, some of them not stored."""
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    hidden, layers = draw(st.integers(1, 9) | st.sampled_from([96, 1000])), draw(st.integers(0, 3))
    finals = draw(st.sampled_from([[LAST], [PRENORM], [LAST, PRENORM]]))
    arrays = ([HiddenArray(AUX, (layers, hidden), dtype)] if layers else []) + [
        HiddenArray(name, (hidden,), dtype) for name in finals
    ]
    alignment = draw(st.integers(1, 3))
    chunk = alignment * draw(st.integers(1, 3))
    geometry = Geometry(chunk * draw(st.integers(1, 4)), chunk, alignment)
    lengths = draw(st.lists(st.integers(1, 3 * geometry.rows_per_shard), min_size=1, max_size=6))
    return {
        "arrays": arrays,
        "geometry": geometry,
        "lengths": lengths,
        "failed": draw(st.frozensets(st.integers(0, len(lengths) - 1))),
        "compressible": draw(st.booleans()),
        "seed": draw(st.integers(0, 1 << 16)),
    }


def any_bits(array: HiddenArray, length: int, *, compressible: bool, rng: np.random.Generator) -> NDArray[Any]:
    """NaN, infinities and zeros too; or the same two values throughout."""
    dtype = np.dtype(NUMPY_DTYPES[array.dtype])
    bits = rng.integers(0, 2 if compressible else 256, (length, *array.row_shape, dtype.itemsize), np.uint8)
    return bits.view(dtype)[..., 0]


@settings(max_examples=30, deadline=None)
@given(stores())
def test_everybody_reads_what_was_there(store: dict[str, Any]) -> None:
    rng = np.random.default_rng(store["seed"])
    samples = [
        {array.name: any_bits(array, length, compressible=store["compressible"], rng=rng) for array in store["arrays"]}
        for length in store["lengths"]
    ]
    with tempfile.TemporaryDirectory(dir=FAST) as folder:
        source, target = Path(folder) / "s", Path(folder) / "c"
        write_store(source, store["arrays"], samples, geometry=store["geometry"], failed=store["failed"])
        report = compact(source, target, threads=1)
        assert report.samples == len(samples) - len(store["failed"])
        reader = StoreReader(target)
        assert verify_digests(reader).failures == []
        assert reader.stored.tolist() == [i for i in range(len(samples)) if i not in store["failed"]]
        for index in reader.stored.tolist():
            found = reader.sample_as_numpy(index, verify=True)
            assert all(getattr(found, name).tobytes() == rows.tobytes() for name, rows in samples[index].items())
        for array in store["arrays"]:
            wanted = zarr.open_array(source / array.name, mode="r")[:]
            assert zarr.open_array(target / array.name, mode="r")[:].tobytes() == wanted.tobytes()
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(target / array.name)}}
            assert tensorstore.open(spec, read=True).result().read().result().tobytes() == wanted.tobytes()
            objects = [{str(path.relative_to(root)) for path in (root / array.name).rglob("c/**/*")} for root in (source, target)]
            assert objects[0] == objects[1]
