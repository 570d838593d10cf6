"""Files filled from front to back: the same bytes by every way, and what the kernel is asked for."""

import ctypes
import errno
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from statetap.adapters.store import direct_io, durable_files, object_files
from statetap.adapters.store.direct_io import Alignment, address_of, wait_for_written
from statetap.adapters.store.object_files import WINDOW_BYTES, WriteWay, create

from tests.fakes.write_ways import WAYS, find_way

BLOCK = 4096
STRICT = Alignment(512, BLOCK)
CACHED, STRAIGHT, STAGED = WriteWay(), WriteWay(STRICT), WriteWay(STRICT, staged=True)


@pytest.fixture(params=WAYS)
def way(request, tmp_path) -> WriteWay:
    """The ways that this file system has."""
    return find_way(request.param, tmp_path)


@pytest.fixture(scope="module")
def memory() -> np.ndarray:
    """Random bytes that begin at a page, as a dump's tensors do."""
    whole = np.random.default_rng(0).integers(0, 256, (4 << 20) + BLOCK, np.uint8)
    start = -whole.ctypes.data % BLOCK
    return whole[start : start + (4 << 20)]


class Calls:
    """Every pwritev of a file: what the kernel would refuse under O_DIRECT is refused here, whatever the file system."""

    def __init__(self, monkeypatch) -> None:
        self.addresses: list[tuple[int, int]] = []
        pwritev = os.pwritev

        def strict(descriptor, buffers, offset):
            for buffer in buffers:
                if address_of(buffer) % STRICT.memory or len(buffer) % BLOCK or offset % BLOCK:
                    raise OSError(errno.EINVAL, f"{address_of(buffer):#x} +{len(buffer)} at {offset}")
                self.addresses.append((address_of(buffer), len(buffer)))
            return pwritev(descriptor, buffers, offset)

        monkeypatch.setattr(durable_files.os, "pwritev", strict)


def cached_pages(path: Path, nbytes: int) -> int:
    """How many of the file's first pages are in the page cache."""
    with path.open("rb") as file:
        view = mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ)
        resident = ctypes.create_string_buffer(nbytes // mmap.PAGESIZE)
        address = np.frombuffer(view, np.uint8).ctypes.data
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), resident) == 0
        return sum(page[0] & 1 for page in zip(resident.raw, strict=True))


def has_page_cache(folder: Path) -> bool:
    """Not a tmpfs, which has nothing else."""
    file = folder / "page"
    file.write_bytes(bytes(BLOCK))
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return cached_pages(file, BLOCK) == 0


def written(path: Path, windows: list[list[memoryview]], way: WriteWay) -> bytes:
    nbytes = sum(len(buffer) for window in windows for buffer in window)
    file = create(path, nbytes, way)
    for window in windows:
        file.write(window)
    file.finish()
    file.close()
    return path.read_bytes()


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 5 * BLOCK), st.sampled_from([1, 512, 4096])), max_size=12),
    cuts=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_any_buffers_make_their_concatenation(memory, pieces, cuts) -> None:
    """At any address, of any length, cut into windows anywhere."""
    windows: list[list[memoryview]] = [[]]
    for (start, length, step), cut in zip(pieces, cuts, strict=False):
        windows[-1].append(memory[start * step % (1 << 20) :][:length].data)
        if cut:
            windows.append([])
    wanted = b"".join(bytes(buffer) for window in windows for buffer in window)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as monkeypatch:
        assert written(Path(folder, "cached"), windows, CACHED) == wanted
        Calls(monkeypatch)
        assert written(Path(folder, "straight"), windows, STRAIGHT) == wanted
        assert written(Path(folder, "staged"), windows, STAGED) == wanted


def test_only_blocks_in_which_buffers_meet_are_bounced(tmp_path, monkeypatch, memory) -> None:
    """Samples that end within a page, zeros up to the next one's start, and an index: the rest goes as it stands."""
    calls = Calls(monkeypatch)
    zeros = memoryview(bytes(BLOCK))
    first, second = memory[: 100 * BLOCK + 1000].data, memory[1 << 20 : (1 << 20) + 50 * BLOCK + 8].data
    wanted = [first, zeros[: BLOCK - 1000], second, zeros[: BLOCK - 8], zeros[:340]]
    assert written(tmp_path / "object", [wanted], STRAIGHT) == b"".join(wanted)
    start, end = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    straight = [length for address, length in calls.addresses if start <= address < end]
    assert straight == [100 * BLOCK, 50 * BLOCK]
    assert sum(length for _, length in calls.addresses) - sum(straight) == 3 * BLOCK


def test_staged_bytes_leave_from_large_pages_a_window_at_a_time(tmp_path, monkeypatch, memory) -> None:
    calls = Calls(monkeypatch)
    windows = [[memory.data]] * 5
    assert written(tmp_path / "object", [*windows, [memory[:100].data]], STAGED) == memory.tobytes() * 5 + memory[:100].tobytes()
    [begin] = {address for address, _ in calls.addresses}
    assert begin % (2 << 20) == 0
    assert [length for _, length in calls.addresses] == [WINDOW_BYTES, WINDOW_BYTES, memory.nbytes + BLOCK]


def test_windows_leave_the_page_cache_while_others_are_filled(tmp_path, monkeypatch, memory) -> None:
    """Each is sent off once it is whole, and a few later it is waited for, and gone."""
    calls: list[tuple[str, int]] = []
    for name in ("start_writing", "wait_for_written"):
        real = getattr(object_files, name)
        monkeypatch.setattr(
            object_files,
            name,
            lambda descriptor, offset, nbytes, name=name, real=real: (
                calls.append((name, offset // nbytes)) or real(descriptor, offset, nbytes)
            ),
        )
    file = create(tmp_path / "object", 14 * memory.nbytes, CACHED)
    for _ in range(14):
        file.write([memory.data])
    assert calls == [("start_writing", n) for n in range(2)] + [
        call for n in range(2, 7) for call in (("start_writing", n), ("wait_for_written", n - 2))
    ]
    if has_page_cache(tmp_path):
        assert cached_pages(tmp_path / "object", 5 * WINDOW_BYTES) == 0
    assert file.finish() == 14 * memory.nbytes
    file.close()
    assert (tmp_path / "object").read_bytes() == memory.tobytes() * 14


@pytest.mark.parametrize("code", [errno.EIO, errno.EOPNOTSUPP])
def test_what_a_disk_says_of_a_window_is_an_error(tmp_path, monkeypatch, memory, code) -> None:
    """It says so once: fsync may be silent afterwards."""

    def fail(descriptor: int, offset: int, nbytes: int, flags: int) -> int:
        ctypes.set_errno(code)
        return -1

    file = create(tmp_path / "object", 14 * memory.nbytes, CACHED)
    monkeypatch.setattr(direct_io._libc, "sync_file_range", fail)
    file.write([memory.data])
    with pytest.raises(OSError, match=os.strerror(code)):
        file.write([memory.data])
    file.close()


def test_a_kernel_without_ranges_to_sync_is_none(tmp_path, monkeypatch, memory) -> None:
    def fail(descriptor: int, offset: int, nbytes: int, flags: int) -> int:
        ctypes.set_errno(errno.ENOSYS)
        return -1

    monkeypatch.setattr(direct_io._libc, "sync_file_range", fail)
    assert written(tmp_path / "object", [[memory.data]] * 9, CACHED) == memory.tobytes() * 9


def test_a_disk_that_fails_meanwhile_is_an_error(tmp_path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    os.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        wait_for_written(descriptor, 0, WINDOW_BYTES)


def test_another_phase_is_bounced_whole(tmp_path, monkeypatch, memory) -> None:
    calls = Calls(monkeypatch)
    data = memory[100 : 100 + 3 * WINDOW_BYTES // 8].data
    assert written(tmp_path / "object", [[data]], STRAIGHT) == data
    assert not [address for address, _ in calls.addresses if memory.ctypes.data <= address < memory.ctypes.data + memory.nbytes]


def test_short_writes_are_finished(tmp_path, monkeypatch, way, memory) -> None:
    pwritev = os.pwritev
    most = 1000 if way.alignment is None else 3 * BLOCK + 100
    monkeypatch.setattr(durable_files.os, "pwritev", lambda *call: min(pwritev(*call), most))
    data = memory[: 10 * BLOCK + 5].data
    assert written(tmp_path / "object", [[data[:5000], data[5000:]]], way) == data


def test_a_kernel_that_takes_less_than_a_block_is_an_error(tmp_path, monkeypatch, memory) -> None:
    monkeypatch.setattr(durable_files.os, "pwritev", lambda *_: 100)
    with pytest.raises(OSError, match="takes less than 4096 bytes"):
        written(tmp_path / "object", [[memory[: 2 * BLOCK].data]], STRAIGHT)


def test_more_buffers_than_one_call_takes(tmp_path, way, memory) -> None:
    buffers = [memory[i * BLOCK : i * BLOCK + size].data for i in range(700) for size in (BLOCK, 7)]
    assert written(tmp_path / "object", [buffers], way) == b"".join(buffers)


def test_it_is_synced_after_its_last_byte(tmp_path, monkeypatch, way, memory) -> None:
    log: list[str] = []
    for name in ("pwritev", "ftruncate", "fsync"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *call, name=name, real=real: log.append(name) or real(*call))
    written(tmp_path / "object", [[memory[:9000].data], [memory[:340].data]], way)
    assert log[-1] == "fsync"
    assert "pwritev" in log


def test_nothing_is_replaced(tmp_path, way) -> None:
    (tmp_path / "object").write_bytes(b"there")
    with pytest.raises(FileExistsError):
        create(tmp_path / "object", 1, way)


def test_no_space_is_told_at_once_and_closes_the_file(tmp_path, way, monkeypatch) -> None:
    def full(descriptor: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(object_files, "allocate", full)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="full"):
        create(tmp_path / "object", 1, way)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.parametrize("way", [STRAIGHT, STAGED])
def test_no_memory_closes_the_file(tmp_path, way, monkeypatch) -> None:
    def none_left(nbytes: int) -> None:
        raise MemoryError

    monkeypatch.setattr(object_files, "large_pages", none_left)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(MemoryError):
        create(tmp_path / "object", 1, way)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_an_empty_object(tmp_path, way) -> None:
    assert written(tmp_path / "object", [], way) == b""
