"""Other people's libraries open a job's store: zarr-python, tensorstore and xarray read every hidden array bit for bit."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorstore
import xarray
import zarr
from statetap_client import layout
from statetap_client.reader import StoreReader
from statetap_client.verify import verify_against_model, verify_digests

from tests.fakes.cluster import cluster, token_samples

SAMPLES = token_samples(40, longest=140, seed=9)
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    with cluster(tmp_path_factory.mktemp("store"), model) as made:
        made.start_worker("w", "--layers", "0,2,3", "--dtype", request.param)
        with made.start_service() as client:
            made.wait_for_workers(client, "w")
            job = made.run_job(client, SAMPLES, "read.zarr")
            assert job.state == "completed"
            return Path(job.store)


def test_every_library_reads_the_same_bytes(store: Path) -> None:
    reader = StoreReader(store)
    dtype = DTYPES[reader.dtype]
    tree = xarray.open_datatree(store, engine="zarr", consolidated=False)
    for name in reader.hidden_arrays:
        by_zarr = np.asarray(zarr.open_array(store / name, mode="r")[...])
        opened = tensorstore.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": str(store / name)}}).result()
        by_tensorstore = np.asarray(opened.read().result())
        by_xarray = tree[name].to_numpy()
        assert by_zarr.dtype == by_tensorstore.dtype == by_xarray.dtype == dtype
        assert by_zarr.tobytes() == by_tensorstore.tobytes() == by_xarray.tobytes()
        for index in reader.stored.tolist():
            first, last = reader.row_range(index)
            assert getattr(reader.sample_as_numpy(index), name).tobytes() == by_zarr[first:last].tobytes()
            assert np.any(by_zarr[first:last].view(np.uint8))
    assert tree["samples"].sizes["sample"] == len(SAMPLES)


def test_hugging_face_computes_the_same(store: Path, model: Path) -> None:
    """Every captured layer (the first, a middle one and the last) and both final states, for every sample."""
    reader = StoreReader(store)
    computed = verify_against_model(reader, str(model), samples=None)
    assert (computed.checked, computed.failures) == (len(SAMPLES), [])
    assert len(computed.max_error) == 5, computed.max_error
    assert verify_digests(reader).ok


def test_a_store_of_shifted_layers_is_found_out(store: Path, model: Path) -> None:
    """What `statetap verify` is for: the wrong layer under the right name."""
    reader = StoreReader(store)
    reader.attributes["aux_layer_ids"] = [1, 2, 3]
    found = verify_against_model(reader, str(model), samples=3)
    assert {failure.array.split("[")[0] for failure in found.failures} == {layout.AUX_HIDDEN_STATES}
