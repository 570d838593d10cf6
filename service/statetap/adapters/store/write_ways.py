"""Which way to write is the fastest one on a file system: past the page cache, or through it. Measured once, at its first use."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from threading import Lock
from typing import BinaryIO

from statetap.adapters.store.direct_io import allocate, direct_alignment
from statetap.adapters.store.durable_files import write_all_at
from statetap.adapters.store.object_files import WINDOW_BYTES, WriteWay, fill
from statetap.adapters.store.shard_assembly import in_windows

_TRIAL_BYTES = 32 << 20
_LEAST_FREE_BYTES = 256 << 20
# By medians of so many trials, each from other memory: how scattered its pages are is a matter of luck, and others use the disk.
_TRIALS = 3
# Of two ways the second must be clearly faster. Straight past the page cache copies nothing; staged takes no page cache.
_CLEARLY = 1.15
_CACHED = WriteWay()
_REFUSED = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# Not a place for files, but the kind of memory that is measured.
_SHARED_MEMORY = "/dev/shm"  # noqa: S108


class WriteWays:
    """What was measured, by file system. May be called from any thread."""

    def __init__(self) -> None:
        self._measured: dict[int, WriteWay] = {}
        self._measuring: defaultdict[int, Lock] = defaultdict(Lock)

    def of(self, directory: Path) -> WriteWay:
        """How to write below `directory`.

        A disk that is nearly full is measured another time: others need what the trial would take.

        Raises:
            OSError: nothing can be written there.
        """
        device = directory.stat().st_dev
        if (known := self._measured.get(device)) is not None:
            return known
        # A lock for each file system: a slow one holds up nobody else.
        with self._measuring[device]:
            if device not in self._measured:
                if shutil.disk_usage(directory).free < _LEAST_FREE_BYTES:
                    return _CACHED
                try:
                    self._measured[device] = _measure(directory)
                except OSError as error:
                    if error.errno not in _FULL:
                        raise
                    # A quota, above all: there may be room for a shard.
                    return _CACHED
            return self._measured[device]


# Of the process: file systems do not change their ways between two writers.
ways = WriteWays()


def past_the_page_cache(directory: Path) -> list[WriteWay]:
    """The ways that a file system has besides its page cache, the one that costs least first."""
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        alignment = direct_alignment(file.fileno())
        if alignment is None or not _set_direct(file.fileno(), on=True):
            return []
        candidates = (WriteWay(alignment), WriteWay(alignment, staged=True))
        data = memoryview(mmap.mmap(-1, WINDOW_BYTES))
        return [way for way in candidates if _takes(file.fileno(), data, way)]


def _takes(descriptor: int, data: memoryview, way: WriteWay) -> bool:
    try:
        _seconds(descriptor, data, way)
    except OSError as error:
        if error.errno in _REFUSED:
            return False
        raise
    return True


def _measure(directory: Path) -> WriteWay:
    candidates = [*past_the_page_cache(directory), _CACHED]
    if len(candidates) == 1:
        return _CACHED
    # A file without a name, as soon as it can be: nobody finds it, and a kill leaves nothing.
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        seconds: dict[WriteWay, list[float]] = {way: [] for way in candidates}
        for _ in range(_TRIALS):
            with _like_dumps() as data:
                for way in candidates:
                    _set_direct(file.fileno(), on=way.alignment is not None)
                    seconds[way].append(_seconds(file.fileno(), data, way))
            # Or the next ones would be made beside it.
            del data
    best = candidates[0]
    for way in candidates[1:]:
        if median(seconds[way]) * _CLEARLY < median(seconds[best]):
            best = way
    return best


@contextmanager
def _like_dumps() -> Iterator[memoryview]:
    """Random bytes in mapped pages: of a file in /dev/shm, as large as dumps have them there, if that is not needed by others."""
    block = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=_SHARED_MEMORY, buffering=0) if _has_room(_SHARED_MEMORY) else _private_file() as file:
        # Sized first: a tmpfs makes large pages of what is known to be large.
        os.ftruncate(file.fileno(), _TRIAL_BYTES)
        # Written, not stored to a mapping: that would end the process where there is no room.
        for start in range(0, _TRIAL_BYTES, len(block)):
            write_all_at(file.fileno(), [memoryview(block)], start)
        yield memoryview(mmap.mmap(file.fileno(), _TRIAL_BYTES))


def _private_file() -> BinaryIO:
    """A file in memory that takes no room from /dev/shm."""
    return os.fdopen(os.memfd_create("statetap-trial", os.MFD_CLOEXEC), "r+b", buffering=0)


def _has_room(folder: str) -> bool:
    try:
        return shutil.disk_usage(folder).free >= _LEAST_FREE_BYTES and os.access(folder, os.W_OK)
    except OSError:
        return False


def _seconds(descriptor: int, data: memoryview, way: WriteWay) -> float:
    os.ftruncate(descriptor, 0)
    began = time.perf_counter()
    allocate(descriptor, len(data))
    file = fill(descriptor, way)
    for window in in_windows(data):
        file.write([window])
    file.finish()
    return time.perf_counter() - began


def _set_direct(descriptor: int, *, on: bool) -> bool:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True
