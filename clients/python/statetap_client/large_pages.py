"""Memory in large pages: fewer page faults, and larger requests to a disk.

A disk takes a limited number of pieces in one request (virtio: 254). Of pages of 4 KiB, which lie anywhere, those are a megabyte
at most; of large ones, as much as the disk takes at all.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

LARGE_PAGE_BYTES = 2 << 20


def large_pages(nbytes: int) -> NDArray[np.uint8]:
    """Memory of this process alone, zero, that begins where a large page does, and is made of such where the system has them."""
    # Private: of shared memory Linux makes no large pages, unless the whole machine is set to. Whoever forks while it is read
    # into by O_DIRECT must not write to it meanwhile: open(2).
    pages = mmap.mmap(-1, nbytes + LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(pages, np.uint8)
    start = -memory.ctypes.data % LARGE_PAGE_BYTES
    # What is less than a large page at the end would take one all the same.
    whole = nbytes // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
    if whole:
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return memory[start : start + nbytes]
