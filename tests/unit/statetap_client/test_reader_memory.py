"""Where samples are read to: ranges of rows, buffers that are used again, several at once, worker processes."""

import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest
import torch
import zarr
from statetap.core.placement import Geometry
from statetap_client import byte_ranges, layout, sample_memory
from statetap_client.reader import DigestMismatch, SampleBuffer, StoreReader, StoreReadError
from statetap_client.stored_samples import StoredSamples
from torch.utils.data import DataLoader

from tests.fakes.store_on_disk import AUX, LAST, PRENORM, hidden_arrays, random_rows, write_store

# Rows of 4096 and 2048 bytes: samples begin at pages, and odd ones end within one.
ARRAYS = hidden_arrays(layers=2, hidden=1024)
GEOMETRY = Geometry(rows_per_shard=64, rows_per_chunk=8, alignment=2)
LENGTHS = [5, 7, 33, 2, 1, 80]
NAMES = (AUX, LAST, PRENORM)


@pytest.fixture(scope="module")
def samples():
    rng = np.random.default_rng(5)
    return [{array.name: random_rows(array, length, rng) for array in ARRAYS} for length in LENGTHS]


@pytest.fixture(scope="module")
def store(samples, tmp_path_factory):
    path = tmp_path_factory.mktemp("reader") / "store"
    write_store(path, ARRAYS, samples, geometry=GEOMETRY)
    return path


@pytest.fixture(params=["cached", "direct", "compressed"])
def reader(request, store, tmp_path) -> StoreReader:
    if request.param != "compressed":
        return StoreReader(store, direct=request.param == "direct")
    return StoreReader(compressed(store, tmp_path / "compressed"))


def compressed(store, target):
    """The same store with zstd on its hidden arrays: left to zarr-python."""
    shutil.copytree(store, target)
    for array in ARRAYS:
        data = zarr.open_array(store / array.name, mode="r")[:]
        shutil.rmtree(target / array.name)
        made = zarr.create_array(
            target / array.name, shape=data.shape, chunks=(8, *array.row_shape), shards=(64, *array.row_shape), dtype="bfloat16"
        )
        made[:] = data
    return target


def bits(tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("rows", [(0, 33), (0, 1), (1, 2), (3, 20), (32, 33), (9, 9)])
@pytest.mark.parametrize("buffered", [False, True])
def test_any_rows_of_a_sample(reader, samples, rows, buffered) -> None:
    sample = reader.sample(2, rows=rows, buffer=SampleBuffer() if buffered else None)
    first, last = rows
    for name in NAMES:
        tensor = getattr(sample, name)
        assert (tensor.dtype, tensor.shape[0]) == (torch.bfloat16, last - first)
        assert bits(tensor) == samples[2][name][first:last].tobytes()
    assert sample.input_ids.tolist() == list(range(first, last))
    assert sample.loss_mask.tolist() == [1] * (last - first)


@pytest.mark.parametrize("rows", [(-1, 3), (0, 34), (5, 4)])
def test_rows_that_a_sample_does_not_have(reader, rows) -> None:
    with pytest.raises(IndexError, match="outside of the 33 rows of sample 2"):
        reader.sample(2, rows=rows)


def test_a_buffer_is_used_again_and_grows(reader, samples) -> None:
    buffer = SampleBuffer()
    places = []
    for index in (2, 0, 5, 1, 2):
        sample = reader.sample(index, buffer=buffer)
        assert all(bits(getattr(sample, name)) == samples[index][name].tobytes() for name in NAMES)
        places.append(sample.aux_hidden_states.data_ptr())
    assert places[0] == places[1]
    assert places[2] == places[3] == places[4]
    assert places[0] % byte_ranges.PAGE_BYTES == 0


def test_numpy_reads_into_buffers_too(reader, samples) -> None:
    sample = reader.sample_as_numpy(5, rows=(10, 30), buffer=SampleBuffer(pinned=False))
    assert sample.last_hidden_states.dtype == ml_dtypes.bfloat16
    assert sample.last_hidden_states.tobytes() == samples[5][LAST][10:30].tobytes()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs CUDA")
def test_buffers_are_pinned_where_cuda_is_there(store, samples) -> None:
    sample = StoreReader(store).sample(2, buffer=SampleBuffer())
    assert sample.aux_hidden_states.is_pinned()
    assert bits(sample.aux_hidden_states.to("cuda", non_blocking=True).cpu()) == samples[2][AUX].tobytes()


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 3, 0, 4], [2, 2]])
def test_several_samples_at_once_come_in_the_order_asked_for(reader, samples, order) -> None:
    for buffers in (None, [SampleBuffer() for _ in order]):
        found = reader.samples(order, buffers=buffers)
        assert [sample.index for sample in found] == order
        for sample in found:
            assert all(bits(getattr(sample, name)) == samples[sample.index][name].tobytes() for name in NAMES)


def test_neighbours_are_read_in_one_call(store, monkeypatch) -> None:
    reader = StoreReader(store, direct=False)
    calls = []
    preadv = os.preadv
    monkeypatch.setattr(byte_ranges.os, "preadv", lambda *call: calls.append(call[2]) or preadv(*call))
    reader.samples([1, 0, 2])
    assert calls == [0, 0, 0]


def test_each_sample_needs_a_buffer_of_its_own(store) -> None:
    with pytest.raises(ValueError, match="1 buffers for 2 samples"):
        StoreReader(store).samples([0, 1], buffers=[SampleBuffer()])


def test_an_error_names_the_sample_among_several(store, tmp_path) -> None:
    shutil.copytree(store, tmp_path / "store")
    reader = StoreReader(tmp_path / "store")
    start, _ = reader.row_range(5)
    (tmp_path / "store" / layout.shard_key(LAST, start // 64, (1024,))).unlink()
    with pytest.raises(StoreReadError, match=r"sample 5 .*'sample-5'.* is marked stored, but its object"):
        reader.samples([0, 1, 5])


@pytest.mark.parametrize("rows", [None, (0, 2)])
def test_digests_on_demand(store, tmp_path, rows) -> None:
    shutil.copytree(store, tmp_path / "store")
    reader = StoreReader(tmp_path / "store")
    assert reader.sample(2, rows=rows, verify=True).index == 2
    _, end = reader.row_range(2)
    with (tmp_path / "store" / layout.shard_key(LAST, 0, (1024,))).open("r+b") as file:
        file.seek((end - 1) * 2048)
        file.write(b"\xff")
    reader.sample(2, rows=rows)
    with pytest.raises(
        DigestMismatch, match=r"sample 2 \(id 'sample-2'\) has the digest [0-9a-f]{16}, [0-9a-f]{16} was recorded"
    ):
        reader.sample(2, rows=rows, verify=True)
    assert reader.sample(0, verify=True).index == 0


def test_large_stores_are_read_past_the_page_cache_by_themselves(store, monkeypatch) -> None:
    opened = []
    real = byte_ranges._open_direct
    monkeypatch.setattr(byte_ranges, "_open_direct", lambda path: opened.append(path) or real(path))
    StoreReader(store).sample(0)
    assert opened == []
    monkeypatch.setattr(os, "sysconf", lambda _: 4)
    StoreReader(store).sample(0)
    assert len(opened) == 3


class TestTokens:
    def test_rows_across_chunks_and_beyond_the_end(self, store, tmp_path, monkeypatch) -> None:
        reader = StoreReader(store)
        ids = zarr.open_array(store / "input_ids", mode="r")[:]
        for first, last in [(0, 3), (60, 70), (100, 10_000), (500, 600)]:
            assert reader.token_rows("input_ids", first, last).tolist() == ids[first:last].tolist()

    def test_small_chunks_and_shards_that_nobody_wrote(self, store, tmp_path) -> None:
        shutil.copytree(store, tmp_path / "store")
        ids = np.arange(3000, dtype=np.int32)
        remake_tokens(tmp_path / "store" / "input_ids", ids, rows=5000, chunk=64, shard=256)
        reader = StoreReader(tmp_path / "store")
        assert "input_ids" in reader._token_files
        expected = [*ids.tolist(), *[0] * 2000]
        for first, last in [(0, 5000), (10, 11), (60, 70), (250, 600), (2990, 3100), (4999, 6000)]:
            assert reader.token_rows("input_ids", first, last).tolist() == expected[first:last]

    def test_damage_is_told(self, store, tmp_path) -> None:
        shutil.copytree(store, tmp_path / "store")
        path = tmp_path / "store" / layout.chunk_key("loss_mask", 0)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(StoreReadError, match="loss_mask/c/0 is damaged"):
            StoreReader(tmp_path / "store").sample(0)

    def test_other_codecs_are_left_to_zarr(self, store, tmp_path) -> None:
        shutil.copytree(store, tmp_path / "store")
        ids = zarr.open_array(store / "input_ids", mode="r")[:]
        shutil.rmtree(tmp_path / "store" / "input_ids")
        zarr.create_array(tmp_path / "store" / "input_ids", shape=ids.shape, chunks=(16,), dtype="int32")[:] = ids
        reader = StoreReader(tmp_path / "store")
        assert reader.sample(2).input_ids.tolist() == list(range(33))


def remake_tokens(path, ids, *, rows: int, chunk: int, shard: int) -> None:
    document = layout.token_document("int32", rows=rows)
    document["chunk_grid"]["configuration"]["chunk_shape"] = [shard]
    document["codecs"][0]["configuration"]["chunk_shape"] = [chunk]
    shutil.rmtree(path)
    path.mkdir()
    (path / "zarr.json").write_text(json.dumps(document))
    zarr.open_array(path, mode="r+")[: len(ids)] = ids


class TestWorkers:
    """DataLoader workers, while the parent has used the reader too."""

    # A spawned worker imports torch anew, which takes seconds: one is enough.
    @pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("spawn", 1)])
    def test_every_sample_comes_whole(self, reader, samples, method, workers) -> None:
        reader.sample(0)
        loader = DataLoader(
            StoredSamples(reader), batch_size=None, shuffle=True, num_workers=workers, multiprocessing_context=method
        )
        found = {sample.index: sample for sample in loader}
        assert sorted(found) == list(range(len(LENGTHS)))
        for index, sample in found.items():
            assert sample.input_ids.tolist() == list(range(LENGTHS[index]))
            assert sample.aux_hidden_states.dtype == torch.bfloat16
            assert all(bits(getattr(sample, name)) == samples[index][name].tobytes() for name in NAMES)

    def test_a_worker_reads_into_shared_memory(self, store) -> None:
        [shared] = set(DataLoader(_Shared(store), batch_size=None, num_workers=1, multiprocessing_context="fork"))
        assert shared

    def test_a_buffer_is_refused_in_a_worker(self, store, monkeypatch) -> None:
        """A sample is still on its way to the trainer when the worker reads the next one."""
        monkeypatch.setattr(sample_memory, "in_dataloader_worker", lambda: True)
        with pytest.raises(RuntimeError, match="leave it out, and each sample gets its own"):
            StoreReader(store).sample(0, buffer=SampleBuffer())

    def test_a_buffer_is_pickled_without_its_memory(self, store) -> None:
        import pickle

        buffer = SampleBuffer(pinned=False)
        StoreReader(store).sample(5, buffer=buffer)
        assert len(pickle.dumps(buffer)) < 1000


class _Shared:
    def __init__(self, store) -> None:
        self.samples = StoredSamples(store)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, item: int) -> bool:
        sample = self.samples[item]
        return all(getattr(sample, name).is_shared() for name in (*NAMES, "input_ids", "loss_mask"))
