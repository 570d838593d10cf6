"""A new file that is filled from front to back, and durable once it is finished: past the page cache, or through it.

Both take the same bytes and give the same file. Only threads call this module, one thread a file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from statetap.adapters.store.direct_io import Alignment, address_of, allocate
from statetap.adapters.store.durable_files import write_all_at

WINDOW_BYTES = 8 << 20
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class ObjectFile(Protocol):
    """A file that is being written."""

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Put `buffers`, at most WINDOW_BYTES in all, behind what is there. They are not used any more when this returns."""
        ...

    def finish(self) -> int:
        """Make it durable; its size, which is returned, is what was written."""
        ...

    def close(self) -> None: ...


def create(path: Path, nbytes: int, alignment: Alignment | None) -> ObjectFile:
    """A new file of `nbytes` to be (0: not known), past the page cache where there is an `alignment`.

    Raises:
        FileExistsError: something has that name.
        OSError: no space for it, above all.
    """
    file = CachedFile(path) if alignment is None else DirectFile(path, alignment)
    try:
        allocate(file.descriptor, nbytes)
    except OSError:
        file.close()
        raise
    return file


class CachedFile:
    """Through the page cache. Each window's way to the disk begins at once, and what has arrived there leaves the memory."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, _NEW_FILE, 0o666)
        self._position = 0

    def write(self, buffers: Sequence[memoryview]) -> None:
        nbytes = sum(len(buffer) for buffer in buffers)
        write_all_at(self.descriptor, buffers, self._position)
        self._position += nbytes
        # For dirty pages Linux takes this as a request to write them out.
        os.posix_fadvise(self.descriptor, 0, self._position, os.POSIX_FADV_DONTNEED)

    def finish(self) -> int:
        os.ftruncate(self.descriptor, self._position)
        os.fsync(self.descriptor)
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return self._position

    def close(self) -> None:
        os.close(self.descriptor)


class DirectFile:
    """By O_DIRECT, straight from the buffers' own memory.

    Only what cannot go that way is bounced, that is copied to aligned memory first: blocks in which two buffers meet, and buffers
    whose address does not have the phase of their place in the file.
    """

    def __init__(self, path: Path, alignment: Alignment) -> None:
        self.descriptor = os.open(path, _NEW_FILE | os.O_DIRECT, 0o666)
        self._alignment = alignment
        self._block = alignment.offset
        # Of the file's bytes, `_written` are in whole blocks on the disk; the rest, less than a block, begins the bounce memory.
        self._written = 0
        self._pages = mmap.mmap(-1, WINDOW_BYTES + 2 * self._block)
        self._bounce = np.frombuffer(self._pages, np.uint8)
        self._listed = self._filled = 0
        self._pieces: list[memoryview] = []

    def write(self, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            if len(buffer):
                self._append(buffer)
        self._flush()

    def finish(self) -> int:
        nbytes = self._written + self._filled
        if self._filled:
            self._bounce[self._filled : self._block] = 0
            self._filled = self._block
            self._flush()
        os.ftruncate(self.descriptor, nbytes)
        os.fsync(self.descriptor)
        return nbytes

    def close(self) -> None:
        os.close(self.descriptor)

    def _append(self, buffer: memoryview) -> None:
        to_boundary = -self._filled % self._block
        direct = max(0, len(buffer) - to_boundary) // self._block * self._block
        if not direct or (address_of(buffer) + to_boundary) % self._alignment.memory:
            self._copy(buffer)
            return
        self._copy(buffer[:to_boundary])
        self._list_bounced()
        self._pieces.append(buffer[to_boundary : to_boundary + direct])
        self._copy(buffer[to_boundary + direct :])

    def _copy(self, buffer: memoryview) -> None:
        # By numpy, which lets other threads run meanwhile.
        end = self._filled + len(buffer)
        self._bounce[self._filled : end] = np.frombuffer(buffer, np.uint8)
        self._filled = end

    def _list_bounced(self) -> None:
        """What was bounced, whole blocks of it, is the next piece to be written."""
        end = self._filled - self._filled % self._block
        if end > self._listed:
            self._pieces.append(self._bounce[self._listed : end].data)
            self._listed = end

    def _flush(self) -> None:
        self._list_bounced()
        nbytes = sum(len(piece) for piece in self._pieces)
        write_all_at(self.descriptor, self._pieces, self._written, block=self._block)
        self._written += nbytes
        self._pieces.clear()
        rest = self._filled - self._listed
        self._bounce[:rest] = self._bounce[self._listed : self._filled]
        self._listed, self._filled = 0, rest
