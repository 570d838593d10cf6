"""Reads byte ranges of a file into memory: neighbours in one call, past the page cache where that is wanted and can be.

Linux only: preadv(2), O_DIRECT.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PAGE_BYTES = mmap.PAGESIZE
# A gap this small between two ranges is read along: cheaper than another call.
GAP_BYTES = 1 << 16
# Linux takes at most IOV_MAX = 1024 buffers in one call; half of them may be gaps.
_RANGES_AT_ONCE = 512
_GAP = memoryview(bytearray(GAP_BYTES))


class TooShort(ValueError):
    """The file ends before the range does."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes `[offset, offset + nbytes)` of a file, and the memory whose first bytes they become.

    What follows them in `memory` may be written over too: past the page cache only whole pages are read.
    """

    offset: int
    nbytes: int
    memory: memoryview

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def whole_pages(self) -> memoryview | None:
        """The memory that O_DIRECT reads the range to, None if it cannot."""
        room = -(-self.nbytes // PAGE_BYTES) * PAGE_BYTES
        if self.offset % PAGE_BYTES or len(self.memory) < room or _address(self.memory) % PAGE_BYTES:
            return None
        return self.memory[:room]


class RangeFile:
    """A file that is open for reading; `direct`: past the page cache wherever a range is whole pages of file and memory.

    Raises:
        FileNotFoundError: there is none.
    """

    def __init__(self, path: Path, *, direct: bool = False) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._direct: int | None = None
        try:
            self.nbytes = os.fstat(self.descriptor).st_size
            if direct:
                self._direct = _open_direct(path)
        except OSError:
            self.close()
            raise

    def read(self, offset: int, nbytes: int) -> bytes:
        """As many of these bytes as the file has."""
        return os.pread(self.descriptor, nbytes, offset)

    def read_into(self, ranges: Sequence[ByteRange]) -> None:
        """Fill every range's memory.

        Raises:
            TooShort: the file ends before.
        """
        cached = []
        for wanted in ranges:
            room = wanted.whole_pages() if self._direct is not None else None
            if self._direct is None or room is None or not _read_direct(self._direct, room, wanted):
                cached.append(wanted)
        for run in coalesce(cached):
            _read(self.descriptor, _views(run), run[0].offset)

    def close(self) -> None:
        for descriptor in (self.descriptor, self._direct):
            if descriptor is not None:
                os.close(descriptor)


def coalesce(ranges: Sequence[ByteRange]) -> list[list[ByteRange]]:
    """The ranges in the file's order, as runs that one call reads: next to each other, or nearly so."""
    runs: list[list[ByteRange]] = []
    for wanted in sorted(ranges, key=lambda r: r.offset):
        if runs and 0 <= wanted.offset - runs[-1][-1].end <= GAP_BYTES and len(runs[-1]) < _RANGES_AT_ONCE:
            runs[-1].append(wanted)
        else:
            runs.append([wanted])
    return runs


def _views(run: Sequence[ByteRange]) -> list[memoryview]:
    views: list[memoryview] = []
    end = run[0].offset
    for wanted in run:
        if wanted.offset > end:
            views.append(_GAP[: wanted.offset - end])
        views.append(wanted.memory[: wanted.nbytes])
        end = wanted.end
    return views


def _read(descriptor: int, views: list[memoryview], offset: int) -> None:
    while views:
        count = os.preadv(descriptor, views, offset)
        if not count:
            raise TooShort(f"it ends at byte {offset}")
        offset += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if views:
            views[0] = views[0][count:]


def _read_direct(descriptor: int, room: memoryview, wanted: ByteRange) -> bool:
    """Whether it was read; False: the file system wants other alignments, or the page cache is the way after all."""
    done = 0
    while done < wanted.nbytes:
        try:
            count = os.preadv(descriptor, [room[done:]], wanted.offset + done)
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            return False
        done += count
        if count % PAGE_BYTES or not count:
            break
    if done < wanted.nbytes:
        raise TooShort(f"it ends at byte {wanted.offset + done}")
    return True


def _open_direct(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        return None


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data) if len(memory) else 0
