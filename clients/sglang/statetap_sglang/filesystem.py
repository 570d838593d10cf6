"""What dumps need of the file system and Python's standard library does not give: all of it is Linux.

Invariants: a name is never replaced, a symbolic link never followed, a short write never taken for a whole one, and a mapping
holds no file descriptor.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from statetap_sglang.format import PAGE_BYTES, DumpFormatError

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1

_libc = ctypes.CDLL(None, use_errno=True)
_libc.renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
# To map is a matter of microseconds, and whoever gives the interpreter's lock away for it may wait milliseconds to get it back.
_map_locked = ctypes.PyDLL(None, use_errno=True).mmap
_map_locked.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_map_locked.restype = ctypes.c_void_p
_MAP_FAILED = ctypes.c_void_p(-1).value


def round_to_pages(nbytes: int) -> int:
    """The bytes that a file of `nbytes` holds on tmpfs."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def rename_noreplace(source: Path, target: Path) -> None:
    """Rename a file or directory; FileExistsError if `target` exists, whatever it is.

    renameat2(RENAME_NOREPLACE) and not link + unlink: it is one step, so no crash leaves two names; a watcher gets one event
    a dump and need not look at the creation of dot-names; and it takes directories too. tmpfs, ext4 and XFS have it.
    """
    if _libc.renameat2(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(source), None, str(target))


def write_all(descriptor: int, pieces: Sequence[bytes | memoryview]) -> None:
    """Write all pieces in as few calls as the kernel allows; it takes at most 2 GiB a call and may stop anywhere."""
    rest = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    while rest:
        written = os.writev(descriptor, rest)
        while rest and written >= rest[0].nbytes:
            written -= rest.pop(0).nbytes
        if written:
            rest[0] = rest[0][written:]


def open_regular(path: Path) -> tuple[int, int]:
    """Open a regular file for reading: (descriptor, size).

    Raises:
        FileNotFoundError: there is none.
        DumpFormatError: a symbolic link, or not a regular file.
    """
    try:
        # O_NONBLOCK: opening a FIFO must not wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DumpFormatError(path, "a symbolic link; those are never followed") from error
        if error.errno in (errno.ENXIO, errno.ENODEV):
            raise DumpFormatError(path, "not a regular file") from error
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise DumpFormatError(path, "not a regular file")
    return descriptor, status.st_size


def read_small(path: Path, limit_bytes: int) -> bytes:
    """Read a whole regular file.

    Raises:
        FileNotFoundError: there is none.
        DumpFormatError: larger than `limit_bytes`, a symbolic link, or not a regular file.
    """
    descriptor, size = open_regular(path)
    try:
        if size > limit_bytes:
            raise DumpFormatError(path, f"{size} bytes, at most {limit_bytes} are read")
        return os.read(descriptor, limit_bytes)
    finally:
        os.close(descriptor)


class _Mapping:
    """Owns mapped pages; numpy arrays made from it, and their views, keep it alive."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, address: int, nbytes: int, *, readonly: bool) -> None:
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, readonly)}
        # Not at exit: another thread may still be reading then, and the kernel takes the pages back anyway.
        weakref.finalize(self, _libc.munmap, address, nbytes).atexit = False


def map_readonly(descriptor: int, nbytes: int) -> memoryview:
    """Map the first `nbytes` (at least 1) of a file; the pages stay mapped for as long as a view of them lives.

    Not `mmap.mmap`: before Python 3.13 it keeps a duplicate of the descriptor, and a unit of short samples is more dumps than a
    process may have open files.
    """
    return np.asarray(_map(descriptor, nbytes, mmap.PROT_READ)).data


def map_writable(descriptor: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Map the first `nbytes` of a file that is open for reading and writing, as `map_readonly` does, to be written to."""
    return np.asarray(_map(descriptor, nbytes, mmap.PROT_READ | mmap.PROT_WRITE))


def _map(descriptor: int, nbytes: int, protection: int) -> _Mapping:
    address = _map_locked(None, nbytes, protection, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {nbytes} bytes: {os.strerror(code)}")
    return _Mapping(address, nbytes, readonly=not protection & mmap.PROT_WRITE)
