"""Hand-assembled shards, compressed or not, read back bit for bit by everybody: zarr-python, tensorstore, zarrs, our reader."""

import asyncio
import fcntl
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from statetap.adapters.store import durable_files
from statetap.adapters.store.direct_io import Alignment, address_of
from statetap.adapters.store.local_shard_writer import LocalShardWriter
from statetap.adapters.store.object_files import WriteWay
from statetap.adapters.store.zarr_store import ZarrStore
from statetap.core.placement import Geometry
from statetap.core.spec import Compression, HiddenArray
from statetap.ports import Segment, StorePlan, UnitWrite
from statetap_client import layout, sharding
from statetap_client.shard_files import MissingRows, RowRange, ShardFiles

from tests.fakes.store import NUMPY_DTYPES
from tests.fakes.store_on_disk import AUX, LAST, PRENORM, as_view, attributes


def takes_direct_io(folder: str) -> bool:
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.close(os.open(f"/proc/self/fd/{file.fileno()}", os.O_WRONLY | os.O_DIRECT))
        except OSError:
            return False
    return True


# Durability costs nothing in memory, and is not what is tested here. Before Linux 6.6 tmpfs has no O_DIRECT.
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) and takes_direct_io("/dev/shm") else None
STRICT = Alignment(512, 4096)


@contextmanager
def a_kernel_that_insists() -> Iterator[None]:
    """What O_DIRECT may refuse is refused, whatever the file system: memory tells nobody of misaligned pieces."""
    pwritev = os.pwritev

    def strict(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            assert offset % STRICT.offset == 0
            assert not [b for b in buffers if address_of(b) % STRICT.memory or len(b) % STRICT.offset]
        return pwritev(descriptor, buffers, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable_files.os, "pwritev", strict)
        yield


@st.composite
def units(draw: st.DrawFn) -> dict[str, Any]:
    """A unit of 1 to 3 shards with samples at aligned rows, holes between them, and any bits for values."""
    dtype = draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    # Rows of a few bytes, of parts of a page, and of whole ones.
    hidden = draw(st.integers(1, 9) | st.sampled_from([96, 512, 1000, 1024, 2048]))
    layers = draw(st.integers(0, 3))
    finals = draw(st.sampled_from([[LAST], [PRENORM], [LAST, PRENORM]]))
    arrays = ([HiddenArray(AUX, (layers, hidden), dtype)] if layers else []) + [
        HiddenArray(name, (hidden,), dtype) for name in finals
    ]
    alignment = draw(st.integers(1, 4))
    chunk = alignment * draw(st.integers(1, 3))
    geometry = Geometry(chunk * draw(st.integers(1, 4)), chunk, alignment)
    rows = geometry.rows_per_shard * draw(st.integers(1, 3))
    spans, row = [], 0
    while row < rows:
        length = draw(st.integers(1, rows - row))
        if draw(st.booleans()):
            spans.append((row, length))
        row += -(-length // alignment) * alignment
    first_unit = draw(st.integers(0, 2))
    seed = draw(st.integers(0, 2**32 - 1))
    return {"arrays": tuple(arrays), "geometry": geometry, "rows": rows, "spans": spans, "skip": first_unit, "seed": seed} | {
        "way": draw(st.sampled_from([WriteWay(), WriteWay(STRICT), WriteWay(STRICT, staged=True)])),
        "compression": draw(st.sampled_from(Compression)),
        "compressible": draw(st.booleans()),
        # Where in a page a dump's tensor begins: ours at its start.
        "phase": draw(st.sampled_from([0, 0, 512, 2])),
    }


def made(location: str, unit: dict[str, Any]) -> tuple[UnitWrite, dict[str, np.ndarray]]:
    """The unit to write; what every array must then hold, in bytes, `[rows of the store, row bytes]`."""
    rng = np.random.default_rng(unit["seed"])
    row_start = unit["skip"] * unit["geometry"].rows_per_shard
    wanted, segments = {}, []
    for array in unit["arrays"]:
        wanted[array.name] = np.zeros((row_start + unit["rows"], array.row_bytes), np.uint8)
        for row, length in unit["spans"]:
            most = 2 if unit["compressible"] else 256
            data = in_memory(rng.integers(0, most, (length, array.row_bytes), np.uint8), unit["phase"])
            wanted[array.name][row_start + row : row_start + row + length] = data
            # One sample may come as several dumps.
            half = length // 2
            segments += [Segment(array.name, row, as_view(data[:half]))] if half else []
            segments.append(Segment(array.name, row + half, as_view(data[half:])))

    return UnitWrite(
        location=location,
        arrays=unit["arrays"],
        geometry=unit["geometry"],
        row_start=row_start,
        rows=unit["rows"],
        fence=1,
        segments=segments,
        compression=unit["compression"],
    ), wanted


def write(root: Path, unit: dict[str, Any]) -> dict[str, np.ndarray]:
    """Write the unit; what every array must then hold."""
    unit_write, wanted = made(str(root), unit)

    async def run() -> None:
        writer = LocalShardWriter(way=lambda _: unit["way"])
        await ZarrStore().prepare(
            str(root),
            StorePlan(
                arrays=unit_write.arrays,
                geometry=unit_write.geometry,
                rows=unit_write.row_start + unit_write.rows,
                samples=1,
                attributes=attributes(unit_write.arrays[0].dtype),
                compression=unit_write.compression,
            ),
        )
        await writer.write(unit_write)
        writer.close()

    with a_kernel_that_insists():
        asyncio.run(run())
    return wanted


def in_memory(data: np.ndarray, phase: int) -> np.ndarray:
    """The same bytes, `phase` bytes behind the start of a page."""
    room = np.empty(data.nbytes + 2 * 4096, np.uint8)
    start = -room.ctypes.data % 4096 + phase
    placed = room[start : start + data.nbytes].reshape(data.shape)
    placed[:] = data
    return placed


def as_bytes(values: np.ndarray, rows: int) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8).reshape(rows, -1)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(unit=units())
def test_everybody_reads_the_bits_that_were_written(unit) -> None:
    with tempfile.TemporaryDirectory(dir=FAST) as directory:
        root = Path(directory) / "store"
        for name, wanted in write(root, unit).items():
            array = zarr.open_group(root, mode="r", use_consolidated=False)[name]
            assert array.dtype == NUMPY_DTYPES[unit["arrays"][0].dtype]
            assert np.array_equal(as_bytes(array[:], len(wanted)), wanted)
            spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(root / name)}}
            read = tensorstore.open(spec, read=True).result().read().result()
            assert np.array_equal(as_bytes(read, len(wanted)), wanted)
            if unit["compression"] is Compression.NONE:
                check_own_reader(root, name, wanted, unit)
            check_holes(root, name, unit)


def touched_chunks(unit: dict[str, Any]) -> set[int]:
    """Chunks of the unit that a span has rows in."""
    return {r // unit["geometry"].rows_per_chunk for row, length in unit["spans"] for r in range(row, row + length)}


def check_holes(root: Path, name: str, unit: dict[str, Any]) -> None:
    """A chunk that no span touches is missing, a shard of such chunks has no object, and chunks stand in row order."""
    document = json.loads((root / name / "zarr.json").read_text())
    shape = document["chunk_grid"]["configuration"]["chunk_shape"]
    chunks = unit["geometry"].rows_per_shard // unit["geometry"].rows_per_chunk
    present = set()
    for shard in range(unit["rows"] // unit["geometry"].rows_per_shard):
        path = root / layout.shard_key(name, unit["skip"] + shard, shape[1:])
        if not path.exists():
            continue
        data = path.read_bytes()
        index = sharding.decode_index(data[-sharding.index_bytes(chunks) :], chunks)
        there = index[:, 1] != sharding.MISSING
        present |= {shard * chunks + chunk for chunk in np.flatnonzero(there).tolist()}
        ends = np.cumsum(index[there, 1])
        assert index[there, 0].tolist() == [0, *ends[:-1].tolist()]
        assert ends[-1] + sharding.index_bytes(chunks) == len(data)
    assert present == touched_chunks(unit)


def check_own_reader(root: Path, name: str, wanted: np.ndarray, unit: dict[str, Any]) -> None:
    """Spans are read exactly, one by one and all at once, either way; a chunk that nobody wrote is an error."""
    document = json.loads((root / name / "zarr.json").read_text())
    files = ShardFiles(root, name, document)
    start, chunk = unit["skip"] * unit["geometry"].rows_per_shard, unit["geometry"].rows_per_chunk
    for row, length in unit["spans"]:
        read = np.empty((length, wanted.shape[1]), np.uint8)
        files.read([RowRange(start + row, length, as_view(read))])
        assert np.array_equal(read, wanted[start + row : start + row + length])
    for direct in (False, True):
        memory = {row: in_memory(np.empty((length, wanted.shape[1]), np.uint8), 0) for row, length in unit["spans"]}
        many = [RowRange(start + row, len(rows), rows.reshape(-1).data) for row, rows in memory.items()]
        ShardFiles(root, name, document, direct=direct).read(many)
        for row, rows in memory.items():
            assert np.array_equal(rows, wanted[start + row : start + row + len(rows)])
    for empty in set(range(unit["rows"] // chunk)) - touched_chunks(unit):
        with pytest.raises(MissingRows):
            files.read([RowRange(start + empty * chunk, 1, as_view(np.empty(wanted.shape[1], np.uint8)))])


@pytest.mark.skipif(importlib.util.find_spec("zarrs") is None, reason="zarrs is not installed")
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(unit=units())
def test_zarrs_reads_them_as_integers(unit) -> None:
    """The zarrs pipeline refuses bfloat16: the data type in the metadata is replaced by an integer's of the same size."""
    with tempfile.TemporaryDirectory(dir=FAST) as directory:
        root = Path(directory) / "store"
        for name, wanted in write(root, unit).items():
            path = root / name / "zarr.json"
            document = json.loads(path.read_text())
            document |= {"data_type": "uint32" if document["data_type"] == "float32" else "uint16", "fill_value": 0}
            path.write_text(json.dumps(document))
            with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline", "codec_pipeline.strict": True}):
                array = zarr.open_array(root / name, mode="r")
                assert np.array_equal(as_bytes(array[:], len(wanted)), wanted)
