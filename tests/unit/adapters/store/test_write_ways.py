"""Which way to write is taken on a file system, and when that is measured."""

import errno
import fcntl
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from statetap.adapters.store import write_ways
from statetap.adapters.store.direct_io import Alignment
from statetap.adapters.store.object_files import WriteWay
from statetap.adapters.store.write_ways import WriteWays

ALIGNMENT = Alignment(512, 4096)
STRAIGHT, STAGED, CACHED = WriteWay(ALIGNMENT), WriteWay(ALIGNMENT, staged=True), WriteWay()


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.fixture
def disk(monkeypatch) -> Callable[[Callable[[WriteWay], float]], list[WriteWay]]:
    """A disk that takes so many seconds for a trial; gives the list of those that were made."""
    made: list[WriteWay] = []

    def install(seconds: Callable[[WriteWay], float]) -> list[WriteWay]:
        def measured(descriptor: int, data: memoryview, way: WriteWay) -> float:
            if len(data) == write_ways._TRIAL_BYTES:
                assert is_direct(descriptor) == (way.alignment is not None)
                made.append(way)
            return seconds(way)

        monkeypatch.setattr(write_ways, "direct_alignment", lambda _: ALIGNMENT)
        monkeypatch.setattr(write_ways, "_seconds", measured)
        return made

    return install


@pytest.mark.parametrize(
    ("straight", "staged", "cached", "chosen"),
    [
        (1.0, 1.0, 1.0, STRAIGHT),
        (1.1, 1.0, 1.0, STRAIGHT),
        (1.2, 1.0, 1.0, STAGED),
        (2.0, 1.1, 1.0, STAGED),
        (2.0, 2.0, 1.0, CACHED),
        (2.0, 1.0, 0.5, CACHED),
        (0.5, 1.0, 1.0, STRAIGHT),
    ],
)
def test_the_fastest_way_is_taken_and_measured_once(tmp_path, disk, straight, staged, cached, chosen) -> None:
    made = disk(lambda way: {STRAIGHT: straight, STAGED: staged, CACHED: cached}[way])
    ways = WriteWays()
    assert ways.of(tmp_path) == chosen
    assert ways.of(tmp_path) == chosen
    assert made == [STRAIGHT, STAGED, CACHED] * 3
    assert list(tmp_path.iterdir()) == []


def test_a_trial_that_others_disturbed_says_nothing(tmp_path, disk) -> None:
    # The first two are to see whether the disk takes O_DIRECT at all.
    seconds = iter([1.0, 1.0, *(9.0, 1.0, 1.0), *(1.0, 9.0, 9.0), *(1.0, 1.0, 1.0)])
    disk(lambda _: next(seconds))
    assert WriteWays().of(tmp_path) == STRAIGHT


def test_a_disk_that_refuses_is_written_through_the_page_cache(tmp_path, disk) -> None:
    def refuse(_: WriteWay) -> float:
        raise OSError(errno.EINVAL, "Invalid argument")

    disk(refuse)
    assert WriteWays().of(tmp_path) == CACHED


def test_a_way_that_the_disk_refuses_is_left_out(tmp_path, disk) -> None:
    def refuse(way: WriteWay) -> float:
        if way == STRAIGHT:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return 1.0

    made = disk(refuse)
    assert WriteWays().of(tmp_path) == STAGED
    assert made == [STAGED, CACHED] * 3


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_quota_that_has_no_room_for_a_trial_may_have_some_for_a_shard(tmp_path, disk, code) -> None:
    def full(_: WriteWay) -> float:
        raise OSError(code, os.strerror(code))

    disk(full)
    assert WriteWays().of(tmp_path) == CACHED


def test_a_disk_that_is_being_measured_holds_up_nobody_else(tmp_path, monkeypatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    ways = WriteWays()
    ways._measured[Path("/proc").stat().st_dev] = STRAIGHT

    def measure(_: Path) -> WriteWay:
        begun.set()
        assert go_on.wait(30)
        return STAGED

    monkeypatch.setattr(write_ways, "_measure", measure)
    measuring = threading.Thread(target=ways.of, args=(tmp_path,))
    measuring.start()
    assert begun.wait(30)
    assert ways.of(Path("/proc")) == STRAIGHT
    go_on.set()
    measuring.join()
    assert ways.of(tmp_path) == STAGED


def test_each_trial_is_of_other_memory_and_of_one_at_a_time(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(write_ways, "_TRIAL_BYTES", 1 << 20)
    held: list[weakref.ref[memoryview]] = []
    like_dumps = write_ways._like_dumps

    @contextmanager
    def counted() -> Iterator[memoryview]:
        assert not [one for one in held if one() is not None]
        with like_dumps() as data:
            held.append(weakref.ref(data))
            yield data

    monkeypatch.setattr(write_ways, "_like_dumps", counted)
    WriteWays().of(tmp_path)
    assert len(held) == (3 if write_ways.past_the_page_cache(tmp_path) else 0)


def test_a_disk_that_fails_is_told(tmp_path, disk) -> None:
    def fail(_: WriteWay) -> float:
        raise OSError(errno.EIO, "Input/output error")

    disk(fail)
    with pytest.raises(OSError, match="Input/output error"):
        WriteWays().of(tmp_path)


def test_a_disk_that_is_nearly_full_is_measured_another_time(tmp_path, monkeypatch, disk) -> None:
    made = disk(lambda _: 1.0)
    ways = WriteWays()
    with monkeypatch.context() as patched:
        patched.setattr(write_ways.shutil, "disk_usage", lambda _: SimpleNamespace(free=255 << 20))
        assert ways.of(tmp_path) == CACHED
    assert made == []
    assert ways.of(tmp_path) == STRAIGHT


def test_any_disk_is_measured(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(write_ways, "_TRIAL_BYTES", 1 << 20)
    assert WriteWays().of(tmp_path) in [*write_ways.past_the_page_cache(tmp_path), CACHED]


def test_without_shared_memory_it_is_measured_all_the_same(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(write_ways, "_TRIAL_BYTES", 1 << 20)
    monkeypatch.setattr(write_ways, "_SHARED_MEMORY", str(tmp_path / "nothing"))
    assert WriteWays().of(tmp_path) in [*write_ways.past_the_page_cache(tmp_path), CACHED]


def test_shared_memory_that_others_need_is_left_to_them(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(write_ways, "_TRIAL_BYTES", 1 << 20)
    monkeypatch.setattr(write_ways, "_SHARED_MEMORY", str(tmp_path))
    free = write_ways.shutil.disk_usage(tmp_path).free
    monkeypatch.setattr(write_ways, "_LEAST_FREE_BYTES", free + (1 << 40))
    before = tmp_path.stat().st_mtime_ns
    with write_ways._like_dumps() as data:
        assert len(data) == 1 << 20
        assert any(data)
    assert tmp_path.stat().st_mtime_ns == before
