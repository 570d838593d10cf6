"""Compressed shard objects: what `compact` would make of the uncompressed ones, and never one that was not decoded again."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zarr
from statetap.adapters.store import compressed_chunks
from statetap.adapters.store.compressed_chunks import compressed_windows
from statetap.adapters.store.local_shard_writer import LocalShardWriter
from statetap.adapters.store.object_files import WINDOW_BYTES, WriteWay
from statetap.adapters.store.shard_assembly import plan_shards
from statetap.adapters.store.zarr_store import ZarrStore
from statetap.core.placement import Geometry
from statetap.core.spec import Compression, HiddenArray
from statetap.ports import Segment, StoreError, StorePlan, UnitWrite
from statetap_client.chunk_codec import encode
from statetap_client.compact import compact
from statetap_client.sharding import index_bytes

from tests.fakes.store_on_disk import AUX, as_view, attributes, hidden_arrays, random_rows, write_store

GEOMETRY = Geometry(rows_per_shard=16, rows_per_chunk=4, alignment=2)
ARRAYS = hidden_arrays("bfloat16", layers=2, hidden=64)
ARRAY = HiddenArray(AUX, (2, 64), "bfloat16")


def make_unit(root: Path, *spans: tuple[int, int], geometry: Geometry = GEOMETRY) -> UnitWrite:
    rng = np.random.default_rng(0)
    return UnitWrite(
        location=str(root),
        arrays=(ARRAY,),
        geometry=geometry,
        row_start=0,
        rows=geometry.rows_per_shard,
        fence=1,
        segments=[Segment(AUX, row, as_view(random_rows(ARRAY, length, rng))) for row, length in spans],
        compression=Compression.ZSTD,
    )


async def prepare(root: Path) -> None:
    plan = StorePlan(
        arrays=(ARRAY,), geometry=GEOMETRY, rows=16, samples=1, attributes=attributes(), compression=Compression.ZSTD
    )
    await ZarrStore().prepare(str(root), plan)


@pytest.fixture
def writer():
    writer = LocalShardWriter(way=lambda _: WriteWay())
    yield writer
    writer.close()


def objects_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("c/**/*") if path.is_file()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_job_writes_what_compact_would_have_made_of_its_store(tmp_path, dtype) -> None:
    """Every file, metadata included; the third sample leaves a hole, the second is several shards long."""
    rng = np.random.default_rng(0)
    arrays = hidden_arrays(dtype, layers=2, hidden=64)
    samples = [{array.name: random_rows(array, length, rng) for array in arrays} for length in (5, 40, 16, 3, 7)]
    for name, compression in (("plain", Compression.NONE), ("compressed", Compression.ZSTD)):
        write_store(tmp_path / name, arrays, samples, geometry=GEOMETRY, failed=frozenset({2}), compression=compression)
    compact(tmp_path / "plain", tmp_path / "compact")
    trees = [
        {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (tmp_path / "compact", tmp_path / "compressed")
    ]
    assert trees[0] == trees[1]
    assert objects_of(tmp_path / "compressed").keys() == objects_of(tmp_path / "plain").keys()


@pytest.mark.parametrize("broken", ["a bit", "unreadable"])
async def test_a_chunk_that_does_not_come_back_is_never_published(tmp_path, writer, monkeypatch, broken) -> None:
    root = tmp_path / "s"
    await prepare(root)
    unit = make_unit(root, (0, 3), (4, 12))
    seen: list[bytes] = []

    def encode_badly(chunk: np.ndarray, item_bytes: int) -> bytes:
        seen.append(chunk.tobytes())
        if len(seen) < 3:
            return encode(chunk, item_bytes)
        return encode(chunk ^ (np.arange(len(chunk)) == 7).astype(np.uint8), item_bytes) if broken == "a bit" else bytes(64)

    monkeypatch.setattr(compressed_chunks.chunk_codec, "encode", encode_badly)
    with pytest.raises(StoreError, match=rf"chunk 2 of {AUX}/c/0/0/0 is not what was compressed.*submit the job with"):
        await writer.write(unit)
    assert objects_of(root) == {}
    assert not list(root.rglob("*.partial"))
    monkeypatch.undo()
    assert len(await writer.write(unit)) == 1


async def test_rows_of_an_earlier_chunk_do_not_stay_in_a_later_ones_gaps(tmp_path, writer) -> None:
    root = tmp_path / "s"
    await prepare(root)
    unit = make_unit(root, (0, 4), (5, 1), (7, 2))
    await writer.write(unit)
    wanted = np.zeros((16, ARRAY.row_bytes), np.uint8)
    for segment in unit.segments:
        rows = np.frombuffer(segment.data, np.uint8).reshape(-1, ARRAY.row_bytes)
        wanted[segment.row : segment.row + len(rows)] = rows
    assert zarr.open_array(root / AUX, mode="r")[:].tobytes() == wanted.tobytes()


def test_no_window_is_larger_than_a_file_takes(tmp_path) -> None:
    """Hidden states do not shrink to half of their size: a chunk as large as two windows is more than one, compressed."""
    rows = 2 * WINDOW_BYTES // ARRAY.row_bytes
    [plan] = plan_shards(make_unit(tmp_path, (0, rows), geometry=Geometry(rows, rows, 1)))
    sizes = [sum(map(len, window)) for window in compressed_windows(plan, None)]
    assert max(sizes) == WINDOW_BYTES
    assert sum(sizes) > WINDOW_BYTES + index_bytes(1)


async def test_memory_is_that_of_chunks_not_of_shards(tmp_path, writer) -> None:
    """However many chunks a shard has, what is allocated at a time is a chunk three times, and not much else."""
    geometry = Geometry(rows_per_shard=1 << 14, rows_per_chunk=1 << 10, alignment=2)
    unit = make_unit(tmp_path / "s", (0, 1 << 14), geometry=geometry)
    chunk_bytes = geometry.rows_per_chunk * ARRAY.row_bytes
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        await writer.write(unit)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < 5 * chunk_bytes < geometry.rows_per_shard * ARRAY.row_bytes / 3
