"""StoreReader over stores that the service's own adapters wrote."""

import json
import pickle
import shutil

import ml_dtypes
import numpy as np
import pytest
import torch
import zarr
from statetap.core.placement import Geometry
from statetap_client import layout
from statetap_client.reader import NotAStore, SampleNotStored, StoreReader, StoreReadError

from tests.fakes.store_on_disk import AUX, LAST, PRENORM, digest_of, hidden_arrays, random_rows, write_store

GEOMETRY = Geometry(rows_per_shard=16, rows_per_chunk=4, alignment=2)
LENGTHS = [5, 7, 40, 3]
FAILED = 1
DTYPES = ["bfloat16", "float16", "float32"]


def make_samples(dtype: str = "bfloat16"):
    rng = np.random.default_rng(7)
    return [{array.name: random_rows(array, length, rng) for array in hidden_arrays(dtype)} for length in LENGTHS]


def make_store(path, dtype: str = "bfloat16"):
    samples = make_samples(dtype)
    write_store(path, hidden_arrays(dtype), samples, geometry=GEOMETRY, failed=frozenset({FAILED}))
    return samples


@pytest.mark.parametrize("dtype", DTYPES)
def test_samples_are_torch_tensors_bit_for_bit(tmp_path, dtype) -> None:
    written = make_store(tmp_path / "store", dtype)
    reader = StoreReader(tmp_path / "store")
    assert len(reader) == 4
    assert reader.stored.tolist() == [0, 2, 3]
    assert reader.hidden_arrays == (AUX, LAST, PRENORM)
    for index in reader.stored:
        sample = reader.sample(index)
        assert (sample.index, sample.id, sample.next_token) == (index, f"sample-{index}", index)
        assert sample.input_ids.tolist() == list(range(LENGTHS[index]))
        assert sample.loss_mask.tolist() == [1] * LENGTHS[index]
        for name in (AUX, LAST, PRENORM):
            tensor = getattr(sample, name)
            assert tensor.dtype == getattr(torch, dtype)
            assert tensor.view(torch.uint8).numpy().tobytes() == written[index][name].tobytes()
            assert tuple(tensor.shape) == written[index][name].shape


def test_a_sample_is_its_own_memory(tmp_path) -> None:
    make_store(tmp_path / "store")
    reader = StoreReader(tmp_path / "store")
    before = reader.sample(0).last_hidden_states.clone()
    reader.sample(0).last_hidden_states.zero_()
    assert torch.equal(reader.sample(0).last_hidden_states, before)


def test_numpy_keeps_bfloat16(tmp_path) -> None:
    written = make_store(tmp_path / "store")
    sample = StoreReader(tmp_path / "store").sample_as_numpy(2)
    assert sample.aux_hidden_states.dtype == ml_dtypes.bfloat16
    assert sample.aux_hidden_states.tobytes() == written[2][AUX].tobytes()


def test_iterating_gives_the_stored_ones(tmp_path) -> None:
    make_store(tmp_path / "store")
    assert [sample.id for sample in StoreReader(tmp_path / "store")] == ["sample-0", "sample-2", "sample-3"]


def test_a_sample_that_is_not_stored_says_why(tmp_path) -> None:
    make_store(tmp_path / "store")
    reader = StoreReader(tmp_path / "store")
    with pytest.raises(SampleNotStored, match=r"sample 1 \(id 'sample-1'\) is failed, not stored") as caught:
        reader.sample(FAILED)
    assert caught.value.status is layout.Status.FAILED
    with pytest.raises(SampleNotStored):
        reader.digest(FAILED)


def test_samples_by_id(tmp_path) -> None:
    make_store(tmp_path / "store")
    reader = StoreReader(tmp_path / "store")
    assert reader.by_id("sample-3").index == 3
    with pytest.raises(KeyError, match=r"no sample of .* has the id 'nobody'"):
        reader.by_id("nobody")


def test_indexes_behave_like_a_lists(tmp_path) -> None:
    make_store(tmp_path / "store")
    reader = StoreReader(tmp_path / "store")
    assert reader.sample(-1).index == 3
    for index in (4, -5):
        with pytest.raises(IndexError, match="outside of the store's 4 samples"):
            reader.sample(index)


def test_digests_are_of_the_bytes_in_table_order(tmp_path) -> None:
    written = make_store(tmp_path / "store")
    reader = StoreReader(tmp_path / "store")
    assert reader.digest(2) == reader.recorded_digest(2) == digest_of(hidden_arrays(), written[2])


def test_a_missing_object_is_an_error_not_zeros(tmp_path) -> None:
    make_store(tmp_path / "store")
    reader = StoreReader(tmp_path / "store")
    start, _ = reader.row_range(3)
    (tmp_path / "store" / layout.shard_key(LAST, start // 16, (8,))).unlink()
    with pytest.raises(StoreReadError, match=r"'sample-3'.*is marked stored, but its object last_hidden_states/c/.* is missing"):
        reader.sample(3)


def test_a_chunk_that_was_never_written_is_an_error(tmp_path) -> None:
    make_store(tmp_path / "store")
    # Marked stored, though only placed: the tail of its rows lies in a chunk of nobody.
    zarr.open_array(tmp_path / "store" / "samples" / "status", mode="r+")[FAILED] = layout.Status.STORED
    with pytest.raises(StoreReadError, match="chunk 2 was never written"):
        StoreReader(tmp_path / "store").sample(FAILED)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty"])
def test_a_damaged_object_is_an_error(tmp_path, damage) -> None:
    make_store(tmp_path / "store")
    path = tmp_path / "store" / layout.shard_key(LAST, 0, (8,))
    data = bytearray(path.read_bytes())
    if damage == "flipped":
        data[-20] ^= 255
    path.write_bytes({"truncated": data[:-7], "flipped": data, "empty": b""}[damage])
    with pytest.raises(StoreReadError, match="is damaged"):
        StoreReader(tmp_path / "store").sample(0)


def test_a_compressed_store_is_read_through_zarr(tmp_path) -> None:
    written = make_store(tmp_path / "store")
    for array in hidden_arrays():
        path = tmp_path / "store" / array.name
        data = zarr.open_array(path, mode="r")[:]
        shutil.rmtree(path)
        compressed = zarr.create_array(
            path, shape=data.shape, chunks=(4, *array.row_shape), shards=(16, *array.row_shape), dtype="bfloat16"
        )
        compressed[:] = data
    reader = StoreReader(tmp_path / "store")
    assert reader.sample_as_numpy(2).aux_hidden_states.tobytes() == written[2][AUX].tobytes()
    assert reader.digest(2) == reader.recorded_digest(2)
    assert reader.sample(2).aux_hidden_states.dtype == torch.bfloat16


def test_a_reader_may_be_pickled(tmp_path) -> None:
    make_store(tmp_path / "store")
    reader = pickle.loads(pickle.dumps(StoreReader(tmp_path / "store")))
    assert reader.digest(2) == reader.recorded_digest(2)


def test_what_is_no_store_is_refused(tmp_path) -> None:
    with pytest.raises(NotAStore, match="no Zarr v3 group"):
        StoreReader(tmp_path / "nothing")
    zarr.create_group(tmp_path / "other")
    with pytest.raises(NotAStore, match="not a Statetap store"):
        StoreReader(tmp_path / "other")


def test_another_format_version_is_refused_with_a_way_out(tmp_path) -> None:
    make_store(tmp_path / "store")
    root = tmp_path / "store" / "zarr.json"
    document = json.loads(root.read_text())
    document["attributes"]["statetap"]["format_version"] = 2
    root.write_text(json.dumps(document))
    with pytest.raises(NotAStore, match="has store format 2, this statetap-client reads format 1; install"):
        StoreReader(tmp_path / "store")


def test_a_creation_that_was_cut_short_is_told(tmp_path) -> None:
    make_store(tmp_path / "store")
    shutil.rmtree(tmp_path / "store" / "samples" / "status")
    with pytest.raises(NotAStore, match="not created whole"):
        StoreReader(tmp_path / "store")
