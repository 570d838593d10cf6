"""LocalShardWriter: publishing without replacing, leftovers, full disks, cancellation."""

import asyncio
import errno
import gc
import os
import threading
import weakref
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from statetap.adapters.store import durable_files, local_shard_writer, object_files
from statetap.adapters.store.local_shard_writer import LocalShardWriter
from statetap.adapters.store.object_files import WriteWay
from statetap.adapters.store.zarr_store import ZarrStore
from statetap.core.placement import Geometry
from statetap.core.records import ShardObject
from statetap.core.spec import Compression, HiddenArray
from statetap.ports import Segment, StoreError, StoreFull, StorePlan, UnitWrite

from tests.fakes.store_on_disk import AUX, LAST, as_view, attributes, random_rows
from tests.fakes.write_ways import WAYS, find_way

ARRAYS = (HiddenArray(AUX, (2, 4), "bfloat16"), HiddenArray(LAST, (4,), "bfloat16"))
GEOMETRY = Geometry(rows_per_shard=8, rows_per_chunk=2, alignment=2)


class Writer(LocalShardWriter):
    """Writes every unit with one compression."""

    compression = Compression.NONE

    def write(self, unit: UnitWrite) -> Awaitable[tuple[ShardObject, ...]]:
        return super().write(replace(unit, compression=self.compression))


@pytest.fixture(params=Compression)
def compression(request) -> Compression:
    return request.param


@pytest.fixture
async def location(tmp_path, compression) -> str:
    path = str(tmp_path / "store")
    plan = StorePlan(arrays=ARRAYS, geometry=GEOMETRY, rows=32, samples=1, attributes=attributes(), compression=compression)
    await ZarrStore().prepare(path, plan)
    return path


@pytest.fixture(params=WAYS)
def writer(request, location, compression):
    """All ways of writing, on whatever disk the tests run on."""
    way = find_way(request.param, Path(location))
    writer = Writer(way=lambda _: way)
    writer.compression = compression
    yield writer
    writer.close()


def make_unit(location: str, *, seed: int = 0, rows: int = 8, row_start: int = 0, filled: int = 5, fence: int = 1) -> UnitWrite:
    rng = np.random.default_rng(seed)
    return UnitWrite(
        location=location,
        arrays=ARRAYS,
        geometry=GEOMETRY,
        row_start=row_start,
        rows=rows,
        fence=fence,
        segments=[Segment(array.name, 0, as_view(random_rows(array, filled, rng))) for array in ARRAYS],
    )


def files_of(location: str) -> dict[str, bytes]:
    """Everything but metadata, by key."""
    root = Path(location)
    files = (path for path in root.rglob("*") if path.is_file() and path.name != "zarr.json")
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def inodes_of(location: str) -> dict[str, int]:
    return {key: path_of(location, key).stat().st_ino for key in files_of(location)}


def path_of(location: str, key: str) -> Path:
    return Path(location, key)


def partial_of(location: str, key: str, fence: int) -> Path:
    final = path_of(location, key)
    return final.with_name(f".{final.name}.{fence}.partial")


async def test_objects_are_reported_as_they_stand(location, writer) -> None:
    objects = await writer.write(make_unit(location, rows=16, filled=11))
    files = files_of(location)
    assert [o.key for o in objects] == [f"{AUX}/c/0/0/0", f"{AUX}/c/1/0/0", f"{LAST}/c/0/0", f"{LAST}/c/1/0"]
    assert {o.key: o.nbytes for o in objects} == {key: len(data) for key, data in files.items()}


async def test_the_same_bytes_are_adopted(location, writer) -> None:
    first = await writer.write(make_unit(location, fence=1))
    before = inodes_of(location)
    assert await writer.write(make_unit(location, fence=2)) == first
    assert inodes_of(location) == before
    assert set(files_of(location)) == {o.key for o in first}


async def test_other_bytes_are_never_replaced(location, writer) -> None:
    await writer.write(make_unit(location, seed=0))
    before = files_of(location)
    with pytest.raises(StoreError, match=f"{AUX}/c/0/0/0 is there already, with other bytes.*discard the unit first"):
        await writer.write(make_unit(location, seed=1, fence=2))
    assert files_of(location) == before


@pytest.mark.parametrize(
    "other", [lambda data: data + b"x", lambda data: data[:-1] + bytes([data[-1] ^ 1])], ids=["longer", "last"]
)
async def test_an_object_is_compared_to_its_end(location, writer, monkeypatch, other) -> None:
    monkeypatch.setattr(local_shard_writer, "WINDOW_BYTES", 7)
    await writer.write(make_unit(location))
    path = path_of(location, f"{AUX}/c/0/0/0")
    path.write_bytes(other(path.read_bytes()))
    before = files_of(location)
    with pytest.raises(StoreError, match="with other bytes"):
        await writer.write(make_unit(location, fence=2))
    assert files_of(location) == before


async def test_an_object_that_goes_away_while_it_is_compared_is_a_store_error(location, writer, monkeypatch) -> None:
    await writer.write(make_unit(location))
    compare = local_shard_writer._are_same

    def too_late(path: Path, other: Path) -> bool:
        other.unlink()
        return compare(path, other)

    monkeypatch.setattr(local_shard_writer, "_are_same", too_late)
    with pytest.raises(StoreError, match="publishing"):
        await writer.write(make_unit(location, fence=2))
    assert not list(Path(location).rglob("*.partial"))


async def test_a_refusal_at_the_second_array_takes_back_the_first(location, writer) -> None:
    await writer.write(make_unit(location, seed=0))
    path_of(location, f"{AUX}/c/0/0/0").unlink()
    before = files_of(location)
    with pytest.raises(StoreError, match=LAST):
        await writer.write(make_unit(location, seed=1, fence=2))
    assert files_of(location) == before


async def test_discard_makes_room_for_another_attempt(location, writer) -> None:
    await writer.write(make_unit(location, seed=0))
    await writer.write(make_unit(location, row_start=8))
    await writer.discard(location, ARRAYS, GEOMETRY, 0, 8)
    assert {key.split("/")[2] for key in files_of(location)} == {"1"}
    assert not path_of(location, f"{AUX}/c/0").exists()
    await writer.write(make_unit(location, seed=1, fence=2))


async def test_discard_removes_what_a_killed_writer_left(location, writer) -> None:
    await writer.write(make_unit(location))
    for key in files_of(location):
        partial_of(location, key, 1).write_bytes(b"half a shard")
    await writer.discard(location, ARRAYS, GEOMETRY, 0, 8)
    assert files_of(location) == {}
    await writer.discard(location, ARRAYS, GEOMETRY, 0, 8)


async def test_leftovers_do_not_confuse_readers_nor_the_next_attempt(location, writer) -> None:
    path_of(location, f"{AUX}/c/0/0").mkdir(parents=True)
    for fence in (1, 2):
        partial_of(location, f"{AUX}/c/0/0/0", fence).write_bytes(b"half a shard")
    assert not zarr.open_group(location, mode="r", use_consolidated=False)[AUX][:8].any()
    objects = await writer.write(make_unit(location, fence=2))
    assert zarr.open_group(location, mode="r", use_consolidated=False)[AUX][:5].any()
    assert set(files_of(location)) == {o.key for o in objects} | {f"{AUX}/c/0/0/.0.1.partial"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("calls_that_work", [0, 1, 2, 3])
async def test_a_full_disk_leaves_nothing(location, writer, monkeypatch, code, calls_that_work) -> None:
    monkeypatch.setattr(durable_files.os, "pwritev", fail_after(calls_that_work, OSError(code, os.strerror(code))))
    with pytest.raises(StoreFull, match=r"no space left while writing .*/c/"):
        await writer.write(make_unit(location, rows=16, filled=11))
    assert files_of(location) == {}
    monkeypatch.undo()
    assert len(await writer.write(make_unit(location, rows=16, filled=11))) == 4


async def test_what_could_not_be_written_is_let_go_of_at_once(location, writer, monkeypatch, tmp_path) -> None:
    """Dumps are unmapped once nothing refers to them: an error must not, in a circle that only a garbage collection breaks."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable_files.os, "pwritev", full)
    rows = np.ones(8 * ARRAYS[0].row_bytes, np.uint8)
    gone = weakref.ref(rows)
    gc.disable()
    try:
        unit = replace(make_unit(location), segments=[Segment(AUX, 0, rows.data)])
        del rows
        refused = False
        try:
            await writer.write(unit)
        except StoreFull:
            refused = True
        assert refused
        del unit
        writer.close()  # a thread that has just given its result holds on to it for a moment
        assert gone() is None
    finally:
        gc.enable()


async def test_no_room_for_an_object_is_told_before_its_first_byte(location, writer, monkeypatch) -> None:
    def full(descriptor: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(object_files, "allocate", full)
    monkeypatch.setattr(durable_files.os, "pwritev", fail_after(0, OSError(errno.EIO, "written all the same")))
    with pytest.raises(StoreFull, match=r"no space left while writing .*/c/"):
        await writer.write(make_unit(location))
    assert files_of(location) == {}


async def test_one_objects_failure_ends_the_others_and_is_what_is_told(location, monkeypatch) -> None:
    started = threading.Event()
    pwritev = os.pwritev

    def faulty(descriptor, buffers, offset):
        if LAST in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            started.wait(30)
            raise OSError(errno.EIO, "Input/output error")
        started.set()
        return pwritev(descriptor, buffers, offset)

    monkeypatch.setattr(durable_files.os, "pwritev", faulty)
    writer = LocalShardWriter(parallel=2, way=lambda _: WriteWay())
    with pytest.raises(StoreError, match=f"{LAST}/c/0/0 failed: .*Input/output error"):
        await writer.write(make_unit(location, rows=8))
    assert files_of(location) == {}
    writer.close()


async def test_a_disk_that_fails_at_fsync_leaves_nothing(location, writer, monkeypatch) -> None:
    def failing(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StoreError, match="Input/output error") as caught:
        await writer.write(make_unit(location))
    assert not isinstance(caught.value, StoreFull)
    monkeypatch.undo()
    assert files_of(location) == {}


async def test_everything_is_synced_before_it_has_its_name(location, writer, monkeypatch) -> None:
    log: list[tuple[str, str]] = []
    fsync, link = os.fsync, os.link

    def logged_fsync(descriptor: int) -> None:
        log.append(("fsync", os.path.relpath(Path(f"/proc/self/fd/{descriptor}").readlink(), location)))
        fsync(descriptor)

    def logged_link(source, target) -> None:
        log.append(("link", os.path.relpath(target, location)))
        link(source, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "link", logged_link)
    objects = await writer.write(make_unit(location, fence=7))
    links = [number for number, (call, _) in enumerate(log) if call == "link"]
    for written in objects:
        directory, name = os.path.split(written.key)
        assert log.index(("fsync", f"{directory}/.{name}.7.partial")) < links[0]
        after = log[log.index(("link", written.key)) :]
        while directory.count("/"):
            assert ("fsync", directory) in after
            directory = directory.rpartition("/")[0]


async def test_a_cancelled_write_waits_for_its_thread_and_leaves_nothing(location, writer, monkeypatch) -> None:
    started, go_on = threading.Event(), threading.Event()
    pwritev = os.pwritev

    def slow(descriptor, buffers, offset):
        started.set()
        go_on.wait(30)
        return pwritev(descriptor, buffers, offset)

    monkeypatch.setattr(durable_files.os, "pwritev", slow)
    task = asyncio.create_task(writer.write(make_unit(location)))
    await asyncio.to_thread(started.wait, 30)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=0)
    assert not done
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert files_of(location) == {}


async def test_a_caller_that_left_while_it_was_published_finds_nothing(location, writer, monkeypatch) -> None:
    started, go_on = threading.Event(), threading.Event()
    link, links = os.link, []

    def last_link(source, target) -> None:
        links.append(target)
        if len(links) == 2:
            started.set()
            go_on.wait(30)
        link(source, target)

    monkeypatch.setattr(os, "link", last_link)
    task = asyncio.create_task(writer.write(make_unit(location)))
    await asyncio.to_thread(started.wait, 30)
    task.cancel()
    await asyncio.wait([task], timeout=0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert files_of(location) == {}


async def test_no_more_objects_at_a_time_than_told(location, monkeypatch) -> None:
    writer = LocalShardWriter(parallel=1)
    active, most = 0, 0
    fsync = os.fsync

    def counted(descriptor: int) -> None:
        nonlocal active, most
        active += 1
        most = max(most, active)
        fsync(descriptor)
        active -= 1

    monkeypatch.setattr(os, "fsync", counted)
    await asyncio.gather(*(writer.write(make_unit(location, row_start=8 * i)) for i in range(4)))
    assert most == 1
    writer.close()


@pytest.mark.parametrize("location", ["s3://bucket/store", "relative/store"])
async def test_only_absolute_paths_are_taken(location) -> None:
    writer = LocalShardWriter()
    with pytest.raises(StoreError, match="absolute"):
        await writer.write(make_unit(location))
    writer.close()


def fail_after(calls: int, error: OSError):
    pwritev = os.pwritev
    left = calls

    def faulty(descriptor, buffers, offset):
        nonlocal left
        if left == 0:
            raise error
        left -= 1
        return pwritev(descriptor, buffers, offset)

    return faulty
