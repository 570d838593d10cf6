"""The layout's documents: what zarr-python and tensorstore make of them."""

import json
from typing import get_args

import numpy as np
import pytest
import tensorstore
import zarr
from statetap.core.records import SampleStatus
from statetap.core.spec import AUX_HIDDEN_STATES, ITEM_BYTES, LAST_HIDDEN_STATES, LAST_HIDDEN_STATES_PRENORM, Compression
from statetap_client import layout
from statetap_client.schemas import CompressionName

DOCUMENTS = {
    "aux": layout.hidden_document((3, 8), "bfloat16", rows=100, rows_per_shard=32, rows_per_chunk=8),
    "compressed": layout.compact_document(
        layout.hidden_document((3, 8), "bfloat16", rows=100, rows_per_shard=32, rows_per_chunk=8)
    ),
    "last": layout.hidden_document((8,), "float16", rows=100, rows_per_shard=32, rows_per_chunk=8),
    **{name: layout.token_document(dtype, rows=100) for name, dtype in layout.TOKEN_ARRAYS.items()},
    **{name: layout.sample_document(name, samples=7) for name in layout.SAMPLE_ARRAYS},
}


def write(path, document) -> None:
    path.mkdir()
    (path / "zarr.json").write_text(json.dumps(document))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_zarr_would_have_written_the_same(tmp_path, name) -> None:
    write(tmp_path / name, DOCUMENTS[name])
    array = zarr.open_array(tmp_path / name, mode="r+")
    array.resize(array.shape)
    assert plain(json.loads((tmp_path / name / "zarr.json").read_text())) == plain(DOCUMENTS[name])


@pytest.mark.parametrize("name", [name for name in DOCUMENTS if name != "id"])
def test_tensorstore_opens_them(tmp_path, name) -> None:
    write(tmp_path / name, DOCUMENTS[name])
    opened = tensorstore.open({"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / name)}}).result()
    assert opened.dtype.name == DOCUMENTS[name]["data_type"]
    assert list(opened.shape) == DOCUMENTS[name]["shape"]
    assert list(opened.domain.labels) == DOCUMENTS[name]["dimension_names"]
    opened.read().result()


def test_unwritten_samples_read_as_pending_and_unknown(tmp_path) -> None:
    read = {}
    for name in layout.SAMPLE_ARRAYS:
        write(tmp_path / name, DOCUMENTS[name])
        read[name] = zarr.open_array(tmp_path / name, mode="r")[0]
    assert read["status"] == layout.Status.PENDING
    assert read["next_token"] == -1
    assert read["id"] == ""
    assert read["digest"] == 0


def test_keys_are_zarrs(tmp_path) -> None:
    for name, shape in (("aux", (3, 8)), ("last", (8,))):
        write(tmp_path / name, DOCUMENTS[name])
        zarr.open_array(tmp_path / name, mode="r+")[32] = 1
        assert (tmp_path / layout.shard_key(name, 1, shape)).is_file()
    write(tmp_path / "status", DOCUMENTS["status"])
    zarr.open_array(tmp_path / "status", mode="r+")[0] = 1
    assert (tmp_path / layout.chunk_key("status", 0)).is_file()


def test_metadata_keys() -> None:
    assert layout.metadata_key("") == "zarr.json"
    assert layout.metadata_key("samples/id") == "samples/id/zarr.json"


@pytest.mark.parametrize(("start", "rows", "shards"), [(0, 1, [0]), (0, 8, [0]), (7, 2, [0, 1]), (8, 16, [1, 2])])
def test_shards_of(start, rows, shards) -> None:
    assert list(layout.shards_of(start, rows, 8)) == shards


def test_only_uncompressed_sharding_may_be_read_by_range(tmp_path) -> None:
    assert layout.is_uncompressed_sharding(DOCUMENTS["aux"]["codecs"])
    assert not layout.is_uncompressed_sharding(DOCUMENTS["input_ids"]["codecs"])
    assert not layout.is_uncompressed_sharding(DOCUMENTS["status"]["codecs"])
    start = json.loads(json.dumps(DOCUMENTS["aux"]["codecs"]))
    start[0]["configuration"]["index_location"] = "start"
    assert not layout.is_uncompressed_sharding(start)
    # As tensorstore writes it: without the default index location.
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / "t")}, "metadata": DOCUMENTS["aux"]}
    tensorstore.open(spec, create=True).result()
    assert layout.is_uncompressed_sharding(json.loads((tmp_path / "t" / "zarr.json").read_text())["codecs"])


def test_codecs_are_called_what_a_job_calls_them(tmp_path) -> None:
    compressed = layout.compact_document(DOCUMENTS["aux"])
    assert layout.compression_of(DOCUMENTS["aux"]["codecs"]) == Compression.NONE
    assert layout.compression_of(compressed["codecs"]) == Compression.ZSTD
    assert layout.compression_of(DOCUMENTS["input_ids"]["codecs"]) is None
    other = json.loads(json.dumps(compressed["codecs"]))
    other[0]["configuration"]["codecs"][1]["configuration"]["clevel"] = 9
    assert layout.compression_of(other) is None
    assert layout.compression_of([]) is None


def test_both_sides_agree() -> None:
    assert set(get_args(CompressionName)) == {layout.UNCOMPRESSED, layout.ZSTD} == set(Compression)
    assert {status.name: status.value for status in layout.Status} == {s.name: s.value for s in SampleStatus}
    assert layout.HIDDEN_ARRAYS == (AUX_HIDDEN_STATES, LAST_HIDDEN_STATES, LAST_HIDDEN_STATES_PRENORM)
    assert layout.ITEM_BYTES == ITEM_BYTES
    assert layout.row_bytes((3, 8), "float32") == np.zeros((3, 8), np.float32).nbytes


def plain(document):
    """Without what means the same: an absent and an empty configuration."""
    if isinstance(document, dict):
        return {key: plain(value) for key, value in document.items() if not (key == "configuration" and value == {})}
    return [plain(value) for value in document] if isinstance(document, list) else document
