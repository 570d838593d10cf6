"""A new file that is filled from front to back, and durable once it is finished: past the page cache, or through it.

All take the same bytes and give the same file. Only threads call this module, one thread a file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from statetap_client.large_pages import large_pages

from statetap.adapters.store.direct_io import Alignment, address_of, allocate, start_writing, wait_for_written
from statetap.adapters.store.durable_files import write_all_at

WINDOW_BYTES = 8 << 20
# So many windows of a file are in the page cache, on their way to the disk.
_WINDOWS_ON_THEIR_WAY = 2
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class WriteWay:
    """How to write a file: past the page cache, if there is an `alignment`, or through it.

    Past it: straight from the buffers, or `staged`, by way of memory in large pages. Disks that take a limited number of pieces a
    request (virtio: 254) take larger requests from those.
    """

    alignment: Alignment | None = None
    staged: bool = False


class ObjectFile(Protocol):
    """A file that is being written."""

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Put `buffers`, at most WINDOW_BYTES in all, behind what is there. They are not used any more when this returns."""
        ...

    def finish(self) -> int:
        """Make it durable; its size, which is returned, is what was written."""
        ...

    def close(self) -> None: ...


def create(path: Path, nbytes: int, way: WriteWay) -> ObjectFile:
    """A new file of `nbytes` to be (0: not known).

    Raises:
        FileExistsError: something has that name.
        OSError: no space for it, above all.
    """
    descriptor = os.open(path, _NEW_FILE if way.alignment is None else _NEW_FILE | os.O_DIRECT, 0o666)
    try:
        allocate(descriptor, nbytes)
        return fill(descriptor, way)
    except BaseException:
        os.close(descriptor)
        raise


def fill(descriptor: int, way: WriteWay) -> ObjectFile:
    """An empty file that is open for writing, with O_DIRECT if the way has an alignment. It is closed with what is returned."""
    if way.alignment is None:
        return CachedFile(descriptor)
    return StagedFile(descriptor, way.alignment) if way.staged else DirectFile(descriptor, way.alignment)


class CachedFile:
    """Through the page cache. A window's way to the disk begins at once, and when it has arrived there it leaves the memory."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._position = self._started = 0

    def write(self, buffers: Sequence[memoryview]) -> None:
        write_all_at(self._descriptor, buffers, self._position)
        self._position += sum(len(buffer) for buffer in buffers)
        while self._position - self._started >= WINDOW_BYTES:
            start_writing(self._descriptor, self._started, WINDOW_BYTES)
            self._started += WINDOW_BYTES
            # The same few pages are used over and over: to take fresh ones costs more than to fill them.
            arriving = self._started - (_WINDOWS_ON_THEIR_WAY + 1) * WINDOW_BYTES
            if arriving >= 0:
                wait_for_written(self._descriptor, arriving, WINDOW_BYTES)
                os.posix_fadvise(self._descriptor, arriving, WINDOW_BYTES, os.POSIX_FADV_DONTNEED)

    def finish(self) -> int:
        os.ftruncate(self._descriptor, self._position)
        os.fsync(self._descriptor)
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return self._position

    def close(self) -> None:
        os.close(self._descriptor)


class StagedFile:
    """By O_DIRECT, from memory in large pages to which everything is copied."""

    def __init__(self, descriptor: int, alignment: Alignment) -> None:
        self._descriptor = descriptor
        self._block = alignment.offset
        self._stage = large_pages(WINDOW_BYTES)
        self._written = self._filled = 0

    def write(self, buffers: Sequence[memoryview]) -> None:
        for buffer in buffers:
            # By numpy, which lets other threads run meanwhile.
            data = np.frombuffer(buffer, np.uint8)
            while len(data):
                count = min(len(data), WINDOW_BYTES - self._filled)
                self._stage[self._filled : self._filled + count] = data[:count]
                self._filled += count
                data = data[count:]
                if self._filled == WINDOW_BYTES:
                    self._flush()

    def finish(self) -> int:
        nbytes = self._written + self._filled
        padding = -self._filled % self._block
        self._stage[self._filled : self._filled + padding] = 0
        self._filled += padding
        self._flush()
        os.ftruncate(self._descriptor, nbytes)
        os.fsync(self._descriptor)
        return nbytes

    def close(self) -> None:
        os.close(self._descriptor)

    def _flush(self) -> None:
        write_all_at(self._descriptor, [self._stage[: self._filled].data], self._written, block=self._block)
        self._written += self._filled
        self._filled = 0


class DirectFile:
    """By O_DIRECT, straight from the buffers' own memory.

    Only what cannot go that way is bounced, that is copied to aligned memory first: blocks in which two buffers meet, and buffers
    whose address does not have the phase of their place in the file.
    """

    def __init__(self, descriptor: int, alignment: Alignment) -> None:
        self._descriptor = descriptor
        self._alignment = alignment
        self._block = alignment.offset
        # Of the file's bytes, `_written` are in whole blocks on the disk; the rest, less than a block, begins the bounce memory.
        self._written = 0
        self._bounce = large_pages(WINDOW_BYTES + 2 * self._block)
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
        os.ftruncate(self._descriptor, nbytes)
        os.fsync(self._descriptor)
        return nbytes

    def close(self) -> None:
        os.close(self._descriptor)

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
        write_all_at(self._descriptor, self._pieces, self._written, block=self._block)
        self._written += nbytes
        self._pieces.clear()
        rest = self._filled - self._listed
        self._bounce[:rest] = self._bounce[self._listed : self._filled]
        self._listed, self._filled = 0, rest
