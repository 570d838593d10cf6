"""Which way to write is the faster one on a file system: past the page cache, or through it. Measured once, at its first use."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import time
from pathlib import Path
from threading import Lock

from statetap.adapters.store.direct_io import Alignment, allocate, direct_alignment
from statetap.adapters.store.durable_files import write_all_at

_TRIAL_BYTES = 32 << 20
_LEAST_FREE_BYTES = 8 * _TRIAL_BYTES
# So often the page cache must win, without a break.
_TRIALS = 3
# Past the page cache takes a fraction of the processor's time and no memory: the other way must be clearly faster.
_CLEARLY = 1.25


class WriteWays:
    """What was measured, by file system. May be called from any thread."""

    def __init__(self) -> None:
        self._measured: dict[int, Alignment | None] = {}
        self._lock = Lock()

    def of(self, directory: Path) -> Alignment | None:
        """How to write below `directory`: O_DIRECT with that alignment, or None: through the page cache.

        A disk that is nearly full is measured another time: others need what the trial would take.

        Raises:
            OSError: nothing can be written there.
        """
        device = directory.stat().st_dev
        with self._lock:
            if device not in self._measured:
                if shutil.disk_usage(directory).free < _LEAST_FREE_BYTES:
                    return None
                self._measured[device] = _measure(directory)
            return self._measured[device]


# Of the process: file systems do not change their ways between two writers.
ways = WriteWays()


def _measure(directory: Path) -> Alignment | None:
    # It has no name, so that nobody finds it, and a kill leaves nothing.
    with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        alignment = direct_alignment(file.fileno())
        if alignment is None or not _set_direct(file.fileno(), on=True):
            return None
        data = mmap.mmap(-1, _TRIAL_BYTES)
        block = os.urandom(1 << 20)
        # Piece by piece: the event loop does not wait for the whole of it.
        for start in range(0, _TRIAL_BYTES, len(block)):
            data[start : start + len(block)] = block
        for _ in range(_TRIALS):
            seconds = {}
            for on in (True, False):
                _set_direct(file.fileno(), on=on)
                try:
                    seconds[on] = _seconds(file.fileno(), data)
                except OSError as e:
                    if on and e.errno == errno.EINVAL:
                        return None
                    raise
            if seconds[True] < seconds[False] * _CLEARLY:
                return alignment
        return None


def _seconds(descriptor: int, data: mmap.mmap) -> float:
    os.ftruncate(descriptor, 0)
    began = time.perf_counter()
    allocate(descriptor, len(data))
    write_all_at(descriptor, [memoryview(data)], 0)
    os.fsync(descriptor)
    return time.perf_counter() - began


def _set_direct(descriptor: int, *, on: bool) -> bool:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True
