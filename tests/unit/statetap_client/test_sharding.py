"""The shard index, against zarr-python's own shards."""

import numpy as np
import pytest
import zarr
from statetap_client import sharding


def zarr_shard(tmp_path, present: list[bool]) -> bytes:
    """A shard of chunks of 2 int32 rows, as zarr-python writes it."""
    array = zarr.create_array(
        tmp_path / "a", shape=(2 * len(present),), chunks=(2,), shards=(2 * len(present),), dtype="int32", compressors=None
    )
    array[:] = np.repeat([i + 1 if there else 0 for i, there in enumerate(present)], 2)
    return (tmp_path / "a" / "c" / "0").read_bytes()


def test_zarr_shards_are_decoded(tmp_path) -> None:
    present = [True, False, True, False]
    shard = zarr_shard(tmp_path, present)
    index = sharding.decode_index(shard[-sharding.index_bytes(4) :], 4)
    for chunk, (offset, length) in enumerate(index.tolist()):
        if present[chunk]:
            assert np.frombuffer(shard[offset : offset + length], np.int32).tolist() == [chunk + 1] * 2
        else:
            assert offset == length == sharding.MISSING


def test_our_index_is_read_by_zarr(tmp_path) -> None:
    zarr_shard(tmp_path, [True, True, True])
    payload = np.array([7, 8, 9, 10], np.int32).tobytes()
    index = sharding.encode_index(np.array([True, False, True]), 8)
    (tmp_path / "a" / "c" / "0").write_bytes(payload + index)
    assert zarr.open_array(tmp_path / "a", mode="r")[:].tolist() == [7, 8, 0, 0, 9, 10]


def test_a_round_trip() -> None:
    index = sharding.encode_index(np.array([False, True, True]), 100)
    assert len(index) == sharding.index_bytes(3)
    assert sharding.decode_index(index, 3).tolist() == [[sharding.MISSING] * 2, [0, 100], [100, 100]]


def test_damage_is_found() -> None:
    index = bytearray(sharding.encode_index(np.array([True, True]), 100))
    with pytest.raises(ValueError, match="bytes"):
        sharding.decode_index(bytes(index[:-1]), 2)
    index[3] ^= 1
    with pytest.raises(ValueError, match="checksum"):
        sharding.decode_index(bytes(index), 2)
