"""bfloat16 in zarr-python: registered without importing zarr, and the same on disk as tensorstore's."""

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import statetap_client
import tensorstore
import zarr
from statetap_client.bfloat16 import BFloat16

VALUES = np.array([[0.0, -1.5, 3.25], [np.inf, -np.inf, 1e-38], [2.0, 65280.0, -0.0], [0.1, 0.2, 0.3]]).astype(ml_dtypes.bfloat16)
CODECS = [None, zarr.codecs.ZstdCodec(level=1), zarr.codecs.BloscCodec(cname="zstd", shuffle="shuffle", typesize=2)]


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


def test_importing_the_client_does_not_import_zarr() -> None:
    assert run_python("import sys, statetap_client; print('zarr' in sys.modules)").strip() == "False"


@pytest.mark.parametrize(
    "first",
    [
        "import statetap_client, zarr",
        "import zarr, statetap_client",
        "import statetap_client, zarr.codecs",
        "import statetap_client, importlib.util; importlib.util.find_spec('zarr'); import zarr",
    ],
)
def test_bfloat16_is_registered_whatever_is_imported_first(first: str) -> None:
    code = f"{first}; from zarr.dtype import data_type_registry as r; print(r.get('bfloat16').__name__)"
    assert run_python(code).strip() == "BFloat16"


def test_the_finder_is_gone_after_zarr_was_imported() -> None:
    waiting = "print(any('_AfterZarr' in repr(finder) for finder in sys.meta_path))"
    assert run_python(f"import sys, statetap_client; {waiting}; import zarr; {waiting}").split() == ["True", "False"]
    statetap_client.register_bfloat16()
    assert not any("_AfterZarr" in repr(finder) for finder in sys.meta_path)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("codec", CODECS, ids=["plain", "zstd", "blosc"])
def test_tensorstore_reads_what_zarr_wrote(tmp_path, codec, sharded) -> None:
    array = zarr.create_array(
        tmp_path / "a",
        shape=VALUES.shape,
        chunks=(2, 3),
        shards=(4, 3) if sharded else None,
        dtype="bfloat16",
        compressors=codec,
    )
    array[:] = VALUES
    document = json.loads((tmp_path / "a" / "zarr.json").read_text())
    assert (document["data_type"], document["fill_value"]) == ("bfloat16", 0.0)
    opened = open_tensorstore(tmp_path / "a")
    assert opened.dtype.name == "bfloat16"
    assert opened.read().result().tobytes() == VALUES.tobytes()


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_zarr_reads_what_tensorstore_wrote(tmp_path, compressed, sharded) -> None:
    inner = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if compressed:
        inner.append({"name": "zstd", "configuration": {"level": 1}})
    codecs = inner
    if sharded:
        codecs = [{"name": "sharding_indexed", "configuration": {"chunk_shape": [2, 3], "codecs": inner}}]
    grid = {"name": "regular", "configuration": {"chunk_shape": [4, 3]}}
    metadata = {"shape": [4, 3], "data_type": "bfloat16", "chunk_grid": grid, "codecs": codecs}
    written = open_tensorstore(tmp_path / "a", metadata=metadata, create=True)
    written.write(VALUES).result()
    array = zarr.open_array(tmp_path / "a", mode="r")
    assert array.dtype == ml_dtypes.bfloat16
    assert array[:].tobytes() == VALUES.tobytes()


def test_native_dtype_matches_this_type_alone() -> None:
    assert isinstance(zarr.dtype.parse_dtype(np.dtype(ml_dtypes.bfloat16), zarr_format=3), BFloat16)
    assert BFloat16().to_native_dtype() == np.dtype(ml_dtypes.bfloat16)
    assert BFloat16().item_size == 2


def test_zarr_v2_is_refused() -> None:
    with pytest.raises(ValueError, match="Zarr v2 has no bfloat16"):
        BFloat16().to_json(2)


@pytest.mark.parametrize(
    ("json_value", "bits"),
    [(0.0, 0), (1, 0x3F80), (-2.5, 0xC020), ("Infinity", 0x7F80), ("-Infinity", 0xFF80), ("0x7fc1", 0x7FC1)],
)
def test_fill_values(json_value, bits) -> None:
    scalar = BFloat16().from_json_scalar(json_value, zarr_format=3)
    assert np.array(scalar).view(np.uint16) == bits


@pytest.mark.parametrize("value", [0.0, -2.5, "NaN", "Infinity", "-Infinity"])
def test_fill_values_survive_a_round_trip(value) -> None:
    assert BFloat16().to_json_scalar(BFloat16().from_json_scalar(value, zarr_format=3), zarr_format=3) == value


@pytest.mark.parametrize("value", [None, "much", [0.0], True])
def test_what_is_no_fill_value_is_refused(value) -> None:
    with pytest.raises(TypeError, match="bfloat16"):
        BFloat16().from_json_scalar(value, zarr_format=3)


def open_tensorstore(path, **options):
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    if "metadata" in options:
        spec["metadata"] = options.pop("metadata")
    return tensorstore.open(spec, **options).result()
