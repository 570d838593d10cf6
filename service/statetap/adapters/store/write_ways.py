"""Which way to write is the fastest one on a file system: past the page cache, or through it. Measured once, at its first use."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from threading import Lock

from statetap.adapters.store.direct_io import allocate, direct_alignment
from statetap.adapters.store.durable_files import write_all_at
from statetap.adapters.store.object_files import WriteWay, fill

_TRIAL_BYTES = 32 << 20
_LEAST_FREE_BYTES = 256 << 20
# By medians of so many trials, each from other memory: how scattered its pages are is a matter of luck, and others use the disk.
_TRIALS = 3
# Of two ways the second must be clearly faster. Straight past the page cache copies nothing; staged takes no page cache.
_CLEARLY = 1.15
_CACHED = WriteWay()
# Not a place for files, but the kind of memory that is measured.
_SHARED_MEMORY = "/dev/shm"  # noqa: S108


class WriteWays:
    """What was measured, by file system. May be called from any thread."""

    def __init__(self) -> None:
        self._measured: dict[int, WriteWay] = {}
        self._lock = Lock()

    def of(self, directory: Path) -> WriteWay:
        """How to write below `directory`.

        A disk that is nearly full is measured another time: others need what the trial would take.

        Raises:
            OSError: nothing can be written there.
        """
        device = directory.stat().st_dev
        with self._lock:
            if device not in self._measured:
                if shutil.disk_usage(directory).free < _LEAST_FREE_BYTES:
                    return _CACHED
                self._measured[device] = _measure(directory)
            return self._measured[device]


# Of the process: file systems do not change their ways between two writers.
ways = WriteWays()


def past_the_page_cache(directory: Path) -> list[WriteWay]:
    """The ways that a file system has besides its page cache, the one that costs least first."""
    # It has no name, so that nobody finds it, and a kill leaves nothing.
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        alignment = direct_alignment(file.fileno())
        if alignment is None or not _set_direct(file.fileno(), on=True):
            return []
        try:
            _seconds(file.fileno(), memoryview(mmap.mmap(-1, alignment.offset)), WriteWay(alignment))
        except OSError as e:
            if e.errno == errno.EINVAL:
                return []
            raise
    return [WriteWay(alignment), WriteWay(alignment, staged=True)]


def _measure(directory: Path) -> WriteWay:
    candidates = [*past_the_page_cache(directory), _CACHED]
    if len(candidates) == 1:
        return _CACHED
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        seconds: dict[WriteWay, list[float]] = {way: [] for way in candidates}
        for _ in range(_TRIALS):
            data = _like_dumps()
            for way in candidates:
                _set_direct(file.fileno(), on=way.alignment is not None)
                seconds[way].append(_seconds(file.fileno(), data, way))
    best = candidates[0]
    for way in candidates[1:]:
        if median(seconds[way]) * _CLEARLY < median(seconds[best]):
            best = way
    return best


def _like_dumps() -> memoryview:
    """Bytes of a file in /dev/shm, mapped: in pages of the size that dumps have there."""
    block = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=_SHARED_MEMORY, buffering=0) as file:
            # Written, not stored to a mapping: that would end the process where there is no room.
            for start in range(0, _TRIAL_BYTES, len(block)):
                write_all_at(file.fileno(), [memoryview(block)], start)
            return memoryview(mmap.mmap(file.fileno(), _TRIAL_BYTES))
    except OSError:
        return memoryview(mmap.mmap(-1, _TRIAL_BYTES))


def _seconds(descriptor: int, data: memoryview, way: WriteWay) -> float:
    os.ftruncate(descriptor, 0)
    began = time.perf_counter()
    allocate(descriptor, len(data))
    file = fill(descriptor, way)
    for start in range(0, len(data), file.most_bytes):
        file.write([data[start : start + file.most_bytes]])
    file.finish()
    return time.perf_counter() - began


def _set_direct(descriptor: int, *, on: bool) -> bool:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True
