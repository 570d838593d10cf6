"""compact: what is copied, what is refused, and that nothing is there before all of it is."""

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr
from numcodecs.blosc import Blosc
from statetap.adapters.store.zarr_store import ZarrStore
from statetap.core.placement import Geometry
from statetap.ports import StoreMismatch, StorePlan
from statetap_client import compact as compacting
from statetap_client import compact_shards, layout
from statetap_client.compact import CannotCompact, compact
from statetap_client.compact_shards import CorruptSample, PlacedSample, shard_runs
from statetap_client.reader import NotAStore, StoreReader
from statetap_client.verify import verify_digests

from tests.fakes.store_on_disk import AUX, LAST, attributes, hidden_arrays, random_rows, write_store

GEOMETRY = Geometry(rows_per_shard=16, rows_per_chunk=4, alignment=2)
LENGTHS = (5, 40, 3, 16, 7)  # the second is several shards long
ARRAYS = hidden_arrays("bfloat16", layers=2, hidden=64)


@pytest.fixture
def source(tmp_path):
    rng = np.random.default_rng(0)
    samples = [{array.name: random_rows(array, length, rng) for array in ARRAYS} for length in LENGTHS]
    write_store(tmp_path / "s", ARRAYS, samples, geometry=GEOMETRY, failed=frozenset({3}))
    return tmp_path / "s"


def files_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def is_payload(key: str) -> bool:
    return key.split("/", 1)[0] in layout.HIDDEN_ARRAYS


def object_of(root: Path, array: str, index: int) -> Path:
    """The first object that holds rows of a sample."""
    shard = StoreReader(root).row_range(index)[0] // GEOMETRY.rows_per_shard
    return root / layout.shard_key(array, shard, next(a.row_shape for a in ARRAYS if a.name == array))


def test_samples_are_the_same_and_smaller(source, tmp_path):
    seen = []
    report = compact(source, tmp_path / "c", threads=2, progress=lambda done, total: seen.append((done, total)))
    before, after = StoreReader(source), StoreReader(tmp_path / "c")
    assert verify_digests(after).ok
    assert after.stored.tolist() == [0, 1, 2, 4]
    for index in before.stored:
        for name in (*layout.HIDDEN_ARRAYS, *layout.TOKEN_ARRAYS):
            one, other = (getattr(r.sample_as_numpy(int(index)), name) for r in (before, after))
            assert one.tobytes() == other.tobytes()
    assert report.samples == 4
    assert report.target_bytes == sum(map(len, files_of(tmp_path / "c").values()))
    assert report.source_bytes == sum(map(len, files_of(source).values()))
    done, total = seen[-1]
    assert done == total > 0


def test_all_else_is_copied_and_the_metadata_tell_the_codec(source, tmp_path):
    (source / ".zarr.json.partial").write_bytes(b"left behind")
    compact(source, tmp_path / "c")
    before, after = files_of(source), files_of(tmp_path / "c")
    assert before.keys() - after.keys() == {".zarr.json.partial"}
    assert after.keys() <= before.keys()
    assert [key for key in after if not is_payload(key) and after[key] != before[key]] == []
    for name in layout.HIDDEN_ARRAYS:
        document = json.loads(after[f"{name}/zarr.json"])
        blosc = document["codecs"][0]["configuration"]["codecs"].pop()
        assert blosc == {
            "name": "blosc",
            "configuration": {"cname": "zstd", "clevel": 1, "shuffle": "shuffle", "typesize": 2, "blocksize": 1 << 20},
        }
        assert document == json.loads(before[f"{name}/zarr.json"])


def test_holes_stay_holes(source, tmp_path):
    compact(source, tmp_path / "c")
    reader = StoreReader(source)
    shard = reader.row_range(3)[0] // GEOMETRY.rows_per_shard
    assert not (tmp_path / "c" / layout.shard_key(LAST, shard, (64,))).exists()
    assert files_of(source).keys() == files_of(tmp_path / "c").keys()


def test_rows_of_nobody_are_not_carried_over(source, tmp_path):
    clean = compact(source, tmp_path / "clean")
    hole = source / layout.shard_key(LAST, StoreReader(source).row_range(3)[0] // GEOMETRY.rows_per_shard, (64,))
    hole.parent.mkdir(parents=True, exist_ok=True)
    hole.write_bytes(b"an object that nobody committed")
    array = zarr.open_array(source / LAST, mode="r+")
    end = StoreReader(source).row_range(0)[1]
    array[end : end + 1] = 7
    assert compact(source, tmp_path / "c").target_bytes == clean.target_bytes
    assert files_of(tmp_path / "c") == files_of(tmp_path / "clean")


@pytest.mark.parametrize("array", [AUX, LAST])
def test_a_corrupt_sample_is_named_and_there_is_no_target(source, tmp_path, array):
    path = object_of(source, array, 4)
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptSample, match=r"sample 4 \(id 'sample-4'\).*recorded"):
        compact(source, tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-1])])
def test_a_lost_or_torn_object_is_not_read_as_zeros(source, tmp_path, damage):
    damage(object_of(source, LAST, 1))
    with pytest.raises(CorruptSample, match=r"sample 1 \(id 'sample-1'\) is marked stored, but its object"):
        compact(source, tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_what_the_codec_breaks_is_found_too(source, tmp_path, monkeypatch):
    class Forgetful:
        encode = staticmethod(compact_shards._BLOSC.encode)

        @staticmethod
        def decode(encoded, out):
            compact_shards.Blosc().decode(encoded, out=out)
            out[0] ^= 1

    monkeypatch.setattr(compact_shards, "_BLOSC", Forgetful)
    with pytest.raises(CorruptSample):
        compact(source, tmp_path / "c")


def test_places_outside_of_the_store_are_refused(source, tmp_path):
    zarr.open_array(source / "samples/row_start", mode="r+")[2] = 1 << 40
    with pytest.raises(CorruptSample, match=r"sample 2 .*none of the store's"):
        compact(source, tmp_path / "c")


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_a_target_that_exists_is_not_touched(source, tmp_path, make):
    make(tmp_path / "c")
    with pytest.raises(CannotCompact, match="exists already"):
        compact(source, tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "s"]


def test_a_target_that_comes_to_be_meanwhile_is_not_replaced(source, tmp_path):
    def advance(done, total):
        (tmp_path / "c").mkdir(exist_ok=True)

    with pytest.raises(CannotCompact, match="exists already"):
        compact(source, tmp_path / "c", progress=advance)
    assert list((tmp_path / "c").iterdir()) == []


def test_refusals_name_the_way_out(source, tmp_path):
    with pytest.raises(NotAStore):
        compact(tmp_path, tmp_path / "c")
    with pytest.raises(CannotCompact, match="inside of the store"):
        compact(source, source / "c")
    with pytest.raises(CannotCompact, match="make it first"):
        compact(source, tmp_path / "no" / "c")
    compact(source, tmp_path / "c")
    with pytest.raises(CannotCompact, match="compressed already"):
        compact(tmp_path / "c", tmp_path / "d")


def test_want_of_room_is_told_with_figures(source, tmp_path, monkeypatch):
    full = os.statvfs_result((4096, 4096, 10, 1, 1, 0, 0, 0, 0, 255))
    monkeypatch.setattr(compacting.os, "statvfs", lambda path: full)
    with pytest.raises(CannotCompact, match=r"has 4.1 kB free, and .* need about .*: free some"):
        compact(source, tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_disk_that_runs_full_leaves_nothing(source, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compact_shards.os, "fsync", full)
    with pytest.raises(CannotCompact, match="no space left"):
        compact(source, tmp_path / "c")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_store_that_grows_meanwhile_is_refused(source, tmp_path, monkeypatch):
    copy = compacting._copy

    def grow(*arguments):
        copy(*arguments)
        zarr.open_array(source / LAST, mode="r+").resize((1024, 64))

    monkeypatch.setattr(compacting, "_copy", grow)
    with pytest.raises(CannotCompact, match="grew meanwhile"):
        compact(source, tmp_path / "c")


def test_statuses_are_read_before_what_they_vouch_for_while_a_job_goes_on(source, tmp_path, monkeypatch):
    """The job commits sample 3 between two of the files that are copied."""
    read_bytes = Path.read_bytes
    digests = read_bytes(source / "samples/digest/c/0")
    zarr.open_array(source / "samples/digest", mode="r+")[3] = 5
    later = read_bytes(source / "samples/digest/c/0")
    (source / "samples/digest/c/0").write_bytes(digests)

    def read(path):
        data = read_bytes(path)
        # zarr-python reads it too, when the source is opened.
        if path == source / "samples/digest/c/0" and (tmp_path / ".c.partial").exists():
            path.write_bytes(later)
            zarr.open_array(source / "samples/status", mode="r+")[3] = layout.Status.STORED
        return data

    monkeypatch.setattr(Path, "read_bytes", read)
    assert compact(source, tmp_path / "c").samples == 4
    assert StoreReader(source).statuses[3] == layout.Status.STORED
    assert StoreReader(tmp_path / "c").statuses[3] == layout.Status.FAILED


def test_an_interrupted_run_leaves_nothing(source, tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compact(source, tmp_path / "c", progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_what_a_killed_run_left_is_no_store_and_is_swept(source, tmp_path):
    """Everything is in place but the end: what a kill at the last moment leaves."""
    compact(source, tmp_path / "c")
    wanted = files_of(tmp_path / "c")
    left = tmp_path / ".c.partial"
    (tmp_path / "c").rename(left)
    (left / "zarr.json").unlink()
    (left / "more").write_bytes(b"more")
    with pytest.raises(NotAStore):
        StoreReader(left)
    compact(source, tmp_path / "c")
    assert files_of(tmp_path / "c") == wanted
    assert not left.exists()


def test_two_at_a_time_are_refused(source, tmp_path):
    left = tmp_path / ".c.partial"
    left.mkdir()
    (left / "kept").touch()
    other = os.open(left, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        with pytest.raises(CannotCompact, match="another process is writing"):
            compact(source, tmp_path / "c")
    finally:
        os.close(other)
    assert (left / "kept").exists()


def test_everything_is_synced_before_it_has_its_name(source, tmp_path, monkeypatch):
    synced: set[Path] = set()
    checked = []
    fsync, rename = os.fsync, Path.rename

    def record(descriptor):
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    def check(path, target):
        everything = {path, *path.rglob("*")}
        assert everything - synced == set()
        assert (path / "zarr.json") in everything
        synced.clear()
        checked.append(target)
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(Path, "rename", check)
    compact(source, tmp_path / "c")
    assert checked == [tmp_path / "c"]
    assert synced == {tmp_path}


def test_consolidated_metadata_do_not_tell_of_codecs_that_are_gone(source, tmp_path):
    zarr.consolidate_metadata(source)
    shutil.copytree(source, tmp_path / "kept")
    compact(source, tmp_path / "c")
    assert "consolidated_metadata" not in json.loads((tmp_path / "c/zarr.json").read_bytes())
    assert np.array_equal(
        zarr.open_group(tmp_path / "c", mode="r")[LAST][:5].view("u2"), zarr.open_array(source / LAST)[:5].view("u2")
    )
    assert files_of(source) == files_of(tmp_path / "kept")


async def test_a_job_does_not_write_to_a_compact_store(source, tmp_path):
    compact(source, tmp_path / "c")
    wanted = attributes(rows_per_shard=GEOMETRY.rows_per_shard, rows_per_chunk=GEOMETRY.rows_per_chunk)
    plan = StorePlan(arrays=ARRAYS, geometry=GEOMETRY, rows=1024, samples=9, attributes=wanted)
    await ZarrStore().check(str(source), plan)
    with pytest.raises(StoreMismatch, match="codecs"):
        await ZarrStore().check(str(tmp_path / "c"), plan)


def test_runs_are_the_shards_that_samples_share():
    placed = [PlacedSample(i, str(i), start, end, 0) for i, (start, end) in enumerate([(64, 70), (0, 3), (4, 16), (16, 40)])]
    runs = shard_runs(placed, 16)
    assert [(run.first, run.end, [sample.index for sample in run.samples]) for run in runs] == [
        (0, 1, [1, 2]),
        (1, 3, [3]),
        (4, 5, [0]),
    ]


def test_chunks_are_what_blosc_makes_of_them(source, tmp_path):
    """The block size and the item's size are in each chunk's own header."""
    compact(source, tmp_path / "c")
    data = object_of(tmp_path / "c", AUX, 1).read_bytes()
    chunk_bytes = GEOMETRY.rows_per_chunk * 2 * 64 * 2
    assert data[3] == 2
    assert len(Blosc().decode(data[: int.from_bytes(data[12:16], "little")])) == chunk_bytes
