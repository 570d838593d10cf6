"""What is asked of the kernel, and what it must not be asked: to forget memory that is nowhere else."""

import ctypes
import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from statetap.adapters.store import direct_io
from statetap.adapters.store.direct_io import Alignment, SharedMappings, allocate, direct_alignment

NBYTES = 4 << 20
# Linux 4.17; not in Python's mmap.
MAP_FIXED_NOREPLACE = 0x100000


def resident_bytes(address: int) -> int:
    """Of the mapping that begins there."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            return next(int(fact.split()[1]) << 10 for fact in lines if fact.startswith("Rss:"))
    raise AssertionError(f"nothing is mapped at {address:x}")


def shared_file(path: Path) -> mmap.mmap:
    path.write_bytes(os.urandom(NBYTES))
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), NBYTES, mmap.MAP_SHARED, mmap.PROT_READ)


def test_pages_of_a_shared_mapping_are_dropped_and_come_back(tmp_path) -> None:
    mapped = shared_file(tmp_path / "dump")
    view = np.frombuffer(mapped, np.uint8)
    before = bytes(view)
    assert resident_bytes(view.ctypes.data) == NBYTES
    SharedMappings([view.data]).drop([view[5000:-5000].data])
    assert resident_bytes(view.ctypes.data) <= 4 * mmap.PAGESIZE
    assert bytes(view) == before


@pytest.mark.parametrize("private", ["heap", "mapping", "copy on write"])
def test_private_memory_keeps_its_bytes(tmp_path, private) -> None:
    if private == "heap":
        data = np.ones(NBYTES, np.uint8)
    elif private == "mapping":
        data = np.frombuffer(mmap.mmap(-1, NBYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    else:
        shared_file(tmp_path / "dump")
        with (tmp_path / "dump").open("rb") as file:
            data = np.frombuffer(mmap.mmap(file.fileno(), NBYTES, mmap.MAP_PRIVATE), np.uint8)
    data[:] = 7
    SharedMappings([data.data]).drop([data.data])
    assert (data == 7).all()


def test_what_was_not_named_is_left_alone(tmp_path) -> None:
    named, other = (np.frombuffer(shared_file(tmp_path / name), np.uint8) for name in ("named", "other"))
    mappings = SharedMappings([named.data])
    other.max()
    mappings.drop([other.data])
    assert resident_bytes(other.ctypes.data) == NBYTES


def test_private_memory_where_another_dump_was_mapped_keeps_its_bytes(tmp_path) -> None:
    kept, gone = (shared_file(tmp_path / name) for name in ("kept", "gone"))
    place = np.frombuffer(gone, np.uint8).ctypes.data
    mappings = SharedMappings([memoryview(kept)])
    gone.close()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
    assert libc.mmap(place, NBYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == place
    data = np.frombuffer((ctypes.c_ubyte * NBYTES).from_address(place), np.uint8)
    data[:] = 7
    mappings.drop([data.data])
    assert (data == 7).all()
    libc.munmap(ctypes.c_void_p(place), ctypes.c_size_t(NBYTES))


def test_memory_has_no_alignment_to_ask_for() -> None:
    descriptor = os.memfd_create("memory")
    assert direct_alignment(descriptor) in (None, Alignment(mmap.PAGESIZE, mmap.PAGESIZE))
    os.close(descriptor)


def test_what_is_allocated_is_there(tmp_path) -> None:
    with (tmp_path / "file").open("wb") as file:
        allocate(file.fileno(), NBYTES)
        assert os.fstat(file.fileno()).st_blocks * 512 >= NBYTES


def test_allocation_tells_what_the_kernel_says(tmp_path) -> None:
    (tmp_path / "file").touch()
    with (tmp_path / "file").open("rb") as file, pytest.raises(OSError, match="Bad file descriptor") as caught:
        allocate(file.fileno(), NBYTES)
    assert caught.value.errno == errno.EBADF


def test_without_proc_nothing_is_dropped(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(direct_io, "_MAPS", tmp_path / "nothing")
    view = np.frombuffer(shared_file(tmp_path / "dump"), np.uint8)
    view.max()
    SharedMappings([view.data]).drop([view.data])
    assert resident_bytes(view.ctypes.data) == NBYTES


def fcntl_direct(descriptor: int) -> bool:
    import fcntl

    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
