"""What writing past the page cache needs of Linux and Python's standard library does not give.

Source: statx(2) with STATX_DIOALIGN (Linux 6.1), fallocate(2), madvise(2), sync_file_range(2).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PAGE_BYTES = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_libc.statx.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p)

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_SYNC_WAIT_BEFORE, _SYNC_WRITE, _SYNC_WAIT_AFTER = 1, 2, 4
# Where struct statx holds stx_mask, and stx_dio_mem_align with stx_dio_offset_align behind it.
_MASK_AT, _DIOALIGN_AT = 0, 0x98
_NOT_SUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})
_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class Alignment:
    """What O_DIRECT asks of every piece, in bytes: `memory` of its address, `offset` of its place in the file and its length."""

    memory: int
    offset: int


def direct_alignment(descriptor: int) -> Alignment | None:
    """What O_DIRECT asks for in an open file, None if the file cannot have it.

    A kernel or file system that does not say is taken to want whole pages. Offsets are whole pages at least, whatever the disk
    can do: half a block of the file system would make it read the other half.
    """
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if _libc.statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, found):
        return Alignment(PAGE_BYTES, PAGE_BYTES)
    (mask,) = struct.unpack_from("=I", found.raw, _MASK_AT)
    if not mask & _STATX_DIOALIGN:
        return Alignment(PAGE_BYTES, PAGE_BYTES)
    memory, offset = struct.unpack_from("=II", found.raw, _DIOALIGN_AT)
    return Alignment(memory, max(offset, PAGE_BYTES)) if offset else None


def allocate(descriptor: int, nbytes: int) -> None:
    """Take the file's blocks before the first byte: in one piece, and no space is an error now and not in its middle.

    Not `os.posix_fallocate`, which writes to every block where the file system cannot do it.

    Raises:
        OSError: ENOSPC, above all. A file system that cannot allocate is none.
    """
    if nbytes and _libc.fallocate(descriptor, 0, 0, nbytes):
        code = ctypes.get_errno()
        if code not in _NOT_SUPPORTED:
            raise OSError(code, os.strerror(code))


def start_writing(descriptor: int, offset: int, nbytes: int) -> None:
    """Let what was written there leave the page cache for the disk, without waiting for it. This makes nothing durable."""
    _sync_range(descriptor, offset, nbytes, _SYNC_WRITE)


def wait_for_written(descriptor: int, offset: int, nbytes: int) -> None:
    """Wait until what was written there has left the page cache for the disk. This makes nothing durable.

    Raises:
        OSError: the disk failed. That is told once: `fsync` may say nothing of it any more.
    """
    _sync_range(descriptor, offset, nbytes, _SYNC_WAIT_BEFORE | _SYNC_WRITE | _SYNC_WAIT_AFTER)


def _sync_range(descriptor: int, offset: int, nbytes: int, flags: int) -> None:
    if _libc.sync_file_range(descriptor, offset, nbytes, flags):
        code = ctypes.get_errno()
        # Every other one, EOPNOTSUPP too, may be what a disk said of the bytes.
        if code != errno.ENOSYS:
            raise OSError(code, os.strerror(code))


def address_of(view: memoryview) -> int:
    """Where the bytes of a non-empty, contiguous view are."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


class SharedMappings:
    """Which of these views lie in shared mappings; their pages can be dropped, for the kernel has them elsewhere.

    Pages of a dump that were read or written from stay in the process's resident memory until they are unmapped. They may be
    dropped sooner, but only those: private memory would lose its contents. So the kernel is asked, not the caller; and only of
    views that stay as long as this is used: where other dumps were mapped a moment ago, private memory may be by now.
    """

    def __init__(self, views: Iterable[memoryview]) -> None:
        shared = _shared_spans()
        starts = [start for start, _ in shared]
        self._spans: list[tuple[int, int]] = []
        for view in views:
            if len(view):
                address = address_of(view)
                at = bisect_right(starts, address) - 1
                if at >= 0 and address + len(view) <= shared[at][1]:
                    self._spans.append((address, address + len(view)))
        self._spans.sort()
        self._starts = [start for start, _ in self._spans]

    def drop(self, views: Iterable[memoryview]) -> None:
        """Let go of the resident pages of whatever is a part of one of those views; they come back when they are touched."""
        for view in views:
            if len(view) < PAGE_BYTES:
                continue
            address = address_of(view)
            at = bisect_right(self._starts, address) - 1
            if at < 0 or address + len(view) > self._spans[at][1]:
                continue
            start = address - address % PAGE_BYTES
            _libc.madvise(start, address + len(view) - start, mmap.MADV_DONTNEED)


def _shared_spans() -> list[tuple[int, int]]:
    """Where the shared mappings of this process begin and end, in order."""
    spans = []
    with suppress(OSError):
        for line in _MAPS.read_text().splitlines():
            span, permissions, _ = line.split(" ", 2)
            if permissions[3] == "s":
                start, _, end = span.partition("-")
                spans.append((int(start, 16), int(end, 16)))
    return spans
